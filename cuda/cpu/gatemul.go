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
	d.rows(out.rows, out.cols*16, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			y, b := out.row(i), in.row(i)
			for j, v := range g.row(i) {
				s := sigmoid(v)
				if act == cuda.SiLU {
					s *= v
				}
				y[j] = s * b[j]
			}
		}
	})
	return nil
}

// sigmoid is 1/(1+e^-x).
func sigmoid(x float32) float32 { return 1 / (1 + exp(-x)) }
