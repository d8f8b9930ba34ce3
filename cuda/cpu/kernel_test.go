package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// These tests hold whatever kernels this build has to the plain arithmetic
// they stand for; run them with the tag purego for the others.

func normal(seed uint64, n int) []float32 {
	rng := rand.New(rand.NewPCG(seed, 2))
	out := make([]float32, n)
	for i := range out {
		out[i] = float32(rng.NormFloat64())
	}
	return out
}

func near(t *testing.T, what string, got, want, tol float64) {
	t.Helper()
	if !(math.Abs(got-want) <= tol) && !(got != got && want != want) && got != want {
		t.Errorf("%s = %v, want %v within %.2g", what, got, want, tol)
	}
}

func TestExpIsRightToAFewRoundings(t *testing.T) {
	worst := 0.0
	for x := -87.2; x < 88.6; x += 0.00137 {
		want := math.Exp(float64(float32(x)))
		worst = max(worst, math.Abs(float64(exp(float32(x)))/want-1))
	}
	if worst > 2e-7 {
		t.Errorf("relative error %.3g, allowed 2e-7", worst)
	}
	for x, want := range map[float32]float32{
		0: 1, -88: 0, -1e30: 0, float32(math.Inf(-1)): 0, 1e30: float32(math.Inf(1)), float32(math.Inf(1)): float32(math.Inf(1)),
	} {
		if got := exp(x); got != want {
			t.Errorf("exp(%v) = %v, want %v", x, got, want)
		}
	}
	if v := exp(float32(math.NaN())); v == v {
		t.Errorf("exp(NaN) = %v", v)
	}
}

func TestExpsAreShiftedSummedAndMayOverwriteTheirOperand(t *testing.T) {
	for n := range 70 {
		x := normal(1, n)
		for i := range x {
			x[i] = 3*x[i] - 10
			if i%11 == 5 {
				x[i] = -200
			}
		}
		dst := make([]float32, n)
		sum, want := kernels.exps(dst, x, 2), 0.0
		for i, v := range x {
			e := math.Exp(float64(v - 2))
			if v == -200 {
				e = 0
			}
			near(t, fmt.Sprintf("e of %v", v), float64(dst[i]), e, 2e-7*e)
			want += float64(dst[i])
		}
		near(t, "sum", sum, want, 1e-15*float64(n+1))
		if again := kernels.exps(x, x, 2); again != sum || !slices.Equal(x, dst) {
			t.Errorf("%d values: in place the result is another", n)
		}
	}
	inf := float32(math.Inf(1))
	if s := kernels.exps(make([]float32, 9), []float32{0, 0, 0, 0, 0, 0, 0, 0, float32(math.NaN())}, 0); s == s {
		t.Errorf("the sum with a NaN is %v", s)
	}
	if s := kernels.exps(make([]float32, 3), []float32{0, inf, 1}, inf); s == s {
		t.Errorf("the sum with Inf is %v", s)
	}
}

func TestMaximumCountAndAboveSkipNaN(t *testing.T) {
	for n := range 70 {
		x := normal(2, n)
		for i := range x {
			if i%7 == 3 {
				x[i] = float32(math.NaN())
			}
		}
		top, over := float32(math.Inf(-1)), 0
		for _, v := range x {
			if v > top {
				top = v
			}
			if v > .5 {
				over++
			}
		}
		if got := kernels.largest(x); got != top {
			t.Errorf("largest of %d = %v, want %v", n, got, top)
		}
		if got := kernels.count(x, .5); got != over {
			t.Errorf("count of %d = %d, want %d", n, got, over)
		}
		first := slices.IndexFunc(x, func(v float32) bool { return v > 1.5 })
		got := kernels.above(x, 1.5)
		if first >= 0 && (got > first || got < first-7) || got > n {
			t.Errorf("above of %d = %d, but the first is %d", n, got, first)
		}
		if first < 0 && got < n-7 {
			t.Errorf("above of %d = %d, though there is none", n, got)
		}
	}
}

func TestSumsOfTheLossesAreRight(t *testing.T) {
	for n := range 70 {
		p, q := normal(3, n), normal(4, n)
		for i := range p {
			p[i], q[i] = exp(3*p[i]-6), exp(3*q[i]-4)
			if i%9 == 4 {
				p[i], q[i] = 0, 0
			}
		}
		var cross, apart, mixture float64
		for i := range p {
			cross += float64(p[i]) * (float64(q[i]) - 3)
			apart += math.Abs(float64(p[i]) - float64(q[i])*.25)
			if m := (float64(p[i]) + float64(q[i])*.25) / 2; m > 0 {
				mixture += m * math.Log(m)
			}
		}
		near(t, "cross", kernels.cross(p, q, 3), cross, 1e-6*(1+math.Abs(cross)))
		near(t, "apart", kernels.apart(p, q, .25), apart, 1e-6*(1+apart))
		near(t, "mixture", kernels.mixture(p, q, .25), mixture, 1e-6*(1+math.Abs(mixture)))
		if n > 0 {
			p[n-1] = float32(math.NaN())
			for what, v := range map[string]float64{
				"cross": kernels.cross(p, q, 3), "apart": kernels.apart(p, q, .25), "mixture": kernels.mixture(p, q, .25),
			} {
				if v == v {
					t.Errorf("%s of %d values with a NaN is %v", what, n, v)
				}
			}
		}
	}
}

func TestMixSumsRowsInOrderWhereverTheyAreCut(t *testing.T) {
	for _, cols := range []int{1, 7, 8, 9, 63, 64, 65, 80, 128, 137} {
		const rows = 37
		v := matrix{data: normal(5, rows*(cols+3)), rows: rows, cols: cols, stride: cols + 3}
		weights := normal(6, rows)
		whole, parts, want := make([]float32, cols), make([]float32, cols), make([]float64, cols)
		kernels.mix(whole, weights, v)
		for lo := 0; lo < rows; lo += 10 {
			hi := min(lo+10, rows)
			kernels.mix(parts, weights[lo:hi], v.block(lo, hi, 0, cols))
		}
		for j := range cols {
			for i, w := range weights {
				want[j] += float64(w) * float64(v.row(i)[j])
			}
			near(t, fmt.Sprintf("column %d of %d", j, cols), float64(whole[j]), want[j], 1e-5)
		}
		if !slices.Equal(whole, parts) {
			t.Errorf("%d columns: cut into parts the sums are others", cols)
		}
	}
}

func TestAProductReadsAndWritesItsOperandsOnly(t *testing.T) {
	// Operands end where their memory ends: past it lies a guard value.
	for _, m := range []int{1, 2, 3, 4, 5, 9} {
		for _, n := range []int{1, 2, 3, 4, 11, 12, 13, 193} {
			for _, k := range []int{1, 7, 8, 9, 40} {
				out := normal(7, m*n+8)
				guard := slices.Clone(out[m*n:])
				a := matrix{data: normal(8, m*k), rows: m, cols: k, stride: k}
				w := matrix{data: normal(9, n*k), rows: n, cols: k, stride: k}
				multiply(matrix{data: out[:m*n], rows: m, cols: n, stride: n}, a, w, false)
				if !slices.Equal(out[m*n:], guard) {
					t.Fatalf("%d x %d x %d writes past its end", m, n, k)
				}
				for i := range m {
					for j := range n {
						want := 0.0
						for l := range k {
							want += float64(a.row(i)[l]) * float64(w.row(j)[l])
						}
						near(t, fmt.Sprintf("%d x %d x %d at %d,%d", m, n, k, i, j), float64(out[i*n+j]), want, 1e-5)
					}
				}
			}
		}
	}
}

func TestThreadsDoNotChangeABit(t *testing.T) {
	const m, n, k = 200, 300, 67
	a := matrix{data: normal(1, m*k), rows: m, cols: k, stride: k}
	w := matrix{data: normal(2, n*k), rows: n, cols: k, stride: k}
	var first []float32
	for _, threads := range []int{1, 2, 5, 16} {
		d, err := New(Config{Threads: threads})
		if err != nil {
			t.Fatal(err)
		}
		out := matrix{data: make([]float32, m*n), rows: m, cols: n, stride: n}
		d.product(out, a, w, false)
		if first == nil {
			first = out.data
		} else if !slices.Equal(out.data, first) {
			t.Errorf("%d threads give other bits than one", threads)
		}
	}
}

func TestEachRunsEveryIndexOnce(t *testing.T) {
	for _, threads := range []int{1, 3, 64} {
		d := &Device{threads: threads}
		for _, n := range []int{0, 1, 2, 100} {
			seen := make([]int, n)
			d.each(n, grain, func(i int) { seen[i]++ })
			for i, c := range seen {
				if c != 1 {
					t.Errorf("%d threads: index %d of %d ran %d times", threads, i, n, c)
				}
			}
			clear(seen)
			d.rows(n, 1000, func(lo, hi int) {
				for i := lo; i < hi; i++ {
					seen[i]++
				}
			})
			for i, c := range seen {
				if c != 1 {
					t.Errorf("%d threads: row %d of %d ran %d times", threads, i, n, c)
				}
			}
		}
	}
}

func TestNegativeThreadsAreRefused(t *testing.T) {
	if _, err := New(Config{Threads: -1}); err == nil {
		t.Error("New accepted -1 threads")
	}
}

func TestGatesAndNormsMatchTheirFormulas(t *testing.T) {
	for n := range 40 {
		g, x := normal(10, n), normal(11, n)
		for i := range g {
			g[i] *= 30
		}
		sum := 0.0
		for _, v := range x {
			sum += float64(v) * float64(v)
		}
		near(t, "squares", kernels.squares(x), sum, 1e-13*(1+sum))
		for _, times := range []bool{false, true} {
			dst := make([]float32, n)
			kernels.gate(dst, g, x, times)
			for i, v := range g {
				want := float64(x[i]) / (1 + math.Exp(-float64(v)))
				if times {
					want *= float64(v)
				}
				near(t, fmt.Sprintf("gate of %v", v), float64(dst[i]), want, 5e-7*math.Abs(want)+1e-36)
			}
		}
		dst := make([]float32, n)
		kernels.scaled(dst, x, g, .3)
		for i := range dst {
			if want := x[i] * .3 * g[i]; dst[i] != want {
				t.Errorf("scaled[%d] of %d = %v, want %v", i, n, dst[i], want)
			}
		}
	}
}
