package backendtest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

const attentionTolerance = 3e-6

// attending is a call of Attention in plain slices.
type attending struct {
	q, ctxK, ctxV, blkK, blkV []float32
	spans                     []cuda.Span
	qHeads, kvHeads, dim      int
	block                     int
	scale                     float32
}

func newAttending(m, ctx, blk, qHeads, kvHeads, dim int) *attending {
	return &attending{
		q:    random(1, m, qHeads*dim),
		ctxK: random(2, ctx, kvHeads*dim), ctxV: random(3, ctx, kvHeads*dim),
		blkK: random(4, blk, kvHeads*dim), blkV: random(5, blk, kvHeads*dim),
		spans: make([]cuda.Span, m), qHeads: qHeads, kvHeads: kvHeads, dim: dim,
		scale: float32(1 / math.Sqrt(float64(dim))),
	}
}

// run computes query rows lo..hi-1 on the device.
func (a *attending) run(t testing.TB, l *lab, lo, hi int) []float32 {
	t.Helper()
	cols, kv := a.qHeads*a.dim, a.kvHeads*a.dim
	dst := l.room(t, hi-lo, cols)
	must(t, l.d.Attention(dst, cuda.AttentionArgs{
		Q:    l.put(t, slice(a.q, cols, lo, hi), cols),
		CtxK: l.put(t, a.ctxK, kv), CtxV: l.put(t, a.ctxV, kv),
		BlkK: l.put(t, a.blkK, kv), BlkV: l.put(t, a.blkV, kv),
		Spans: a.spans[lo:hi], Block: a.block, QHeads: a.qHeads, KVHeads: a.kvHeads, HeadDim: a.dim, Scale: a.scale,
	}))
	return l.get(t, dst)
}

// oracle is softmax(q·k·scale)·v over the keys of each row's span.
func (a *attending) oracle() []float64 {
	cols, kv := a.qHeads*a.dim, a.kvHeads*a.dim
	out := make([]float64, len(a.q))
	for i, s := range a.spans {
		for h := range a.qHeads {
			left := h / (a.qHeads / a.kvHeads) * a.dim
			var scores []float64
			var values [][]float32
			see := func(k, v []float32, lo, hi int32) {
				for j := int(lo); j < int(hi); j++ {
					var dot float64
					for c := range a.dim {
						dot += float64(a.q[i*cols+h*a.dim+c]) * float64(k[j*kv+left+c])
					}
					scores = append(scores, dot*float64(a.scale))
					values = append(values, v[j*kv+left:j*kv+left+a.dim])
				}
			}
			see(a.ctxK, a.ctxV, s.CtxLo, s.CtxHi)
			see(a.blkK, a.blkV, s.BlkLo, s.BlkHi)
			top := math.Inf(-1)
			for _, v := range scores {
				top = math.Max(top, v)
			}
			var sum float64
			for j := range scores {
				scores[j] = math.Exp(scores[j] - top)
				sum += scores[j]
			}
			for j, p := range scores {
				for c, v := range values[j] {
					out[i*cols+h*a.dim+c] += p / sum * float64(v)
				}
			}
		}
	}
	return out
}

func testAttention(t *testing.T, l *lab) {
	for _, lay := range layouts {
		t.Run(lay.name, func(t *testing.T) {
			for _, e := range edges() {
				t.Run(strconv.Itoa(e), func(t *testing.T) {
					keys := newAttending(3, e, e, 2, 1, 16)
					for i := range keys.spans {
						keys.spans[i] = cuda.Span{CtxHi: int32(e), BlkHi: int32(e)}
					}
					near(t, keys.run(t, l.in(lay), 0, 3), keys.oracle(), nil, attentionTolerance)

					rows := newAttending(e, e, 0, 4, 2, 8)
					for i := range rows.spans { // causal
						rows.spans[i] = cuda.Span{CtxHi: int32(i + 1)}
					}
					near(t, rows.run(t, l.in(lay), 0, e), rows.oracle(), nil, attentionTolerance)

					dims := newAttending(4, 5, 6, 2, 2, e)
					for i := range dims.spans {
						dims.spans[i] = cuda.Span{CtxLo: 1, CtxHi: 5, BlkHi: int32(i + 1)}
					}
					near(t, dims.run(t, l.in(lay), 0, 4), dims.oracle(), nil, attentionTolerance)
				})
			}
		})
	}
	t.Run("a row that sees nothing is zero", func(t *testing.T) {
		a := newAttending(5, 4, 4, 2, 1, 8)
		a.spans[1] = cuda.Span{CtxLo: 2, CtxHi: 4}
		a.spans[3] = cuda.Span{CtxLo: 3, CtxHi: 3, BlkLo: 2, BlkHi: 1}
		near(t, a.run(t, l, 0, 5), a.oracle(), nil, attentionTolerance)
		none := newAttending(2, 0, 0, 2, 1, 8)
		same(t, "no keys at all", none.run(t, l, 0, 2), make([]float32, 2*16))
	})
	t.Run("nothing in, nothing out", func(t *testing.T) {
		newAttending(0, 4, 4, 2, 1, 8).run(t, l, 0, 0)
	})
	t.Run("keys outside the span do not matter, be they NaN", func(t *testing.T) {
		a := newAttending(20, 40, 20, 4, 2, 16)
		for i := range a.spans {
			a.spans[i] = cuda.Span{CtxLo: int32(i / 2), CtxHi: int32(20 + i/3), BlkLo: int32(i / 4 * 4), BlkHi: int32(i + 1)}
		}
		clean := a.run(t, l, 0, 20)
		for c := range 2 * 16 {
			a.ctxK[30*32+c], a.ctxV[30*32+c] = nan, inf
			a.blkK[19*32+c], a.blkV[19*32+c] = inf, nan
		}
		dirty := a.run(t, l, 0, 20)
		for i, s := range a.spans {
			if s.CtxHi <= 30 && s.BlkHi <= 19 {
				same(t, fmt.Sprintf("row %d", i), slice(dirty, 64, i, i+1), slice(clean, 64, i, i+1))
			} else if v := dirty[i*64]; v == v {
				t.Errorf("row %d sees a NaN and is %v", i, v)
			}
		}
	})
	t.Run("large scores do not overflow", func(t *testing.T) {
		a := newAttending(3, 50, 0, 1, 1, 8)
		a.scale = 100
		for i := range a.spans {
			a.spans[i].CtxHi = 50
		}
		// Scores reach hundreds: their rounding alone is 1e-5 in the exponent.
		near(t, a.run(t, l, 0, 3), a.oracle(), nil, 2e-4)
	})
	t.Run("invariance", func(t *testing.T) {
		rng := rand.New(rand.NewPCG(7, 7))
		a := newAttending(150, 200, 150, 4, 2, 24)
		for i := range a.spans {
			switch {
			case i < 64: // blocks of 16 that share their context
				a.spans[i] = cuda.Span{CtxHi: int32(3 * (i / 16 * 16)), BlkLo: int32(i / 16 * 16), BlkHi: int32(i/16*16 + 16)}
			case i < 100: // causal
				a.spans[i] = cuda.Span{CtxHi: int32(i)}
			default:
				lo, blk := rng.Int32N(200), rng.Int32N(150)
				a.spans[i] = cuda.Span{CtxLo: lo, CtxHi: lo + rng.Int32N(201-lo), BlkLo: blk, BlkHi: blk + rng.Int32N(151-blk)}
			}
		}
		near(t, a.run(t, l, 0, 150), a.oracle(), nil, attentionTolerance)
		rowInvariant(t, l, 150, a.run)
	})
	t.Run("sequences side by side", func(t *testing.T) { testSequences(t, l, [3]int{4, 2, 16}, 0, attentionTolerance) })
	t.Run("sequences side by side, window 50", func(t *testing.T) { testSequences(t, l, [3]int{4, 2, 16}, 50, attentionTolerance) })
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		kv := l.room(t, 5, 16)
		good := func() cuda.AttentionArgs {
			return cuda.AttentionArgs{
				Q: l.room(t, 3, 32), CtxK: kv, CtxV: kv, BlkK: kv, BlkV: kv, Spans: make([]cuda.Span, 3),
				QHeads: 4, KVHeads: 2, HeadDim: 8, Scale: 1,
			}
		}
		dst := l.room(t, 3, 32)
		must(t, l.d.Attention(dst, good()))
		for what, spoil := range map[string]func(*cuda.AttentionArgs){
			"q":            func(a *cuda.AttentionArgs) { a.Q = l.room(t, 3, 31) },
			"heads":        func(a *cuda.AttentionArgs) { a.KVHeads = 3 },
			"no heads":     func(a *cuda.AttentionArgs) { a.KVHeads = 0 },
			"no dim":       func(a *cuda.AttentionArgs) { a.HeadDim = 0 },
			"k and v":      func(a *cuda.AttentionArgs) { a.CtxV = l.room(t, 4, 16) },
			"key width":    func(a *cuda.AttentionArgs) { a.BlkK, a.BlkV = l.room(t, 5, 8), l.room(t, 5, 8) },
			"few spans":    func(a *cuda.AttentionArgs) { a.Spans = a.Spans[:2] },
			"far span":     func(a *cuda.AttentionArgs) { a.Spans[1].CtxHi = 6 },
			"early span":   func(a *cuda.AttentionArgs) { a.Spans[1] = cuda.Span{BlkLo: -1, BlkHi: 2} },
			"missing keys": func(a *cuda.AttentionArgs) { a.BlkK, a.BlkV = cuda.Tensor{}, cuda.Tensor{}; a.Spans[2].BlkHi = 1 },
		} {
			args := good()
			spoil(&args)
			refused(t, what, l.d.Attention(dst, args))
		}
		refused(t, "dst", l.d.Attention(l.room(t, 2, 32), good()))
	})
}
