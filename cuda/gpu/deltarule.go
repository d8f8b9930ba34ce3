//go:build cuda && cgo

package gpu

import (
	"errors"
	"fmt"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// How kernels/deltarule.cu is cut.
const (
	deltaColumns = 16   // columns of the state a block
	deltaRows    = 4096 // rows that are prepared at once
)

// DeltaRule implements [cuda.Device]; see kernels/deltarule.cu. It is always
// the plain recurrence, whatever the chunk, and so a row's result depends on
// the rows before it alone.
func (d *Device) DeltaRule(dst cuda.Tensor, args cuda.DeltaArgs) error {
	const op = "deltarule"
	if err := args.Check(dst); err != nil {
		return err
	}
	m, err := d.views(op, dst, args.Q, args.K, args.V, args.A, args.B, args.ALog, args.DTBias)
	if err != nil || dst.Rows == 0 || dst.Cols == 0 {
		return err
	}
	owner, err := d.owner(op, args.State)
	if err != nil {
		return err
	}
	kernel := ""
	for _, most := range []int{256, 128, 32} {
		if args.KeyDim <= most {
			kernel = fmt.Sprintf("deltarule%d_", most)
		}
	}
	if kernel == "" {
		return fmt.Errorf("%s: %w: keys of %d, the CUDA kernel holds 256 at most; use --backend cpu", op, cuda.ErrShape, args.KeyDim)
	}
	return d.card.Do(func() error {
		state, err := d.state(owner, args.State)
		if err != nil {
			return err
		}
		for lo := 0; lo < dst.Rows; lo += deltaRows {
			hi := min(lo+deltaRows, dst.Rows)
			var part [6]matrix // dst, q, k, v, a, b
			for i := range part {
				part[i] = d.rowRange(m[i], lo, hi)
			}
			if err := d.delta(kernel, part, m[6].at, m[7].at, state, args); err != nil {
				return err
			}
		}
		return nil
	})
}

// delta starts the rule for one run of rows.
func (d *Device) delta(kernel string, m [6]matrix, aLog, dtBias driver.Ptr, state matrix, args cuda.DeltaArgs) error {
	rows, hk, hv, dim := m[0].rows, args.KeyHeads, args.ValHeads, args.KeyDim
	var at [4]driver.Ptr // q, k, alpha, beta
	for i, n := range []int{rows * hk * dim, rows * hk * dim, rows * hv, rows * hv} {
		var err error
		if at[i], err = d.room(fmt.Sprintf("delta %d", i), n*4); err != nil {
			return err
		}
	}
	q, k, v, a, b := m[1], m[2], m[3], m[4], m[5]
	err := d.launch("deltarule", "prepare_", driver.Grid{Blocks: [3]int{rows}, Threads: [3]int{256}}, at[0], at[1], at[2], at[3],
		q.at, q.stride, k.at, k.stride, a.at, a.stride, b.at, b.stride, aLog, dtBias, hk, hv, dim)
	g := driver.Grid{Blocks: [3]int{ceil(args.ValDim, deltaColumns), hv}, Threads: [3]int{128}}
	return errors.Join(err, d.launch("deltarule", kernel, g, m[0].at, m[0].stride, at[0], at[1], at[2], at[3],
		v.at, v.stride, state.at, state.stride, rows, hk, hv, dim, args.ValDim))
}

// state is the float32 memory of a state. Where values are bf16, the first use
// as a state gives the buffer a float32 copy, which holds from then on.
func (d *Device) state(b *buffer, t cuda.Tensor) (matrix, error) {
	m := matrix{rows: t.Rows, cols: t.Cols, stride: t.Stride}
	at := driver.Ptr(b.at.Load())
	if d.precision == BF16 && b.wide == 0 {
		wide, err := d.card.Alloc(b.n * 4)
		if err != nil {
			return m, fmt.Errorf("widening a state: %w", err)
		}
		b.wide = wide
		if err := d.launch("widen", "widen", d.spread(b.n), wide, at, b.n); err != nil {
			return m, err
		}
	}
	if b.wide != 0 {
		at = b.wide
	}
	m.at = at + driver.Ptr(t.Off*4)
	return m, nil
}
