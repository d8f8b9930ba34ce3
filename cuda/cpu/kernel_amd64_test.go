//go:build amd64 && !purego

package cpu

import (
	"slices"
	"testing"
)

func TestAProcessorWithoutAVX2RunsThePlainLoops(t *testing.T) {
	const m, n, k = 9, 20, 37
	old := vectors{}
	a := matrix{data: normal(1, m*k), rows: m, cols: k, stride: k}
	w := matrix{data: normal(2, n*k), rows: n, cols: k, stride: k}
	run := func(multiply func(c, a, w matrix, add bool)) []float32 {
		c := matrix{data: make([]float32, m*n), rows: m, cols: n, stride: n}
		multiply(c, a, w, true)
		return c.data
	}
	if !slices.Equal(run(old.multiply), run(plain{}.multiply)) {
		t.Error("products differ")
	}
	x, y, z := normal(3, k), make([]float32, k), make([]float32, k)
	if old.exps(y, x, 1) != (plain{}).exps(z, x, 1) || !slices.Equal(y, z) {
		t.Error("exponentials differ")
	}
	if old.cross(x, y, 1) != (plain{}).cross(x, y, 1) || old.apart(x, y, 1) != (plain{}).apart(x, y, 1) ||
		old.mixture(y, z, 1) != (plain{}).mixture(y, z, 1) || old.squares(x) != (plain{}).squares(x) {
		t.Error("sums differ")
	}
}

func TestBothKernelsGiveTheSameProductsToRounding(t *testing.T) {
	if !kernels.avx2 {
		t.Skip("this processor has no AVX2")
	}
	const m, n, k = 70, 200, 131
	a := matrix{data: normal(1, m*k), rows: m, cols: k, stride: k}
	w := matrix{data: normal(2, n*k), rows: n, cols: k, stride: k}
	fast := matrix{data: make([]float32, m*n), rows: m, cols: n, stride: n}
	slow := matrix{data: make([]float32, m*n), rows: m, cols: n, stride: n}
	kernels.multiply(fast, a, w, false)
	plain{}.multiply(slow, a, w, false)
	for i := range fast.data {
		near(t, "element", float64(fast.data[i]), float64(slow.data[i]), 5e-5)
	}
}
