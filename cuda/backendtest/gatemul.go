package backendtest

import (
	"fmt"
	"math"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

const gatemulTolerance = 1e-6 // of the value, or of 1e-30 where it is smaller

func gatemulOracle(gate, x []float32, act cuda.Activation) (want, scale []float64) {
	for i, g := range gate {
		y := 1 / (1 + math.Exp(-float64(g)))
		if act == cuda.SiLU {
			y *= float64(g)
		}
		y *= float64(x[i])
		want, scale = append(want, y), append(scale, max(math.Abs(y), 1e-30))
	}
	return want, scale
}

func testGateMul(t *testing.T, l *lab) {
	acts := []cuda.Activation{cuda.SiLU, cuda.Sigmoid}
	for _, lay := range layouts {
		t.Run(lay.name, func(t *testing.T) {
			l := l.in(lay)
			for _, e := range edges() {
				for _, act := range acts {
					t.Run(fmt.Sprintf("%d, activation %d", e, act), func(t *testing.T) {
						for _, shape := range [][2]int{{3, e}, {e, 10}} {
							gate, x := random(1, shape[0], shape[1]), random(2, shape[0], shape[1])
							want, scale := gatemulOracle(gate, x, act)
							dst, g, m := l.room(t, shape[0], shape[1]), l.put(t, gate, shape[1]), l.put(t, x, shape[1])
							must(t, l.d.GateMul(dst, g, m, act))
							near(t, l.get(t, dst), want, scale, gatemulTolerance)
							must(t, l.d.GateMul(m, g, m, act))
							same(t, "over x", l.get(t, m), l.get(t, dst))
							m = l.put(t, x, shape[1])
							must(t, l.d.GateMul(g, g, m, act))
							same(t, "over the gate", l.get(t, g), l.get(t, dst))
						}
					})
				}
			}
		})
	}
	t.Run("far gates, NaN and Inf", func(t *testing.T) {
		gate := []float32{-200, -88, -87, -50, -1e-20, 0, 20, 88, 89, 200, nan, inf, -80, 1e30, 1, 2}
		x := make([]float32, len(gate))
		for i := range x {
			x[i] = 1
		}
		x[14], x[15] = nan, -inf
		for _, act := range acts {
			dst := l.room(t, 1, len(gate))
			must(t, l.d.GateMul(dst, l.put(t, gate, len(gate)), l.put(t, x, len(gate)), act))
			want, scale := gatemulOracle(gate, x, act)
			near(t, l.get(t, dst), want, scale, gatemulTolerance)
		}
	})
	t.Run("nothing in, nothing out", func(t *testing.T) {
		must(t, l.d.GateMul(l.room(t, 0, 8), l.room(t, 0, 8), l.room(t, 0, 8), cuda.SiLU))
	})
	t.Run("invariance", func(t *testing.T) {
		const rows, cols = 130, 37
		gate, x := random(1, rows, cols), random(2, rows, cols)
		rowInvariant(t, l, rows, func(t testing.TB, l *lab, lo, hi int) []float32 {
			dst := l.room(t, hi-lo, cols)
			must(t, l.d.GateMul(dst, l.put(t, slice(gate, cols, lo, hi), cols), l.put(t, slice(x, cols, lo, hi), cols), cuda.SiLU))
			return l.get(t, dst)
		})
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		m := l.room(t, 2, 8)
		refused(t, "dst", l.d.GateMul(l.room(t, 2, 7), m, m, cuda.SiLU))
		refused(t, "gate", l.d.GateMul(m, l.room(t, 1, 8), m, cuda.SiLU))
		refused(t, "x", l.d.GateMul(m, m, l.room(t, 3, 8), cuda.SiLU))
		refused(t, "activation", l.d.GateMul(m, m, m, 7))
	})
}
