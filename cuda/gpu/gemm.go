//go:build cuda && cgo

package gpu

import (
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// Gemm implements [cuda.Device]; see kernels/gemm.cu.
func (d *Device) Gemm(dst, a, w cuda.Tensor, add bool) error {
	if err := cuda.CheckGemm(dst, a, w); err != nil {
		return err
	}
	m, err := d.views("gemm", dst, a, w)
	if err != nil || m[0].rows == 0 || m[0].cols == 0 {
		return err
	}
	return d.card.Do(func() error { return d.product("gemm", m[0], m[1], m[2], add) })
}

// product starts dst = a·wᵀ, or adds that, in the kernels of gemm.cu whose
// names begin with kind. The two tiles give the same bits.
func (d *Device) product(kind string, dst, a, w matrix, add bool) error {
	name, rows, cols := kind+"_many_", 128, 128
	if dst.rows <= 64 || dst.cols <= 64 || tiles(dst, 128, 128) < d.card.SMs {
		name, rows, cols = kind+"_few_", 32, 32
	}
	g := driver.Grid{Blocks: [3]int{ceil(dst.rows, rows), ceil(dst.cols, cols)}, Threads: [3]int{256}}
	return d.launch("gemm", name, g, dst.at, dst.stride, a.at, a.stride, w.at, w.stride, dst.rows, dst.cols, a.cols, flag(add))
}

func tiles(m matrix, rows, cols int) int { return ceil(m.rows, rows) * ceil(m.cols, cols) }

func ceil(n, by int) int { return (n + by - 1) / by }

// flag is a bool as kernels take it.
func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}
