package probe

import (
	"slices"
	"testing"
)

func TestAProbeLooksAtRowsThatWereNotLent(t *testing.T) {
	for _, n := range []int{2, 9, 511, 512, 513, 4000} {
		for _, lent := range []int{0, 1, n / 2, n - 9, n - 1} {
			rows := probeRows(window(n, max(0, lent)))
			if len(rows) == 0 || rows[0] != 1 || rows[len(rows)-1] < lent || rows[len(rows)-1] >= n {
				t.Errorf("of %d rows, %d of them lent, rows %v are compared", n, lent, rows)
			}
			if own := slices.IndexFunc(rows, func(r int) bool { return r >= lent }); len(rows)-own < min(n-max(1, lent), probeEdge) {
				t.Errorf("of %d rows, %d of them lent, only %d own ones are compared", n, lent, len(rows)-own)
			}
		}
	}
}
