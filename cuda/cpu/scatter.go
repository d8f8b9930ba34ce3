package cpu

import "github.com/draftscope/draftscope/cuda"

// ScatterRows implements [cuda.Device].
func (d *Device) ScatterRows(dst, src cuda.Tensor, rows []int32) error {
	if err := cuda.CheckScatter(dst, src, rows); err != nil {
		return err
	}
	var to, from matrix
	if err := views("scatter", operand{dst, &to}, operand{src, &from}); err != nil {
		return err
	}
	for i, r := range rows {
		copy(to.row(int(r)), from.row(i))
	}
	return nil
}
