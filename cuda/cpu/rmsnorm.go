package cpu

import (
	"math"

	"github.com/draftscope/draftscope/cuda"
)

// RMSNorm implements [cuda.Device]. The mean of squares is summed in float64.
func (d *Device) RMSNorm(dst, x, w cuda.Tensor, eps, gain float32) error {
	if err := cuda.CheckRMSNorm(dst, x, w); err != nil {
		return err
	}
	var out, in, weight matrix
	if err := views("rmsnorm", operand{dst, &out}, operand{x, &in}, operand{w, &weight}); err != nil {
		return err
	}
	if in.cols == 0 || in.rows == 0 {
		return nil
	}
	scale := gains(weight.row(0), gain)
	d.rows(in.rows, in.cols*2, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			rmsnorm(out.row(i), in.row(i), scale, eps)
		}
	})
	return nil
}

// gains is gain + w.
func gains(w []float32, gain float32) []float32 {
	out := make([]float32, len(w))
	for j, v := range w {
		out[j] = gain + v
	}
	return out
}

// rmsnorm is RMSNorm of one row; dst may be x.
func rmsnorm(dst, x, gains []float32, eps float32) {
	inv := 1 / math.Sqrt(kernels.squares(x)/float64(len(x))+float64(eps))
	kernels.scaled(dst, x, gains, float32(inv))
}
