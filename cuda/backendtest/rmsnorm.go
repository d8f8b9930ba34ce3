package backendtest

import (
	"fmt"
	"math"
	"testing"
)

const rmsnormTolerance = 5e-7 // of the value itself

func rmsnormOracle(x, w []float32, cols int, eps, gain float32) (want, scale []float64) {
	for i := 0; i < len(x); i += cols {
		var sum float64
		for _, v := range x[i : i+cols] {
			sum += float64(v) * float64(v)
		}
		inv := 1 / math.Sqrt(sum/float64(cols)+float64(eps))
		for j, v := range x[i : i+cols] {
			// The gain plus the weight is one float32, as in the models.
			y := float64(v) * inv * float64(gain+w[j])
			want, scale = append(want, y), append(scale, math.Abs(y))
		}
	}
	return want, scale
}

func testRMSNorm(t *testing.T, l *lab) {
	for _, lay := range layouts {
		t.Run(lay.name, func(t *testing.T) {
			l := l.in(lay)
			for _, e := range edges() {
				for _, gain := range []float32{0, 1} {
					t.Run(fmt.Sprintf("%d, gain %v", e, gain), func(t *testing.T) {
						for _, shape := range [][2]int{{3, e}, {e, 10}} {
							x, w := random(1, shape[0], shape[1]), random(2, 1, shape[1])
							in := l.put(t, x, shape[1])
							dst := l.room(t, shape[0], shape[1])
							must(t, l.d.RMSNorm(dst, in, l.put(t, w, shape[1]), 1e-6, gain))
							want, scale := rmsnormOracle(x, w, shape[1], 1e-6, gain)
							near(t, l.get(t, dst), want, scale, rmsnormTolerance)
							must(t, l.d.RMSNorm(in, in, l.put(t, w, shape[1]), 1e-6, gain))
							same(t, "in place", l.get(t, in), l.get(t, dst))
						}
					})
				}
			}
		})
	}
	t.Run("nothing in, nothing out", func(t *testing.T) {
		must(t, l.d.RMSNorm(l.room(t, 0, 8), l.room(t, 0, 8), l.room(t, 1, 8), 1e-6, 0))
	})
	t.Run("tiny and huge rows", func(t *testing.T) {
		x := []float32{1e-3, -1e-3, 0, 2e-3, 1e18, 1e18, -1e18, 0, 0, 0, 0, 0}
		w := []float32{1, 2, 3, 4}
		dst := l.room(t, 3, 4)
		must(t, l.d.RMSNorm(dst, l.put(t, x, 4), l.put(t, w, 4), 1e-6, 0))
		want, scale := rmsnormOracle(x, w, 4, 1e-6, 0)
		near(t, l.get(t, dst), want, scale, rmsnormTolerance)
	})
	t.Run("NaN and Inf stay in their rows", func(t *testing.T) {
		x, w := random(1, 4, 33), random(2, 1, 33)
		x[33+32], x[2*33] = nan, inf
		dst := l.room(t, 4, 33)
		must(t, l.d.RMSNorm(dst, l.put(t, x, 33), l.put(t, w, 33), 1e-6, 0))
		want, scale := rmsnormOracle(x, w, 33, 1e-6, 0)
		near(t, l.get(t, dst), want, scale, rmsnormTolerance)
	})
	t.Run("invariance", func(t *testing.T) {
		const rows, cols = 130, 67
		x, w := random(1, rows, cols), random(2, 1, cols)
		rowInvariant(t, l, rows, func(t testing.TB, l *lab, lo, hi int) []float32 {
			dst := l.room(t, hi-lo, cols)
			must(t, l.d.RMSNorm(dst, l.put(t, slice(x, cols, lo, hi), cols), l.put(t, w, cols), 1e-6, 1))
			return l.get(t, dst)
		})
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		x := l.room(t, 3, 8)
		refused(t, "dst", l.d.RMSNorm(l.room(t, 3, 7), x, l.room(t, 1, 8), 1e-6, 0))
		refused(t, "short w", l.d.RMSNorm(x, x, l.room(t, 1, 7), 1e-6, 0))
		refused(t, "tall w", l.d.RMSNorm(x, x, l.room(t, 2, 8), 1e-6, 0))
	})
}
