package cpu

import "github.com/draftscope/draftscope/cuda"

// GateMul implements [cuda.Device].
func (d *Device) GateMul(dst, gate, x cuda.Tensor, act cuda.Activation) error {
	if err := cuda.CheckGateMul(dst, gate, x, act); err != nil {
		return err
	}
	var out, g, in matrix
	if err := views("gatemul", operand{dst, &out}, operand{gate, &g}, operand{x, &in}); err != nil {
		return err
	}
	d.rows(out.rows, out.cols*8, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			kernels.gate(out.row(i), g.row(i), in.row(i), act == cuda.SiLU)
		}
	})
	return nil
}
