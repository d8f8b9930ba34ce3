//go:build cuda && cgo

package gpu

import (
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// ScatterRows implements [cuda.Device]; see kernels/scatter.cu.
func (d *Device) ScatterRows(dst, src cuda.Tensor, rows []int32) error {
	if err := cuda.CheckScatter(dst, src, rows); err != nil {
		return err
	}
	m, err := d.views("scatter", dst, src)
	if err != nil || src.Rows == 0 || src.Cols == 0 {
		return err
	}
	wide := src.Cols*d.width%16 == 0
	for _, v := range m {
		wide = wide && v.at%16 == 0 && v.stride*d.width%16 == 0
	}
	return d.card.Do(func() error {
		at, err := d.params.send(bytesOf(rows))
		if err != nil {
			return err
		}
		g := driver.Grid{Blocks: [3]int{src.Rows}, Threads: [3]int{256}}
		return d.launch("scatter", "scatter_", g, m[0].at, m[0].stride, m[1].at, m[1].stride, at[0], src.Cols, flag(wide))
	})
}
