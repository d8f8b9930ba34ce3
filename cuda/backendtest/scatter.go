package backendtest

import (
	"strconv"
	"testing"
)

func testScatter(t *testing.T, l *lab) {
	for _, lay := range layouts {
		t.Run(lay.name, func(t *testing.T) {
			l := l.in(lay)
			for _, e := range edges() {
				t.Run(strconv.Itoa(e), func(t *testing.T) {
					src, want := random16(1, e, e), random16(2, e+3, e)
					src[0] = nan
					dst := l.put(t, want, e)
					rows := make([]int32, e)
					for i := range rows {
						rows[i] = int32(e + 2 - i)
						copy(want[(e+2-i)*e:], slice(src, e, i, i+1))
					}
					must(t, l.d.ScatterRows(dst, l.put(t, src, e), rows))
					same(t, "dst", l.get(t, dst), want)
				})
			}
		})
	}
	t.Run("nothing in, nothing out", func(t *testing.T) {
		must(t, l.d.ScatterRows(l.room(t, 3, 8), l.room(t, 0, 8), nil))
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		dst, src := l.room(t, 3, 8), l.room(t, 2, 8)
		refused(t, "count", l.d.ScatterRows(dst, src, []int32{1}))
		refused(t, "width", l.d.ScatterRows(dst, l.room(t, 2, 7), []int32{1, 2}))
		refused(t, "far row", l.d.ScatterRows(dst, src, []int32{1, 3}))
		refused(t, "negative row", l.d.ScatterRows(dst, src, []int32{-1, 0}))
	})
}
