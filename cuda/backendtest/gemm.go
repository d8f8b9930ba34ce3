package backendtest

import (
	"fmt"
	"math"
	"strconv"
	"testing"
)

// gemmTolerance is in units of Σ|a·w|, the size that rounding is relative to.
const gemmTolerance = 1e-6

// gemmOracle is old + a·wᵀ and its Σ|a·w|; old may be nil.
func gemmOracle(a, w, old []float32, m, n, k int) (want, scale []float64) {
	want, scale = make([]float64, m*n), make([]float64, m*n)
	for i := range m {
		for j := range n {
			var sum, size float64
			for l := range k {
				p := float64(a[i*k+l]) * float64(w[j*k+l])
				sum += p
				size += math.Abs(p)
			}
			if old != nil {
				sum += float64(old[i*n+j])
				size += math.Abs(float64(old[i*n+j]))
			}
			want[i*n+j], scale[i*n+j] = sum, size
		}
	}
	return want, scale
}

func testGemm(t *testing.T, l *lab) {
	check := func(t *testing.T, l *lab, m, n, k int, add bool) {
		t.Helper()
		a, w := random(1, m, k), random(2, n, k)
		var old []float32
		dst := l.room(t, m, n)
		if add {
			old = random(3, m, n)
			dst = l.put(t, old, n)
		}
		must(t, l.d.Gemm(dst, l.put(t, a, k), l.put(t, w, k), add))
		want, scale := gemmOracle(a, w, old, m, n, k)
		near(t, l.get(t, dst), want, scale, gemmTolerance)
	}
	for _, lay := range layouts {
		l := l.in(lay)
		t.Run(lay.name, func(t *testing.T) {
			for _, e := range edges() {
				t.Run(strconv.Itoa(e), func(t *testing.T) {
					check(t, l, e, 5, 33, false)
					check(t, l, 3, e, 20, false)
					check(t, l, 5, 7, e, true)
					check(t, l, e, e, e, true)
				})
			}
			check(t, l, 70, 200, 256, false)
			check(t, l, 1, 600, 300, true)
		})
	}
	t.Run("nothing in, nothing out", func(t *testing.T) {
		must(t, l.d.Gemm(l.room(t, 0, 5), l.room(t, 0, 8), l.room(t, 5, 8), false))
		must(t, l.d.Gemm(l.room(t, 5, 0), l.room(t, 5, 8), l.room(t, 0, 8), false))
	})
	t.Run("a sum of nothing is zero", func(t *testing.T) {
		dst := l.room(t, 2, 3)
		must(t, l.d.Gemm(dst, l.room(t, 2, 0), l.room(t, 3, 0), false))
		same(t, "dst", l.get(t, dst), make([]float32, 6))
	})
	t.Run("NaN and Inf stay in their rows", func(t *testing.T) {
		a, w := random(1, 9, 33), random(2, 70, 33)
		a[1*33+32], a[4*33] = nan, inf
		w[65*33+7] = nan
		dst := l.put(t, make([]float32, 9*70), 70)
		must(t, l.d.Gemm(dst, l.put(t, a, 33), l.put(t, w, 33), false))
		want, scale := gemmOracle(a, w, nil, 9, 70, 33)
		near(t, l.get(t, dst), want, scale, gemmTolerance)
	})
	t.Run("old values that are not added leave no trace", func(t *testing.T) {
		dst := l.put(t, []float32{nan, inf}, 2)
		must(t, l.d.Gemm(dst, l.put(t, []float32{1, 2}, 2), l.put(t, []float32{3, 4, 5, 6}, 2), false))
		same(t, "dst", l.get(t, dst), []float32{11, 17})
	})
	for _, shape := range []struct{ n, k int }{{65, 130}, {260, 131}, {5, 67}, {1, 3}, {7, 1}} {
		t.Run(fmt.Sprintf("%d x %d", shape.n, shape.k), func(t *testing.T) {
			const rows = 150
			a, w, old := random(1, rows, shape.k), random(2, shape.n, shape.k), random(3, rows, shape.n)
			for _, add := range []bool{false, true} {
				rowInvariant(t, l, rows, func(t testing.TB, l *lab, lo, hi int) []float32 {
					dst := l.put(t, slice(old, shape.n, lo, hi), shape.n)
					must(t, l.d.Gemm(dst, l.put(t, slice(a, shape.k, lo, hi), shape.k), l.put(t, w, shape.k), add))
					return l.get(t, dst)
				})
			}
		})
	}
	t.Run("a row of w does not depend on its neighbours", func(t *testing.T) {
		const n, k = 200, 67
		a, w := random(1, 3, k), random(2, n, k)
		x := l.put(t, a, k)
		whole := l.room(t, 3, n)
		must(t, l.d.Gemm(whole, x, l.put(t, w, k), false))
		all := l.get(t, whole)
		for _, col := range []int{0, 1, 63, 64, 130, n - 1} {
			dst := l.room(t, 3, 1)
			must(t, l.d.Gemm(dst, x, l.put(t, slice(w, k, col, col+1), k), false))
			same(t, fmt.Sprintf("row %d of w", col), l.get(t, dst), []float32{all[col], all[n+col], all[2*n+col]})
		}
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		dst, a, w := l.room(t, 2, 3), l.room(t, 2, 4), l.room(t, 3, 4)
		refused(t, "k", l.d.Gemm(dst, a, l.room(t, 3, 5), false))
		refused(t, "m", l.d.Gemm(l.room(t, 1, 3), a, w, false))
		refused(t, "n", l.d.Gemm(dst, a, l.room(t, 4, 4), false))
		out := a
		out.Rows = 3
		refused(t, "view", l.d.Gemm(l.room(t, 3, 3), out, w, false))
	})
}
