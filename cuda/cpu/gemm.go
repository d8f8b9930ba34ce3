package cpu

import "github.com/draftscope/draftscope/cuda"

// Gemm implements [cuda.Device].
func (d *Device) Gemm(dst, a, w cuda.Tensor, add bool) error {
	const op = "gemm"
	var c, x, y matrix
	if err := views(op, operand{"dst", dst, &c}, operand{"a", a, &x}, operand{"w", w, &y}); err != nil {
		return err
	}
	if c.rows != x.rows || c.cols != y.rows || x.cols != y.cols {
		return shapeError(op, "dst %s, a %s, w %s: want [M N], [M K], [N K]", c, x, y)
	}
	d.product(c, x, y, add)
	return nil
}
