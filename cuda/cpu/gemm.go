package cpu

import "github.com/draftscope/draftscope/cuda"

// Gemm implements [cuda.Device].
func (d *Device) Gemm(dst, a, w cuda.Tensor, add bool) error {
	if err := cuda.CheckGemm(dst, a, w); err != nil {
		return err
	}
	var c, x, y matrix
	if err := views("gemm", operand{dst, &c}, operand{a, &x}, operand{w, &y}); err != nil {
		return err
	}
	d.product(c, x, y, add)
	return nil
}
