//go:build cuda && cgo

package gpu

import (
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// RMSNorm implements [cuda.Device]; see kernels/rmsnorm.cu.
func (d *Device) RMSNorm(dst, x, w cuda.Tensor, eps, gain float32) error {
	if err := cuda.CheckRMSNorm(dst, x, w); err != nil {
		return err
	}
	m, err := d.views("rmsnorm", dst, x, w)
	if err != nil || dst.Rows == 0 || dst.Cols == 0 {
		return err
	}
	// A row's sum is that of its own threads, whose number only cols decides.
	chunks := ceil(dst.Cols, 8)
	threads := ceil(ceil(chunks, ceil(chunks, 256)), 32) * 32
	return d.card.Do(func() error {
		g := driver.Grid{Blocks: [3]int{dst.Rows}, Threads: [3]int{threads}}
		return d.launch("rmsnorm", "rmsnorm_", g, m[0].at, m[0].stride, m[1].at, m[1].stride, m[2].at, dst.Cols, eps, gain)
	})
}
