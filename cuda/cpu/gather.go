package cpu

import "github.com/draftscope/draftscope/cuda"

// GatherRows implements [cuda.Device].
func (d *Device) GatherRows(dst, src cuda.Tensor, rows []int32) error {
	if err := cuda.CheckGather(dst, src, rows); err != nil {
		return err
	}
	var out, in matrix
	if err := views("gather", operand{dst, &out}, operand{src, &in}); err != nil {
		return err
	}
	d.rows(out.rows, out.cols/4, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			copy(out.row(i), in.row(int(rows[i])))
		}
	})
	return nil
}
