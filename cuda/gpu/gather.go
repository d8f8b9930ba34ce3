//go:build cuda && cgo

package gpu

import (
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// GatherRows implements [cuda.Device]; see kernels/gather.cu.
func (d *Device) GatherRows(dst, src cuda.Tensor, rows []int32) error {
	if err := cuda.CheckGather(dst, src, rows); err != nil {
		return err
	}
	m, err := d.views("gather", dst, src)
	if err != nil || dst.Rows == 0 || dst.Cols == 0 {
		return err
	}
	return d.card.Do(func() error { return d.gather(m[0], m[1], rows) })
}

// gather starts the copy of src's rows into dst.
func (d *Device) gather(dst, src matrix, rows []int32) error {
	at, err := d.params.send(bytesOf(rows))
	if err != nil {
		return err
	}
	g := driver.Grid{Blocks: [3]int{dst.rows}, Threads: [3]int{256}}
	return d.launch("gather", "gather_", g, dst.at, dst.stride, src.at, src.stride, at[0], dst.cols)
}
