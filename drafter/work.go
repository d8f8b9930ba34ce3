package drafter

import "github.com/draftscope/draftscope/cuda"

// What a drafter's parts cannot do without, for the floor that a device's
// arithmetic and memory set. Products count two operations a multiply-add and
// read each weight once; norms, rotations and softmaxes, a few operations a
// value, are left out, as are activations that need not leave the chip.

// contextWork is that of a context's new rows: fc over all taps, and every
// layer's keys and values.
func (s Spec) contextWork(rows int) cuda.Work {
	h, taps := float64(s.Hidden), float64(len(s.Taps))
	weights := taps*h*h + float64(s.Layers)*2*h*float64(s.KVHeads*s.HeadDim)
	return cuda.Work{Flops: 2 * float64(rows) * weights, Values: weights + float64(rows)*taps*h}
}

// draftWork is that of one pass over blocks at anchors: every layer's products,
// and attention to the keys that its slots see.
func (s Spec) draftWork(anchors []int32) cuda.Work {
	h, wide, narrow := float64(s.Hidden), float64(s.Heads*s.HeadDim), float64(s.KVHeads*s.HeadDim)
	weights := float64(s.Layers) * (2*h*wide + 2*h*narrow + 3*h*float64(s.Inter))
	keys := 0 // that all slots see in all layers
	for _, rule := range s.Attention {
		for _, a := range anchors {
			for j := range s.BlockSize {
				span := rule.Span(int(a), j, 0, s.BlockSize)
				keys += int(span.CtxHi - span.CtxLo + span.BlkHi - span.BlkLo)
			}
		}
	}
	return cuda.Work{
		Flops:  2*float64(len(anchors)*s.BlockSize)*weights + 4*wide*float64(keys),
		Values: weights,
	}
}

// headWork is that of logits for so many rows in all, drafts' and targets',
// over one reading of the head.
func headWork(rows int, head cuda.Tensor) cuda.Work {
	weights := float64(head.Rows) * float64(head.Cols)
	return cuda.Work{Flops: 2 * float64(rows) * weights, Values: weights}
}

// ContextWork implements [Model].
func (m *dflash) ContextWork(rows int) cuda.Work { return m.spec.contextWork(rows) }

// DraftWork implements [Model].
func (m *dflash) DraftWork(anchors []int32) cuda.Work { return m.spec.draftWork(anchors) }
