//go:build cuda && cgo

package gpu

import (
	"errors"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// How kernels/conv.cu is cut.
const convStrip = 16 // rows a thread has of its columns

// Conv implements [cuda.Device]; see kernels/conv.cu.
func (d *Device) Conv(dst, x, w, history cuda.Tensor) error {
	if err := cuda.CheckConv(dst, x, w, history); err != nil {
		return err
	}
	m, err := d.views("conv", dst, x, w, history)
	if err != nil || x.Rows == 0 || x.Cols == 0 {
		return err
	}
	return d.card.Do(func() error {
		past := m[3]
		kernel, g := "conv_", d.spread(x.Rows*x.Cols)
		if wide := 16 / d.width; w.Cols == 4 && x.Cols%wide == 0 && d.aligned(m[0]) && d.aligned(m[1]) && d.aligned(past) {
			kernel = "conv_pieces_" // gives the same bits
			g = driver.Grid{Blocks: [3]int{ceil(x.Cols/wide*ceil(x.Rows, convStrip), 128)}, Threads: [3]int{128}}
		}
		err := d.launch("conv", kernel, g, m[0].at, m[0].stride, m[1].at, m[1].stride,
			m[2].at, m[2].stride, past.at, past.stride, x.Rows, x.Cols, w.Cols)
		if past.rows == 0 {
			return err
		}
		g = driver.Grid{Blocks: [3]int{ceil(x.Cols, 256)}, Threads: [3]int{256}}
		return errors.Join(err, d.launch("conv", "remember_", g, past.at, past.stride, m[1].at, m[1].stride, x.Rows, x.Cols, past.rows))
	})
}

// aligned says whether the rows of m begin on 16 bytes.
func (d *Device) aligned(m matrix) bool {
	return m.at%16 == 0 && m.stride*d.width%16 == 0
}
