//go:build cuda && cgo

package gpu

import (
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// GateMul implements [cuda.Device]; see kernels/gatemul.cu.
func (d *Device) GateMul(dst, gate, x cuda.Tensor, act cuda.Activation) error {
	if err := cuda.CheckGateMul(dst, gate, x, act); err != nil {
		return err
	}
	m, err := d.views("gatemul", dst, gate, x)
	if err != nil || dst.Rows == 0 || dst.Cols == 0 {
		return err
	}
	g := driver.Grid{Blocks: [3]int{ceil(dst.Cols, 8*128), min(dst.Rows, 1<<15)}, Threads: [3]int{128}}
	return d.card.Do(func() error {
		return d.launch("gatemul", "gatemul_", g, m[0].at, m[0].stride, m[1].at, m[1].stride,
			m[2].at, m[2].stride, dst.Rows, dst.Cols, flag(act == cuda.SiLU))
	})
}
