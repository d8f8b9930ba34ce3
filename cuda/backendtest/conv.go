package backendtest

import (
	"fmt"
	"math"
	"strconv"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

const convTolerance = 1e-6 // of Σ|w·x|

// convOracle convolves rows x, with history before them, and returns the
// history that follows.
func convOracle(x, w, history []float32, c, taps int) (want, scale []float64, next []float32) {
	all := append(append([]float32{}, history...), x...)
	for t := range len(x) / c {
		for ch := range c {
			var sum, size float64
			for j := range taps {
				p := float64(w[ch*taps+j]) * float64(all[(t+j)*c+ch])
				sum += p
				size += math.Abs(p)
			}
			want = append(want, sum/(1+math.Exp(-sum)))
			scale = append(scale, size)
		}
	}
	return want, scale, all[len(all)-len(history):]
}

func testConv(t *testing.T, l *lab) {
	check := func(t *testing.T, l *lab, rows, c, taps int) {
		t.Helper()
		x, w, past := random(1, rows, c), random(2, c, taps), random(3, taps-1, c)
		dst, history := l.room(t, rows, c), l.put(t, past, c)
		must(t, l.d.Conv(dst, l.put(t, x, c), l.put(t, w, taps), history))
		want, scale, next := convOracle(x, w, past, c, taps)
		near(t, l.get(t, dst), want, scale, convTolerance)
		same(t, "history", l.get(t, history), next)
	}
	for _, lay := range layouts {
		t.Run(lay.name, func(t *testing.T) {
			for _, e := range edges() {
				t.Run(strconv.Itoa(e), func(t *testing.T) {
					check(t, l.in(lay), e, 5, 4)
					check(t, l.in(lay), 6, e, 4)
					check(t, l.in(lay), 2, 3, e+1)
					check(t, l.in(lay), 20, 3, e+1)
				})
			}
		})
	}
	t.Run("one tap has no history", func(t *testing.T) {
		x, w := random(1, 5, 3), random(2, 3, 1)
		dst := l.room(t, 5, 3)
		must(t, l.d.Conv(dst, l.put(t, x, 3), l.put(t, w, 1), cuda.Tensor{}))
		want, scale, _ := convOracle(x, w, nil, 3, 1)
		near(t, l.get(t, dst), want, scale, convTolerance)
	})
	t.Run("no rows keep the history", func(t *testing.T) {
		past := random(3, 3, 8)
		history := l.put(t, past, 8)
		must(t, l.d.Conv(l.room(t, 0, 8), l.room(t, 0, 8), l.room(t, 8, 4), history))
		same(t, "history", l.get(t, history), past)
	})
	t.Run("NaN reaches as far as the taps", func(t *testing.T) {
		x, w, past := random(1, 8, 2), random(2, 2, 4), random(3, 3, 2)
		x[2*2], past[1] = nan, inf
		dst := l.room(t, 8, 2)
		must(t, l.d.Conv(dst, l.put(t, x, 2), l.put(t, w, 4), l.put(t, past, 2)))
		want, scale, _ := convOracle(x, w, past, 2, 4)
		near(t, l.get(t, dst), want, scale, convTolerance)
	})
	t.Run("invariance", func(t *testing.T) {
		const rows, c, taps = 130, 37, 4
		x, w := random(1, rows, c), random(2, c, taps)
		for _, cut := range append([]int{rows}, cuts()...) {
			run := func(l *lab, cut int) []float32 {
				history := l.put(t, make([]float32, (taps-1)*c), c)
				var out []float32
				for lo := 0; lo < rows; lo += cut {
					hi := min(lo+cut, rows)
					dst := l.room(t, hi-lo, c)
					must(t, l.d.Conv(dst, l.put(t, slice(x, c, lo, hi), c), l.put(t, w, taps), history))
					out = append(out, l.get(t, dst)...)
				}
				return append(out, l.get(t, history)...)
			}
			whole := run(l, rows)
			for _, lay := range layouts {
				same(t, fmt.Sprintf("batches of %d, %s", cut, lay.name), run(l.in(lay), cut), whole)
			}
		}
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		x, w, history := l.room(t, 5, 3), l.room(t, 3, 4), l.room(t, 3, 3)
		refused(t, "dst", l.d.Conv(l.room(t, 4, 3), x, w, history))
		refused(t, "w", l.d.Conv(l.room(t, 5, 3), x, l.room(t, 2, 4), history))
		refused(t, "history rows", l.d.Conv(l.room(t, 5, 3), x, w, l.room(t, 2, 3)))
		refused(t, "history width", l.d.Conv(l.room(t, 5, 3), x, w, l.room(t, 3, 2)))
		refused(t, "no taps", l.d.Conv(l.room(t, 5, 3), x, l.room(t, 3, 0), cuda.Tensor{}))
	})
}
