//go:build cuda && cgo

package gpu

import (
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// The constants of kernels/fast_attention.cu that its launch needs; a test
// compares them with the source.
const (
	fastAttentionRows    = 16
	fastAttentionGroup   = 4
	fastAttentionDim     = 128
	fastAttentionThreads = 160
	fastAttentionShared  = 2*8192 + 3*4*8192 + 128
)

// fastAttention says whether the kernel for draft blocks on Hopper can take a
// call. That depends on the model alone, never on the number of rows: the
// kernel shares tiles of keys among the 16 rows of a block.
func (d *Device) fastAttention(args cuda.AttentionArgs) bool {
	return d.hopper() && args.Block == fastAttentionRows && args.Q.Rows%fastAttentionRows == 0 &&
		args.HeadDim == fastAttentionDim && args.QHeads == fastAttentionGroup*args.KVHeads
}

// attentionFast starts the kernel for draft blocks, and after it the plain one
// for the case that a result is NaN or Inf: the fast kernel multiplies keys that
// a row does not see by 0, the plain one skips them. The fast one then leaves
// the call's own mark, so that nothing need be cleared between calls.
func (d *Device) attentionFast(m []matrix, args cuda.AttentionArgs) error {
	dst := m[0]
	in := [5]matrix{}
	for i, name := range []string{"q", "context k", "context v", "block k", "block v"} {
		in[i] = m[1+i]
		if in[i].rows == 0 || in[i].at%16 == 0 && in[i].stride%8 == 0 {
			continue
		}
		var err error
		if in[i], err = d.dense("fast "+name, in[i]); err != nil {
			return err
		}
	}
	var maps [5][]byte
	for i := range in {
		tall := 64
		if i == 0 {
			tall = fastAttentionRows
		}
		described := in[i]
		if described.rows == 0 {
			described = in[0] // never read, but a map must be of something
		}
		var err error
		if maps[i], err = driver.TensorMap(operand(described), tall); err != nil {
			return err
		}
	}
	at, err := d.params.send(maps[0], maps[1], maps[2], maps[3], maps[4], bytesOf(args.Spans))
	if err != nil {
		return err
	}
	odd, err := d.room("not finite", 4)
	if err != nil {
		return err
	}
	if d.marks == 0 {
		if err := d.card.Zero(odd, 4); err != nil {
			return err
		}
	}
	d.marks++
	to := dst
	away := dst.at%4 != 0 || dst.stride%2 != 0
	if away {
		to = matrix{rows: dst.rows, cols: dst.cols, stride: dst.cols}
		if to.at, err = d.room("fast dst", dst.rows*dst.cols*2); err != nil {
			return err
		}
	}
	g := driver.Grid{Blocks: [3]int{dst.rows / fastAttentionRows, args.KVHeads}, Threads: [3]int{fastAttentionThreads}, Shared: fastAttentionShared}
	if err := d.launch("fast_attention", "fast_attention", g, at[0], at[1], at[2], at[3], at[4], at[5], to.at, to.stride, dst.rows, float64(args.Scale), odd, d.marks); err != nil {
		return err
	}
	if away {
		if err := d.pack(operand(dst), operand(to), dst.cols); err != nil {
			return err
		}
	}
	return d.attentionPlain(m, args, at[5], odd, d.marks)
}
