package backendtest

import (
	"math"
	"strconv"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// normRopeTolerance is of the size of a pair, which a rotation keeps: what the
// norm may be off by, and 1e-6, for which angles up to 3e5 must be reduced
// exactly.
const normRopeTolerance = rmsnormTolerance + 1e-6

// normRopes is a call of NormRoPE and its oracle.
type normRopes struct {
	x, w         []float32
	rows, beside int // columns of x that are no head's
	cuda.NormRoPEArgs
}

func newNormRopes(rows, heads, dim, step, rotary int) *normRopes {
	n := &normRopes{rows: rows, beside: 3, w: random(2, 1, dim)}
	n.NormRoPEArgs = cuda.NormRoPEArgs{
		Heads: heads, HeadDim: dim, Step: step, Eps: 1e-6, Gain: 1, Pos: make([]int32, rows), Rotary: rotary, Theta: 1e6,
	}
	n.x = random(1, rows, n.cols())
	for i := range n.Pos {
		n.Pos[i] = int32(i * i * 37 % 262144)
	}
	return n
}

func (n *normRopes) cols() int { return (n.Heads-1)*n.Step + n.HeadDim + n.beside }

// oracle gives the heads one after the other, and what they may be off by.
func (n *normRopes) oracle() (want, scale []float64) {
	var heads []float32
	for t := range n.rows {
		for h := range n.Heads {
			heads = append(heads, n.x[t*n.cols()+h*n.Step:][:n.HeadDim]...)
		}
	}
	want, _ = rmsnormOracle(heads, n.w, n.HeadDim, n.Eps, n.Gain)
	scale = make([]float64, len(want))
	for i, v := range want {
		scale[i] = math.Abs(v)
	}
	half := n.Rotary / 2
	for i := 0; i < len(want); i += n.HeadDim {
		at := float64(n.Pos[i/n.HeadDim/n.Heads])
		for j := range half {
			sin, cos := math.Sincos(at * math.Pow(n.Theta, -2*float64(j)/float64(n.Rotary)))
			u, v := want[i+j], want[i+half+j]
			want[i+j], want[i+half+j] = u*cos-v*sin, v*cos+u*sin
			scale[i+j] = math.Hypot(u, v)
			scale[i+half+j] = scale[i+j]
		}
	}
	return want, scale
}

// run computes rows lo..hi-1, in place where that is allowed and asked for.
func (n *normRopes) run(t testing.TB, l *lab, lo, hi int, inPlace bool) []float32 {
	t.Helper()
	args := n.NormRoPEArgs
	args.X, args.W, args.Pos = l.put(t, slice(n.x, n.cols(), lo, hi), n.cols()), l.put(t, n.w, n.HeadDim), n.Pos[lo:hi]
	if !inPlace {
		dst := l.room(t, hi-lo, n.Heads*n.HeadDim)
		must(t, l.d.NormRoPE(dst, args))
		return l.get(t, dst)
	}
	must(t, l.d.NormRoPE(args.X.ColRange(0, n.Heads*n.HeadDim), args))
	var heads, beside []float32
	for i, v := range l.get(t, args.X) {
		if i%n.cols() < n.Heads*n.HeadDim {
			heads = append(heads, v)
		} else {
			beside = append(beside, v-n.x[lo*n.cols()+i])
		}
	}
	same(t, "what lies beside the heads", beside, make([]float32, len(beside)))
	return heads
}

func testNormRoPE(t *testing.T, l *lab) {
	check := func(t *testing.T, l *lab, n *normRopes) {
		t.Helper()
		want, scale := n.oracle()
		got := n.run(t, l, 0, n.rows, false)
		near(t, got, want, scale, normRopeTolerance)
		if n.Step == n.HeadDim {
			same(t, "in place", n.run(t, l, 0, n.rows, true), got)
		}
	}
	for _, lay := range layouts {
		t.Run(lay.name, func(t *testing.T) {
			l := l.in(lay)
			for _, e := range edges() {
				t.Run(strconv.Itoa(e), func(t *testing.T) {
					check(t, l, newNormRopes(e, 3, 16, 16, 16))
					check(t, l, newNormRopes(5, e, 8, 8, 4))
					check(t, l, newNormRopes(5, 2, 2*e, 4*e, 2*e))
					check(t, l, newNormRopes(5, 3, 2*e+3, 2*e+3, e/2*2))
				})
			}
			check(t, l, newNormRopes(7, 33, 128, 128, 128))
			check(t, l, newNormRopes(7, 9, 256, 512, 64))
		})
	}
	t.Run("a gain of zero", func(t *testing.T) {
		n := newNormRopes(5, 2, 32, 32, 32)
		n.Gain = 0
		check(t, l, n)
	})
	t.Run("nothing turns at position zero, nor without rotary dims", func(t *testing.T) {
		still, none := newNormRopes(4, 3, 24, 24, 16), newNormRopes(4, 3, 24, 24, 0)
		clear(still.Pos)
		check(t, l, none)
		same(t, "at zero", still.run(t, l, 0, 4, false), none.run(t, l, 0, 4, false))
	})
	t.Run("NaN and Inf stay in their heads", func(t *testing.T) {
		n := newNormRopes(4, 3, 20, 20, 12)
		n.x[1*n.cols()+20], n.x[2*n.cols()+59] = nan, inf
		dirty := n.run(t, l, 0, 4, false)
		clean := newNormRopes(4, 3, 20, 20, 12).run(t, l, 0, 4, false)
		for h := range 4 * 3 {
			if h == 1*3+1 || h == 2*3+2 {
				if v := dirty[h*20]; h == 4 && v == v {
					t.Errorf("head %d holds a NaN and gives %v", h, v)
				}
				continue
			}
			same(t, strconv.Itoa(h), slice(dirty, 20, h, h+1), slice(clean, 20, h, h+1))
		}
	})
	t.Run("nothing in, nothing out", func(t *testing.T) {
		newNormRopes(0, 3, 16, 16, 16).run(t, l, 0, 0, false)
	})
	t.Run("invariance", func(t *testing.T) {
		n := newNormRopes(130, 3, 20, 25, 10)
		rowInvariant(t, l, 130, func(t testing.TB, l *lab, lo, hi int) []float32 { return n.run(t, l, lo, hi, false) })
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		ok := cuda.NormRoPEArgs{X: l.room(t, 2, 16), W: l.room(t, 1, 8), Heads: 2, HeadDim: 8, Step: 8, Pos: []int32{1, 2}, Rotary: 8, Theta: 1e4}
		dst := l.room(t, 2, 16)
		must(t, l.d.NormRoPE(dst, ok))
		for what, change := range map[string]func(a *cuda.NormRoPEArgs){
			"heads":           func(a *cuda.NormRoPEArgs) { a.Heads = 3 },
			"no heads":        func(a *cuda.NormRoPEArgs) { a.Heads = 0 },
			"no head dim":     func(a *cuda.NormRoPEArgs) { a.HeadDim = 0 },
			"heads overlap":   func(a *cuda.NormRoPEArgs) { a.Step = 7 },
			"heads leave x":   func(a *cuda.NormRoPEArgs) { a.Step = 9 },
			"short w":         func(a *cuda.NormRoPEArgs) { a.W = l.room(t, 1, 7) },
			"tall w":          func(a *cuda.NormRoPEArgs) { a.W = l.room(t, 2, 8) },
			"odd rotary":      func(a *cuda.NormRoPEArgs) { a.Rotary = 3 },
			"wide rotary":     func(a *cuda.NormRoPEArgs) { a.Rotary = 10 },
			"negative rotary": func(a *cuda.NormRoPEArgs) { a.Rotary = -2 },
			"positions":       func(a *cuda.NormRoPEArgs) { a.Pos = a.Pos[:1] },
		} {
			a := ok
			change(&a)
			refused(t, what, l.d.NormRoPE(dst, a))
		}
		refused(t, "dst", l.d.NormRoPE(l.room(t, 2, 15), ok))
		refused(t, "rows of dst", l.d.NormRoPE(l.room(t, 1, 16), ok))
	})
}

func testNormRoPEBF16(t *testing.T, l *lab) {
	draw := func(rows, heads, dim, step, rotary int) *normRopes {
		n := newNormRopes(rows, heads, dim, step, rotary)
		n.x, n.w = rounded(n.x), rounded(n.w)
		return n
	}
	for _, lay := range layouts {
		t.Run(lay.name, func(t *testing.T) {
			for _, n := range []*normRopes{draw(9, 3, 20, 20, 16), draw(40, 12, 128, 128, 128), draw(7, 5, 256, 512, 64), draw(33, 2, 64, 64, 64)} {
				want, scale := n.oracle()
				got := n.run(t, l.in(lay), 0, n.rows, false)
				near16(t, got, want, scale, normRopeTolerance)
				if n.Step == n.HeadDim {
					same(t, "in place", n.run(t, l.in(lay), 0, n.rows, true), got)
				}
			}
		})
	}
	for _, n := range []*normRopes{draw(130, 3, 20, 24, 10), draw(130, 4, 128, 128, 128)} {
		rowInvariant(t, l, 130, func(t testing.TB, l *lab, lo, hi int) []float32 { return n.run(t, l, lo, hi, false) })
	}
}
