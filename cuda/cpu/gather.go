package cpu

import "github.com/draftscope/draftscope/cuda"

// GatherRows implements [cuda.Device].
func (d *Device) GatherRows(dst, src cuda.Tensor, rows []int32) error {
	const op = "gather"
	var out, in matrix
	if err := views(op, operand{"dst", dst, &out}, operand{"src", src, &in}); err != nil {
		return err
	}
	if out.rows != len(rows) || out.cols != in.cols {
		return shapeError(op, "dst %s, src %s, %d rows: want [R N], [S N], R", out, in, len(rows))
	}
	for i, r := range rows {
		if r < 0 || int(r) >= in.rows {
			return shapeError(op, "row %d of %d is %d, but src is %s", i, len(rows), r, in)
		}
	}
	d.rows(out.rows, out.cols/4, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			copy(out.row(i), in.row(int(rows[i])))
		}
	})
	return nil
}
