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
	scale := make([]float32, in.cols)
	for j, v := range weight.row(0) {
		scale[j] = gain + v
	}
	d.rows(in.rows, in.cols*2, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			src := in.row(i)
			inv := 1 / math.Sqrt(kernels.squares(src)/float64(len(src))+float64(eps))
			kernels.scaled(out.row(i), src, scale, float32(inv))
		}
	})
	return nil
}
