package backendtest

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// RunBF16 is the suite for devices that keep bf16 values and sum in float32.
// Operands are rounded before the oracle sees them, so that what is judged is
// the operation; a result may be off by twice what rounding it to bf16 alone
// costs, and by what the suite allows float32 sums. Row invariance holds to
// the bit, as in float32.
func RunBF16(t *testing.T, open Opener) {
	runParts(t, open, []part{
		{"Grow", testGrow},
		{"Gemm", testGemmBF16},
		{"Gemm of large weights", testGemmOfLargeWeights},
		{"RMSNorm", testRMSNormBF16},
		{"NormRoPE", testNormRoPEBF16},
		{"Attention", testAttentionBF16},
		{"GateMul", testGateMulBF16},
		{"GatherRows", testGatherBF16},
		{"ScatterRows", testScatter},
		{"Load", testLoad},
		{"Fetch", testFetch},
		{"Conv", testConvBF16},
		{"DeltaRule", testDeltaRuleBF16},
		{"Head", testHeadBF16},
		{"Similarity", testSimilarity},
		{"Limits", testLimits},
	})
}

// halfULP is the largest relative error of rounding to bf16.
const halfULP = 1. / 256 / 2

// rounded is values as bf16 holds them, to nearest, ties to even.
func rounded(values []float32) []float32 {
	out := make([]float32, len(values))
	for i, v := range values {
		bits := math.Float32bits(v)
		out[i] = math.Float32frombits((bits + 0x7fff + bits>>16&1) &^ 0xffff)
	}
	return out
}

// random16 is random, rounded.
func random16(seed uint64, rows, cols int) []float32 { return rounded(random(seed, rows, cols)) }

// near16 compares with the oracle: a value may differ by twice its rounding
// and by tol times its scale, which is nil for 1.
func near16(t testing.TB, got []float32, want, scale []float64, tol float64) {
	t.Helper()
	allowed := make([]float64, len(want))
	for i, w := range want {
		size := 1.
		if scale != nil {
			size = scale[i]
		}
		allowed[i] = 2*halfULP*math.Abs(w) + tol*size
	}
	near(t, got, want, allowed, 1)
}

func testGemmBF16(t *testing.T, l *lab) {
	for _, lay := range layouts {
		l := l.in(lay)
		t.Run(lay.name, func(t *testing.T) {
			for _, s := range [][3]int{{1, 1, 1}, {3, 5, 7}, {17, 33, 40}, {128, 129, 64}, {65, 256, 512}, {300, 7, 96}} {
				for _, add := range []bool{false, true} {
					t.Run(fmt.Sprintf("%v, add %v", s, add), func(t *testing.T) {
						m, n, k := s[0], s[1], s[2]
						a, w := random16(1, m, k), random16(2, n, k)
						var old []float32
						dst := l.room(t, m, n)
						if add {
							old = random16(3, m, n)
							dst = l.put(t, old, n)
						}
						must(t, l.d.Gemm(dst, l.put(t, a, k), l.put(t, w, k), add))
						want, scale := gemmOracle(a, w, old, m, n, k)
						for i := range old {
							// A plain version rounds the product before it adds.
							scale[i] += 2 * halfULP * math.Abs(want[i]-float64(old[i])) / gemmTolerance
						}
						near16(t, l.get(t, dst), want, scale, gemmTolerance)
					})
				}
			}
		})
	}
	for _, shape := range []struct{ n, k int }{{65, 130}, {260, 131}, {256, 256}, {5, 67}, {1024, 1536}} {
		t.Run(fmt.Sprintf("%d x %d", shape.n, shape.k), func(t *testing.T) {
			const rows = 150
			a, w, old := random16(1, rows, shape.k), random16(2, shape.n, shape.k), random16(3, rows, shape.n)
			for _, add := range []bool{false, true} {
				rowInvariant(t, l, rows, func(t testing.TB, l *lab, lo, hi int) []float32 {
					dst := l.put(t, slice(old, shape.n, lo, hi), shape.n)
					must(t, l.d.Gemm(dst, l.put(t, slice(a, shape.k, lo, hi), shape.k), l.put(t, w, shape.k), add))
					return l.get(t, dst)
				})
			}
		})
	}
}

// testGemmOfLargeWeights: a device may multiply few rows in another way than
// many, where the weight is large enough for that to pay.
func testGemmOfLargeWeights(t *testing.T, l *lab) {
	rows, n, k := 1100, 2048, 2304
	if testing.Short() {
		n, k = 128, 192 // a large one takes minutes in plain kernels under a tool
	}
	x, w, old := l.put(t, random16(1, rows, k), k), l.put(t, random16(2, n, k), k), random16(3, rows, n)
	for _, add := range []bool{false, true} {
		product := func(lo, hi int) []float32 {
			dst := l.put(t, slice(old, n, lo, hi), n)
			must(t, l.d.Gemm(dst, x.RowRange(lo, hi), w, add))
			return l.get(t, dst)
		}
		whole := product(0, rows)
		for _, part := range [][2]int{{0, 1}, {5, 25}, {0, 33}, {1000, 1100}, {300, 500}, {100, 580}, {1, 900}} {
			same(t, fmt.Sprintf("rows %v, add %v", part, add), product(part[0], part[1]), slice(whole, n, part[0], part[1]))
		}
	}
}

func testRMSNormBF16(t *testing.T, l *lab) {
	for _, lay := range layouts {
		for _, e := range edges() {
			x, w := random16(1, 5, e), random16(2, 1, e)
			l := l.in(lay)
			dst := l.room(t, 5, e)
			must(t, l.d.RMSNorm(dst, l.put(t, x, e), l.put(t, w, e), 1e-5, 1))
			want, scale := rmsnormOracle(x, w, e, 1e-5, 1)
			near16(t, l.get(t, dst), want, scale, rmsnormTolerance)
		}
	}
}

func testAttentionBF16(t *testing.T, l *lab) {
	// draw is newAttending, rounded, with the blocks of a drafter.
	draw := func(m, ctx, qHeads, kvHeads, dim int) *attending {
		a := newAttending(m, ctx, m, qHeads, kvHeads, dim)
		for _, v := range []*[]float32{&a.q, &a.ctxK, &a.ctxV, &a.blkK, &a.blkV} {
			*v = rounded(*v)
		}
		for i := range a.spans {
			block := int32(i / 16 * 16)
			a.spans[i] = cuda.Span{CtxHi: min(block*3, int32(ctx)), BlkLo: block, BlkHi: min(block+16, int32(m))}
			switch i / 16 % 3 {
			case 1: // causal
				a.spans[i].BlkHi = int32(i + 1)
			case 2: // sliding
				a.spans[i].CtxLo = max(0, a.spans[i].CtxHi-37)
			}
		}
		return a
	}
	for _, lay := range layouts {
		for _, s := range [][5]int{{16, 40, 2, 1, 16}, {50, 100, 4, 2, 24}, {64, 130, 8, 2, 64}, {100, 300, 4, 1, 128}} {
			t.Run(fmt.Sprintf("%s %v", lay.name, s), func(t *testing.T) {
				a := draw(s[0], s[1], s[2], s[3], s[4])
				// Weights that are rounded on their way to the values cost as
				// much as rounding the values would.
				near16(t, a.run(t, l.in(lay), 0, s[0]), a.oracle(), nil, attentionTolerance+2*halfULP)
			})
		}
	}
	// The shape of large drafters, whose blocks of 16 rows come together.
	blocks := func(m, ctx int) *attending {
		a := draw(m, ctx, 8, 2, 128)
		a.block = 16
		return a
	}
	for _, lay := range layouts {
		for _, s := range [][2]int{{16, 0}, {16, 40}, {48, 130}, {160, 500}} {
			t.Run(fmt.Sprintf("blocks of 16, %s %v", lay.name, s), func(t *testing.T) {
				a := blocks(s[0], s[1])
				near16(t, a.run(t, l.in(lay), 0, s[0]), a.oracle(), nil, attentionTolerance+2*halfULP)
			})
		}
	}
	t.Run("blocks of 16, keys outside the span do not matter, be they NaN", func(t *testing.T) {
		a := blocks(160, 500)
		want := a.oracle()
		for c := range 2 * 128 {
			a.ctxK[100*256+c], a.ctxV[100*256+c] = nan, inf
			a.blkK[159*256+c], a.blkV[159*256+c] = inf, nan
		}
		got := a.run(t, l, 0, 160)
		for i, s := range a.spans {
			if (s.CtxLo > 100 || s.CtxHi <= 100) && s.BlkHi <= 159 {
				near16(t, slice(got, 1024, i, i+1), want[i*1024:(i+1)*1024], nil, attentionTolerance+2*halfULP)
			} else if v := got[i*1024]; v == v {
				t.Errorf("row %d sees a NaN and is %v", i, v)
			}
		}
	})
	t.Run("blocks of 16, invariance", func(t *testing.T) {
		a := blocks(160, 500)
		whole := a.run(t, l, 0, 160)
		same(t, "again", a.run(t, l, 0, 160), whole)
		for _, lay := range layouts {
			same(t, lay.name, a.run(t, l.in(lay), 0, 160), whole)
		}
		for _, at := range []int{16, 48, 144} {
			same(t, fmt.Sprint("rows from ", at), a.run(t, l, at, 160), whole[at*1024:])
			same(t, fmt.Sprint("blocks from ", at), a.from(at).run(t, l, 0, 160-at), whole[at*1024:])
		}
	})
	t.Run("a row that sees nothing is zero", func(t *testing.T) {
		for _, dim := range []int{64, 128, 256} {
			a := draw(32, 70, 4, 1, dim)
			for i := range a.spans {
				if i%3 != 0 {
					a.spans[i] = cuda.Span{}
				}
			}
			for _, v := range [][]float32{a.ctxV, a.blkV} {
				v[7], v[13*dim+1] = nan, inf
			}
			got := a.run(t, l, 0, 32)
			for i := range a.spans {
				if i%3 != 0 {
					same(t, fmt.Sprintf("dim %d, row %d", dim, i), slice(got, 4*dim, i, i+1), make([]float32, 4*dim))
				}
			}
		}
	})
	t.Run("sequences side by side, window 50", func(t *testing.T) {
		testSequences(t, l, [3]int{8, 2, 128}, 50, attentionTolerance+2*halfULP)
	})
	for _, shape := range [][3]int{{8, 2, 128}, {4, 4, 128}, {6, 1, 256}, {10, 2, 128}, {8, 1, 128}, {6, 3, 64}} {
		t.Run(fmt.Sprintf("sequences side by side, %v", shape), func(t *testing.T) {
			testSequences(t, l, shape, 0, attentionTolerance+2*halfULP)
		})
	}
	t.Run("keys outside the span do not matter, be they NaN", func(t *testing.T) {
		a := draw(64, 130, 8, 2, 64)
		clean := a.run(t, l, 0, 64)
		for c := range 2 * 64 {
			a.ctxK[60*128+c], a.ctxV[60*128+c] = nan, inf
			a.blkK[63*128+c], a.blkV[63*128+c] = inf, nan
		}
		dirty := a.run(t, l, 0, 64)
		for i, s := range a.spans {
			if s.CtxHi <= 60 && s.BlkHi <= 63 {
				same(t, fmt.Sprintf("row %d", i), slice(dirty, 512, i, i+1), slice(clean, 512, i, i+1))
			} else if v := dirty[i*512]; v == v {
				t.Errorf("row %d sees a NaN and is %v", i, v)
			}
		}
	})
	t.Run("invariance", func(t *testing.T) {
		a := draw(160, 300, 8, 2, 128)
		rowInvariant(t, l, 160, a.run)
	})
	t.Run("blocks elsewhere in a call give the same bits", func(t *testing.T) {
		a := draw(160, 300, 8, 2, 128)
		whole := a.run(t, l, 0, 160)
		for _, at := range []int{16, 48, 96} {
			cols := a.qHeads * a.dim
			same(t, strconv.Itoa(at), a.from(at).run(t, l, 0, 160-at), whole[at*cols:])
		}
	})
}

// from is the part of a call that begins with query and block row at.
func (a *attending) from(at int) *attending {
	b := *a
	cols, kv := a.qHeads*a.dim, a.kvHeads*a.dim
	b.q, b.blkK, b.blkV = a.q[at*cols:], a.blkK[at*kv:], a.blkV[at*kv:]
	b.spans = slices.Clone(a.spans[at:])
	for i := range b.spans {
		b.spans[i].BlkLo -= int32(at)
		b.spans[i].BlkHi -= int32(at)
	}
	return &b
}

func testGateMulBF16(t *testing.T, l *lab) {
	for _, lay := range layouts {
		for _, act := range []cuda.Activation{cuda.SiLU, cuda.Sigmoid} {
			gate, x := random16(1, 9, 33), random16(2, 9, 33)
			l := l.in(lay)
			dst := l.room(t, 9, 33)
			must(t, l.d.GateMul(dst, l.put(t, gate, 33), l.put(t, x, 33), act))
			want, scale := gatemulOracle(gate, x, act)
			near16(t, l.get(t, dst), want, scale, gatemulTolerance)
		}
	}
}

func testGatherBF16(t *testing.T, l *lab) {
	src, rows := random16(1, 40, 33), []int32{3, 0, 39, 3, 17}
	var want []float32
	for _, r := range rows {
		want = append(want, slice(src, 33, int(r), int(r)+1)...)
	}
	for _, lay := range layouts {
		dst := l.in(lay).room(t, 5, 33)
		must(t, l.d.GatherRows(dst, l.in(lay).put(t, src, 33), rows))
		same(t, lay.name, l.get(t, dst), want)
	}
}

func testConvBF16(t *testing.T, l *lab) {
	for _, s := range []struct{ rows, cols, taps int }{{40, 19, 4}, {1, 64, 4}, {15, 64, 4}, {16, 24, 4}, {17, 136, 4}, {33, 64, 3}} {
		t.Run(fmt.Sprint(s), func(t *testing.T) {
			x, w, past := random16(1, s.rows, s.cols), random16(2, s.cols, s.taps), random16(3, s.taps-1, s.cols)
			want, scale, next := convOracle(x, w, past, s.cols, s.taps)
			var first []float32
			for _, lay := range layouts {
				l := l.in(lay)
				dst, history := l.room(t, s.rows, s.cols), l.put(t, past, s.cols)
				must(t, l.d.Conv(dst, l.put(t, x, s.cols), l.put(t, w, s.taps), history))
				got := l.get(t, dst)
				near16(t, got, want, scale, convTolerance)
				same(t, "history", l.get(t, history), next)
				if first == nil {
					first = got
				}
				same(t, lay.name, got, first)
			}
		})
	}
}

// rounded rounds what goes in.
func (r *deltaRun) rounded() *deltaRun {
	for _, v := range []*[]float32{&r.q, &r.k, &r.v, &r.a, &r.b, &r.aLog, &r.dtBias, &r.state} {
		*v = rounded(*v)
	}
	return r
}

// check16 is check for bf16. The state is held to float32's tolerance: only
// what goes in and comes out is bf16.
func (r *deltaRun) check16(t *testing.T, l *lab, cut, chunk int) {
	t.Helper()
	out, state := r.run(t, l, cut, chunk)
	if r.wantOut == nil {
		r.wantOut, r.wantState = r.oracle()
	}
	if d := distance(out, r.wantOut); !(d <= 2*halfULP) {
		t.Errorf("outputs are %.2g from float64, allowed %.2g", d, 2*halfULP)
	}
	if d := distance(state, r.wantState); !(d <= deltaTolerance) {
		t.Errorf("the state is %.2g from float64, allowed %.2g: it must stay float32", d, deltaTolerance)
	}
}

func testDeltaRuleBF16(t *testing.T, l *lab) {
	for _, s := range []struct {
		rows, hk, hv, dk, dv int
		alpha                float64
	}{
		{300, 2, 4, 64, 48, .99},
		{200, 2, 6, 128, 128, .97},
		{130, 1, 1, 128, 72, .9999},
		{145, 1, 2, 64, 136, .5},
		{64, 1, 4, 128, 8, .9},
		{63, 1, 2, 64, 64, .9},
		{90, 1, 5, 64, 64, .9},
		{90, 1, 2, 96, 20, .9},
	} {
		t.Run(fmt.Sprint(s), func(t *testing.T) {
			r := newDelta(s.rows, s.hk, s.hv, s.dk, s.dv, s.alpha).rounded()
			lays := layouts
			if testing.Short() {
				lays = layouts[2:]
			}
			for _, lay := range lays {
				for _, chunk := range []int{0, 1, 64} {
					for _, cut := range []int{s.rows, 70} {
						r.check16(t, l.in(lay), cut, chunk)
					}
				}
			}
		})
	}
	t.Run("long memory", func(t *testing.T) {
		rows := 2048
		if testing.Short() {
			rows = 200
		}
		r := newDelta(rows, 1, 2, 128, 128, .9999).rounded()
		for _, chunk := range []int{1, 64} {
			r.check16(t, l, rows, chunk)
		}
	})
	t.Run("like keys that are written at full strength", func(t *testing.T) {
		for _, dk := range []int{64, 128} {
			r := newDelta(320, 1, 1, dk, 64, .97)
			for i := range r.k {
				r.k[i] = r.k[i%dk] + r.k[i]*1e-2
			}
			for i := range r.b {
				r.b[i] = 8
			}
			r.rounded()
			for _, chunk := range []int{1, 64} {
				r.check16(t, l, 320, chunk)
			}
		}
	})
	t.Run("a decay that underflows", func(t *testing.T) {
		r := newDelta(130, 1, 2, 64, 64, 1e-30).rounded()
		for _, chunk := range []int{1, 64} {
			r.check16(t, l, 130, chunk)
		}
	})
	t.Run("NaN reaches every later row of its head", func(t *testing.T) {
		const dim, hv, at = 64, 4, 100
		for what, spoil := range map[string]func(r *deltaRun){
			"v":     func(r *deltaRun) { r.v[at*hv*dim+dim+5] = nan },
			"k":     func(r *deltaRun) { r.k[at*2*dim+7] = inf },
			"b":     func(r *deltaRun) { r.b[at*hv+1] = nan },
			"a":     func(r *deltaRun) { r.a[at*hv+1] = nan },
			"state": func(r *deltaRun) { r.state[dim*dim+5] = nan },
		} {
			for _, chunk := range []int{1, 64} {
				clean := newDelta(140, 2, hv, dim, dim, .9).rounded()
				want, _ := clean.run(t, l, 140, chunk)
				spoil(clean)
				got, _ := clean.run(t, l, 140, chunk)
				from := at
				if what == "state" {
					from = 0
				}
				for i := range 140 {
					if v := got[i*hv*dim+dim+5]; (v != v) != (i >= from) {
						t.Fatalf("%s, chunk %d: row %d of the head with a NaN in row %d is %v", what, chunk, i, from, v)
					}
					// The heads of the other key head.
					same(t, fmt.Sprintf("%s, chunk %d: row %d", what, chunk, i), slice(got, dim, i*hv+2, i*hv+4), slice(want, dim, i*hv+2, i*hv+4))
				}
			}
		}
	})
	testDecayToNothing(t, l)
	t.Run("invariance of the recurrence", func(t *testing.T) {
		r := newDelta(130, 2, 4, 64, 64, .97).rounded()
		out, state := r.run(t, l, r.rows, 1)
		for _, cut := range cuts() {
			again, end := r.run(t, l, cut, 1)
			same(t, fmt.Sprintf("batches of %d", cut), again, out)
			same(t, "state", end, state)
		}
	})
	t.Run("invariance of chunks", func(t *testing.T) {
		for _, rows := range []int{130, 190} {
			r := newDelta(rows, 2, 4, 128, 72, .97).rounded()
			out, state := r.run(t, l, r.rows, 64)
			for _, cut := range []int{r.rows, 64, 128} {
				for _, lay := range layouts {
					what := fmt.Sprintf("%d rows, batches of %d, %s", rows, cut, lay.name)
					again, end := r.run(t, l.in(lay), cut, 64)
					same(t, what, again, out)
					same(t, what+", state", end, state)
				}
			}
		}
	})
}

func testHeadBF16(t *testing.T, l *lab) {
	// draw is newHeading, rounded. A row without a target has none.
	draw := func(m, width, vocab, targets, k int, losses cuda.Losses) *heading {
		h := newHeading(m, width, vocab, targets, k)
		h.hidden, h.weight, h.target, h.losses = rounded(h.hidden), rounded(h.weight), rounded(h.target), losses
		return h
	}
	for _, lay := range layouts {
		for _, s := range [][5]int{{5, 16, 33, 3, 4}, {4, 9, 200, 5, 3}, {130, 64, 1000, 40, 16}, {300, 136, 777, 31, 8}, {1, 256, 4096, 1, 16}} {
			t.Run(fmt.Sprintf("%s %v", lay.name, s), func(t *testing.T) {
				draw(s[0], s[1], s[2], s[3], s[4], allLosses).check(t, l.in(lay))
			})
		}
	}
	t.Run("what is not asked for changes nothing else", func(t *testing.T) {
		h := draw(200, 128, 3000, 60, 8, allLosses)
		all := h.run(t, l, 0, 200)
		for _, losses := range []cuda.Losses{0, cuda.KL, cuda.KL | cuda.TV} {
			h.losses = losses
			res := h.run(t, l, 0, 200)
			if !slices.Equal(res.TopIDs, all.TopIDs) || !slices.Equal(res.LabelRank, all.LabelRank) {
				t.Errorf("losses %b change ids or ranks", losses)
			}
			want := make([]float64, 200)
			for i, v := range all.LSE {
				want[i] = float64(v)
			}
			near(t, res.LSE, want, nil, headTolerance)
		}
	})
	t.Run("ties go to the lowest id", func(t *testing.T) {
		h := draw(40, 64, 600, 4, 20, allLosses)
		for j := range 300 { // every row of the weight twice
			copy(h.weight[(300+j)*64:], h.weight[j*64:(j+1)*64])
		}
		h.check(t, l)
		res := h.run(t, l, 0, 40)
		for i := range 40 {
			ids := res.TopIDs[i*20 : (i+1)*20]
			for n := 0; n < 20; n += 2 {
				if ids[n+1] != ids[n]+300 {
					t.Fatalf("row %d: ids %v, want each followed by its equal", i, ids)
				}
			}
		}
	})
	t.Run("NaN stays in its row", func(t *testing.T) {
		h := draw(70, 64, 600, 7, 4, allLosses)
		clean := h.run(t, l, 0, 70)
		h.hidden[2*64+3], h.hidden[5*64] = nan, inf
		res := h.run(t, l, 0, 70)
		per := len(numbers(res, 4)) / 70
		for i := range 70 {
			if i == 2 || i == 5 {
				if v := float64(res.LSE[i]); !math.IsNaN(v) && !math.IsInf(v, 0) {
					t.Errorf("row %d has LSE %v", i, v)
				}
				continue
			}
			same(t, fmt.Sprintf("row %d", i), slice(numbers(res, 4), per, i, i+1), slice(numbers(clean, 4), per, i, i+1))
		}
	})
	for _, losses := range []cuda.Losses{allLosses, cuda.KL} {
		t.Run(fmt.Sprintf("invariance, losses %b", losses), func(t *testing.T) {
			h := draw(150, 128, 1301, 31, 8, losses)
			rowInvariant(t, l, 150, func(t testing.TB, l *lab, lo, hi int) []float32 {
				res := h.run(t, l, lo, hi)
				for _, v := range []*[]float32{&res.RKL, &res.JSD, &res.TV} {
					if *v == nil {
						*v = res.KL
					}
				}
				return numbers(res, h.k)
			})
		})
	}
}
