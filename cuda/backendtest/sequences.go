package backendtest

import (
	"fmt"
	"math"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// testManySequences is attention as targets ask for it: the keys of several
// sequences lie in one context, each from a multiple of [cuda.KeyTile], and a
// row sees those of its own sequence up to itself, or the last of them.
func testSequences(t *testing.T, l *lab, shape [3]int, window int, tolerance float64) {
	qHeads, kvHeads, dim := shape[0], shape[1], shape[2]
	lengths, past := []int{1, 20, 16, 90, 3, 1}, []int{64, 0, 70, 30, 0, 9}
	rows, ctx := 0, 0
	var spans []cuda.Span
	var starts []int // of each sequence's rows
	for i, n := range lengths {
		starts = append(starts, rows)
		for j := range n {
			hi := ctx + past[i] + j + 1
			lo := ctx
			if window > 0 {
				lo = max(lo, hi-window)
			}
			spans = append(spans, cuda.Span{CtxLo: int32(lo), CtxHi: int32(hi)})
		}
		rows += n
		ctx += (past[i] + n + cuda.KeyTile - 1) / cuda.KeyTile * cuda.KeyTile
	}
	a := newAttending(rows, ctx, 0, qHeads, kvHeads, dim)
	for _, v := range []*[]float32{&a.q, &a.ctxK, &a.ctxV} {
		*v = rounded(*v)
	}
	a.spans = spans
	cols, kv := qHeads*dim, kvHeads*dim
	want, clean := a.oracle(), a.run(t, l, 0, rows)
	near16(t, clean, want, nil, tolerance)
	t.Run("invariance", func(t *testing.T) { rowInvariant(t, l, rows, a.run) })
	t.Run("a sequence alone, elsewhere", func(t *testing.T) {
		lo, hi := starts[3], starts[4]
		b := *a
		first := int(a.spans[lo].CtxHi) - 1 - past[3]
		first -= first % cuda.KeyTile
		b.q, b.spans = slice(a.q, cols, lo, hi), nil
		b.ctxK = append(make([]float32, cuda.KeyTile*kv), a.ctxK[first*kv:]...)
		b.ctxV = append(make([]float32, cuda.KeyTile*kv), a.ctxV[first*kv:]...)
		for _, s := range a.spans[lo:hi] {
			move := int32(cuda.KeyTile - first)
			b.spans = append(b.spans, cuda.Span{CtxLo: s.CtxLo + move, CtxHi: s.CtxHi + move})
		}
		same(t, "rows", b.run(t, l, 0, hi-lo), slice(clean, cols, lo, hi))
	})
	t.Run("keys outside the span do not matter, be they NaN", func(t *testing.T) {
		// In the middle of the long sequence, and after the end of another.
		middle, after := int(a.spans[starts[3]+40].CtxHi)-1, int(a.spans[starts[2]+15].CtxHi)
		for _, key := range []int{middle, after} {
			for c := range kv {
				a.ctxK[key*kv+c], a.ctxV[key*kv+c] = nan, inf
			}
		}
		a.ctxV[(middle+1)*kv], a.ctxV[(middle+1)*kv+1] = nan, -inf // and a value alone
		dirty := a.run(t, l, 0, rows)
		for i, s := range a.spans {
			sees := func(key int) bool { return int(s.CtxLo) <= key && key < int(s.CtxHi) }
			row := slice(dirty, cols, i, i+1)
			switch {
			case !sees(middle) && !sees(middle+1):
				same(t, fmt.Sprintf("row %d", i), row, slice(clean, cols, i, i+1))
			case sees(middle):
				for c, v := range row {
					if v == v {
						t.Fatalf("row %d sees a NaN and has %v in column %d", i, v, c)
					}
				}
			default:
				for c, v := range row[2:dim] {
					if v != v {
						t.Fatalf("row %d has NaN in column %d, which sees none", i, c+2)
					}
				}
				if !(row[0] != row[0]) || row[1] == row[1] && !math.IsInf(float64(row[1]), -1) {
					t.Fatalf("row %d sees NaN and -Inf in two columns and has %v there", i, row[:2])
				}
			}
		}
	})
}
