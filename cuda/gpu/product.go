//go:build cuda && cgo

package gpu

import (
	"errors"

	"github.com/draftscope/draftscope/cuda/driver"
)

// product starts dst = a·wᵀ, or adds that: in bf16 by cuBLASLt where the
// machine has it, else by kernels/gemm.cu. Where float is set, dst has float32
// values whatever the precision.
func (d *Device) product(dst, a, w matrix, add, float bool) error {
	if d.blas != nil && a.cols > 0 {
		return d.blasProduct(dst, a, w, add, float)
	}
	kind := "gemm"
	if float && d.precision == BF16 {
		kind = "logits"
	}
	// The two tiles give the same bits.
	name, rows, cols := kind+"_many_", 128, 128
	if dst.rows <= 64 || dst.cols <= 64 || ceil(dst.rows, rows)*ceil(dst.cols, cols) < d.card.SMs {
		name, rows, cols = kind+"_few_", 32, 32
	}
	g := driver.Grid{Blocks: [3]int{ceil(dst.rows, rows), ceil(dst.cols, cols)}, Threads: [3]int{256}}
	return d.launch("gemm", name, g, dst.at, dst.stride, a.at, a.stride, w.at, w.stride, dst.rows, dst.cols, a.cols, flag(add))
}

// blasProduct lays operands out as cuBLASLt wants them, where they do not lie
// so. It multiplies the same way wherever they lie.
func (d *Device) blasProduct(dst, a, w matrix, add, float bool) error {
	var errs []error
	put := func(name string, m matrix) driver.Operand {
		out, err := d.packed(name, m)
		errs = append(errs, err)
		return out
	}
	x, y, to := put("packed a", a), put("packed w", w), operand(dst)
	away := !float && (dst.at%16 != 0 || dst.stride%8 != 0)
	if away {
		to = driver.Operand{Rows: dst.rows, Cols: dst.cols, Stride: ceil(dst.cols, 8) * 8}
		var err error
		to.At, err = d.room("packed dst", to.Rows*to.Stride*2)
		errs = append(errs, err)
		if add && err == nil {
			errs = append(errs, d.pack(to, operand(dst), dst.cols))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := d.multiply(to, x, y, add, float); err != nil || !away {
		return err
	}
	return d.pack(operand(dst), to, dst.cols)
}

// packed is m with rows that begin on 16 bytes and a multiple of 8 columns, in
// scratch memory of that name unless m is so.
func (d *Device) packed(name string, m matrix) (driver.Operand, error) {
	if m.at%16 == 0 && m.stride%8 == 0 && m.cols%8 == 0 {
		return operand(m), nil
	}
	wide := ceil(m.cols, 8) * 8
	at, err := d.room(name, m.rows*wide*2)
	if err != nil {
		return driver.Operand{}, err
	}
	out := driver.Operand{At: at, Rows: m.rows, Cols: wide, Stride: wide}
	return out, d.pack(out, operand(m), wide)
}

// pack starts the copy of bf16 rows, with zeros from src's columns to wide.
func (d *Device) pack(dst, src driver.Operand, wide int) error {
	return d.launch("pack", "pack", d.spread(src.Rows*wide), dst.At, dst.Stride, src.At, src.Stride, src.Rows, src.Cols, wide)
}

func operand(m matrix) driver.Operand {
	return driver.Operand{At: m.at, Rows: m.rows, Cols: m.cols, Stride: m.stride}
}

func ceil(n, by int) int { return (n + by - 1) / by }

// flag is a bool as kernels take it.
func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}
