package backendtest

import (
	"strconv"
	"testing"
)

func testGather(t *testing.T, l *lab) {
	for _, lay := range layouts {
		t.Run(lay.name, func(t *testing.T) {
			l := l.in(lay)
			for _, e := range edges() {
				t.Run(strconv.Itoa(e), func(t *testing.T) {
					src := random(1, 40, e)
					src[3*e] = nan
					var rows []int32
					var want []float32
					for i := range e {
						r := int32(i * 3 % 40)
						rows = append(rows, r)
						want = append(want, slice(src, e, int(r), int(r)+1)...)
					}
					dst := l.room(t, len(rows), e)
					must(t, l.d.GatherRows(dst, l.put(t, src, e), rows))
					same(t, "dst", l.get(t, dst), want)
				})
			}
		})
	}
	t.Run("nothing in, nothing out", func(t *testing.T) {
		must(t, l.d.GatherRows(l.room(t, 0, 8), l.room(t, 3, 8), nil))
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		src, dst := l.room(t, 3, 8), l.room(t, 2, 8)
		refused(t, "count", l.d.GatherRows(dst, src, []int32{1}))
		refused(t, "width", l.d.GatherRows(l.room(t, 2, 7), src, []int32{1, 2}))
		refused(t, "far row", l.d.GatherRows(dst, src, []int32{1, 3}))
		refused(t, "negative row", l.d.GatherRows(dst, src, []int32{-1, 0}))
	})
}
