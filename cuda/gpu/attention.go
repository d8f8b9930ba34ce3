//go:build cuda && cgo

package gpu

import (
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// attentionKeys is KEYS of kernels/attention.cu.
const attentionKeys = 32

// Attention implements [cuda.Device]; see kernels/attention.cu. Spans travel
// as they lie in memory.
func (d *Device) Attention(dst cuda.Tensor, args cuda.AttentionArgs) error {
	if err := args.Check(dst); err != nil {
		return err
	}
	m, err := d.views("attention", dst, args.Q, args.CtxK, args.CtxV, args.BlkK, args.BlkV)
	if err != nil || dst.Rows == 0 || dst.Cols == 0 {
		return err
	}
	return d.card.Do(func() error {
		if d.fastAttention(args) {
			return d.attentionFast(m, args)
		}
		at, err := d.params.send(bytesOf(args.Spans))
		if err != nil {
			return err
		}
		return d.attentionPlain(m, args, at[0], 0, 0)
	})
}

// attentionPlain starts the kernel for any call: unconditionally, or where the
// device's int at odd is mark.
func (d *Device) attentionPlain(m []matrix, args cuda.AttentionArgs, spans, odd driver.Ptr, mark int32) error {
	group := args.QHeads / args.KVHeads
	per := max(1, min(4, 16/group)) // rows of a block
	g := driver.Grid{
		Blocks: [3]int{ceil(m[0].rows, per), args.KVHeads}, Threads: [3]int{128},
		Shared: attentionShared(per*group, args.HeadDim),
	}
	return d.launch("attention", "attention_", g, m[0].at, m[0].stride, m[1].at, m[1].stride, m[2].at, m[2].stride,
		m[3].at, m[3].stride, m[4].at, m[4].stride, m[5].at, m[5].stride, spans, m[0].rows, group, args.HeadDim, per, args.Scale, odd, mark)
}

// attentionShared is the shared memory of a block, in bytes: queries, outputs,
// keys, scores, maxima, and sums in double.
func attentionShared(queries, dim int) int {
	floats := 2*queries*dim + attentionKeys*(dim+1) + queries*attentionKeys + (queries+1)/2*2
	return floats*4 + queries*8
}
