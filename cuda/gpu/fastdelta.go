//go:build cuda && cgo

package gpu

import (
	"errors"
	"strconv"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// The constants of kernels/fast_delta.cu that its launches need; a test compares
// them with the source.
const (
	fastDeltaChunk   = 64
	fastDeltaColumns = 64 // of the state a block
	fastDeltaParts   = 5*8192 + 1024
	fastDeltaThreads = 160
)

// fastDeltaShared is the shared memory of a block that walks along the chunks:
// two chunks' tiles, one tile of outputs, barriers.
func fastDeltaShared(keyDim int) int { return 2*((2*keyDim/64+6)*8192+1024) + 8192 + 64 }

// deltaTail is how many rows at a call's end, fewer than a chunk, are left to the
// recurrence: for so few it takes no longer. A call of few rows, as in decoding,
// is all tail. What becomes of a row depends on the borders of chunks alone.
const deltaTail = 16

// chunked is how many of a call's rows are computed in chunks of 64: those of the
// chunks that Chunk asks for, or leaves to the backend, where the kernels on
// Hopper can take the model's heads.
func (d *Device) chunked(args cuda.DeltaArgs) int {
	if !d.hopper() || args.Chunk != 0 && args.Chunk != fastDeltaChunk || args.KeyDim != 64 && args.KeyDim != 128 ||
		args.ValDim%8 != 0 {
		return 0
	}
	rows := args.Q.Rows
	if tail := rows % fastDeltaChunk; tail <= deltaTail {
		rows -= tail
	}
	return rows
}

// deltaChunks starts the rule in chunks; see kernels/fast_delta.cu. After it the
// recurrence does again the heads' columns whose state has become NaN or Inf:
// such a value would reach rows before it in its chunk.
func (d *Device) deltaChunks(r *deltaRun) error {
	rows, hv := r.m[0].rows, r.ValHeads
	if rows == 0 {
		return nil
	}
	in := r.m
	var maps [3][]byte // q, k, v
	for i, name := range []string{"fast q", "fast k", "fast v"} {
		var err error
		if !d.aligned(in[1+i]) {
			if in[1+i], err = d.dense(name, in[1+i]); err != nil {
				return err
			}
		}
		if maps[i], err = driver.TensorMap(operand(in[1+i]), fastDeltaChunk); err != nil {
			return err
		}
	}
	dst, q, k, a, b := in[0], in[1], in[2], in[4], in[5]
	at, err := d.params.send(maps[0], maps[1], maps[2])
	if err != nil {
		return err
	}
	chunks, slices := ceil(rows, fastDeltaChunk), ceil(r.ValDim, fastDeltaColumns)
	parts, err := d.room("delta parts", chunks*hv*fastDeltaParts)
	if err != nil {
		return err
	}
	flags := (hv*slices + 1) * 4
	redo, err := d.room("delta redo", flags)
	if err != nil {
		return err
	}
	to := dst
	if !d.aligned(dst) {
		to.stride = dst.cols
		if to.at, err = d.room("fast dst", rows*dst.cols*2); err != nil {
			return err
		}
	}
	name := strconv.Itoa(r.KeyDim)
	err = errors.Join(
		d.card.Zero(redo, flags),
		d.launch("fast_delta", "fast_delta_parts"+name, driver.Grid{Blocks: [3]int{chunks, hv}, Threads: [3]int{128}},
			parts, q.at, q.stride, k.at, k.stride, a.at, a.stride, b.at, b.stride, r.aLog, r.dtBias, rows, r.KeyHeads, hv),
		d.launch("fast_delta", "fast_delta_state"+name,
			driver.Grid{Blocks: [3]int{slices, hv}, Threads: [3]int{fastDeltaThreads}, Shared: fastDeltaShared(r.KeyDim)},
			at[0], at[1], at[2], parts, to.at, to.stride, r.state.at, r.state.stride, redo, rows, r.KeyHeads, hv, r.ValDim))
	if err == nil && to.at != dst.at {
		err = d.pack(operand(dst), operand(to), dst.cols)
	}
	return errors.Join(err, d.deltaRows(r, redo))
}
