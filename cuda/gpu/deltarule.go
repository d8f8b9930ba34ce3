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
	deltaMost    = 4096 // rows that are prepared at once, in whole chunks
)

// DeltaRule implements [cuda.Device]. With Chunk 1 it is the plain recurrence of
// kernels/deltarule.cu, and a row's result depends on the rows before it alone.
// So it is with every other chunk, but where the kernels in chunks of 64 can
// take the call: see fastdelta.go.
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
		chunked := d.chunked(args)
		for lo := 0; lo < dst.Rows; lo += deltaMost {
			hi := min(lo+deltaMost, dst.Rows)
			r := &deltaRun{DeltaArgs: args, kernel: kernel, aLog: m[6].at, dtBias: m[7].at, state: state}
			cut := min(max(lo, chunked), hi)
			for i := range r.m {
				r.m[i] = d.rowRange(m[i], lo, cut)
			}
			if err := d.deltaChunks(r); err != nil {
				return err
			}
			for i := range r.m {
				r.m[i] = d.rowRange(m[i], cut, hi)
			}
			if err := d.deltaRows(r, 0); err != nil {
				return err
			}
		}
		return nil
	})
}

// deltaRun is the rule for one run of rows.
type deltaRun struct {
	cuda.DeltaArgs
	kernel       string    // of the recurrence
	m            [6]matrix // dst, q, k, v, a, b
	aLog, dtBias driver.Ptr
	state        matrix
}

// deltaRows starts the recurrence. Where redo is not 0, it does again only what
// deltaChunks has flagged there.
func (d *Device) deltaRows(r *deltaRun, redo driver.Ptr) error {
	m, args := &r.m, &r.DeltaArgs
	if m[0].rows == 0 {
		return nil
	}
	all, slices := driver.Ptr(0), ceil(args.ValDim, fastDeltaColumns)
	if redo != 0 {
		all = redo + driver.Ptr(args.ValHeads*slices*4)
	}
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
		q.at, q.stride, k.at, k.stride, a.at, a.stride, b.at, b.stride, r.aLog, r.dtBias, hk, hv, dim, all)
	g := driver.Grid{Blocks: [3]int{ceil(args.ValDim, deltaColumns), hv}, Threads: [3]int{128}}
	return errors.Join(err, d.launch("deltarule", r.kernel, g, m[0].at, m[0].stride, at[0], at[1], at[2], at[3],
		v.at, v.stride, r.state.at, r.state.stride, rows, hk, hv, dim, args.ValDim, redo, slices))
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
