package cpu

import "github.com/draftscope/draftscope/cuda"

// GateMul implements [cuda.Device].
func (d *Device) GateMul(dst, gate, x cuda.Tensor, act cuda.Activation) error {
	const op = "gatemul"
	var out, g, in matrix
	if err := views(op, operand{"dst", dst, &out}, operand{"gate", gate, &g}, operand{"x", x, &in}); err != nil {
		return err
	}
	if out.rows != g.rows || out.cols != g.cols || out.rows != in.rows || out.cols != in.cols {
		return shapeError(op, "dst %s, gate %s, x %s: want one shape", out, g, in)
	}
	if act != cuda.SiLU && act != cuda.Sigmoid {
		return shapeError(op, "unknown activation %d", act)
	}
	d.rows(out.rows, out.cols*8, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			kernels.gate(out.row(i), g.row(i), in.row(i), act == cuda.SiLU)
		}
	})
	return nil
}
