package backendtest

import (
	"math"
	"strconv"
	"testing"
)

const ropeTolerance = 1e-6 // angles up to 3e5 must be reduced exactly

func ropeOracle(x []float32, pos []int32, cols, headDim, rotary int, theta float64) []float64 {
	want := make([]float64, len(x))
	for i, v := range x {
		want[i] = float64(v)
	}
	half := rotary / 2
	for t, p := range pos {
		for h := 0; h < cols; h += headDim {
			for i := range half {
				sin, cos := math.Sincos(float64(p) * math.Pow(theta, -2*float64(i)/float64(rotary)))
				a, b := t*cols+h+i, t*cols+h+i+half
				u, v := float64(x[a]), float64(x[b])
				want[a], want[b] = u*cos-v*sin, v*cos+u*sin
			}
		}
	}
	return want
}

func testRoPE(t *testing.T, l *lab) {
	check := func(t *testing.T, l *lab, rows, heads, headDim, rotary int) {
		t.Helper()
		cols := heads * headDim
		x, pos := random(1, rows, cols), make([]int32, rows)
		for i := range pos {
			pos[i] = int32(i * i % 1000)
		}
		m := l.put(t, x, cols)
		must(t, l.d.RoPE(m, pos, headDim, rotary, 1e4))
		near(t, l.get(t, m), ropeOracle(x, pos, cols, headDim, rotary, 1e4), nil, ropeTolerance)
	}
	for _, lay := range layouts {
		t.Run(lay.name, func(t *testing.T) {
			for _, e := range edges() {
				t.Run(strconv.Itoa(e), func(t *testing.T) {
					check(t, l.in(lay), e, 3, 16, 16)
					check(t, l.in(lay), 5, e, 8, 4)
					check(t, l.in(lay), 5, 2, 2*e, 2*e)
					check(t, l.in(lay), 5, 2, 2*e+3, e/2*2)
				})
			}
		})
	}
	t.Run("far positions", func(t *testing.T) {
		x, pos := random(1, 3, 64), []int32{262143, 0, 131072}
		m := l.put(t, x, 64)
		must(t, l.d.RoPE(m, pos, 64, 64, 1e7))
		near(t, l.get(t, m), ropeOracle(x, pos, 64, 64, 64, 1e7), nil, ropeTolerance)
	})
	t.Run("position zero changes nothing", func(t *testing.T) {
		x := random(1, 2, 32)
		m := l.put(t, x, 32)
		must(t, l.d.RoPE(m, []int32{0, 0}, 16, 16, 1e4))
		same(t, "x", l.get(t, m), x)
	})
	t.Run("no rotary dims, no rows", func(t *testing.T) {
		x := random(1, 2, 32)
		m := l.put(t, x, 32)
		must(t, l.d.RoPE(m, []int32{5, 6}, 16, 0, 1e4))
		same(t, "x", l.get(t, m), x)
		must(t, l.d.RoPE(l.room(t, 0, 32), nil, 16, 16, 1e4))
	})
	t.Run("NaN stays in its pair", func(t *testing.T) {
		x := random(1, 2, 8)
		x[1] = nan
		m := l.put(t, x, 8)
		must(t, l.d.RoPE(m, []int32{3, 4}, 8, 8, 1e4))
		near(t, l.get(t, m), ropeOracle(x, []int32{3, 4}, 8, 8, 8, 1e4), nil, ropeTolerance)
	})
	t.Run("invariance", func(t *testing.T) {
		const rows, cols = 130, 3 * 20
		x, pos := random(1, rows, cols), make([]int32, rows)
		for i := range pos {
			pos[i] = int32(i * 37 % 101)
		}
		rowInvariant(t, l, rows, func(t testing.TB, l *lab, lo, hi int) []float32 {
			m := l.put(t, slice(x, cols, lo, hi), cols)
			must(t, l.d.RoPE(m, pos[lo:hi], 20, 10, 1e6))
			return l.get(t, m)
		})
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		x := l.room(t, 2, 16)
		refused(t, "heads", l.d.RoPE(x, []int32{1, 2}, 7, 4, 1e4))
		refused(t, "no head dim", l.d.RoPE(x, []int32{1, 2}, 0, 0, 1e4))
		refused(t, "odd rotary", l.d.RoPE(x, []int32{1, 2}, 8, 3, 1e4))
		refused(t, "wide rotary", l.d.RoPE(x, []int32{1, 2}, 8, 10, 1e4))
		refused(t, "negative rotary", l.d.RoPE(x, []int32{1, 2}, 8, -2, 1e4))
		refused(t, "positions", l.d.RoPE(x, []int32{1}, 8, 8, 1e4))
	})
}
