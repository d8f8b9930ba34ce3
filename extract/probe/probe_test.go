package probe

import "testing"

func TestAProbeComparesRowsThatWereNotLent(t *testing.T) {
	for _, n := range []int{2, 9, 511, 512, 513, 4000} {
		for _, lent := range []int{0, 1, n / 2, max(0, n-9), n - 1} {
			rows := ownRows(n, lent)
			if want := min(n-max(1, lent), probeEdge); len(rows) < want || rows[0] < lent || rows[len(rows)-1] >= n {
				t.Errorf("of %d rows, %d of them lent, rows %v are compared; want %d or more", n, lent, rows, want)
			}
		}
	}
}
