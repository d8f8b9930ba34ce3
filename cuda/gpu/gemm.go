//go:build cuda && cgo

package gpu

import "github.com/draftscope/draftscope/cuda"

// Gemm implements [cuda.Device]; see product.go and kernels/gemm.cu.
func (d *Device) Gemm(dst, a, w cuda.Tensor, add bool) error {
	if err := cuda.CheckGemm(dst, a, w); err != nil {
		return err
	}
	m, err := d.views("gemm", dst, a, w)
	if err != nil || m[0].rows == 0 || m[0].cols == 0 {
		return err
	}
	return d.card.Do(func() error { return d.product(m[0], m[1], m[2], add, false) })
}
