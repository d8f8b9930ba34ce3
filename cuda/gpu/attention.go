//go:build cuda && cgo

package gpu

import (
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// attentionKeys is KEYS of kernels/attention.cu.
const attentionKeys = 32

// Attention implements [cuda.Device]; see kernels/attention.cu and
// fast_attention.cu. Spans travel as they lie in memory.
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
		return d.attentionPlain(m, args)
	})
}

func (d *Device) attentionPlain(m []matrix, args cuda.AttentionArgs) error {
	group := args.QHeads / args.KVHeads
	per := max(1, min(4, 16/group)) // rows of a block
	tiles := attentionTiles(args.Spans, per)
	at, err := d.params.send(bytesOf(args.Spans), bytesOf(tiles))
	if err != nil {
		return err
	}
	g := driver.Grid{
		Blocks: [3]int{len(tiles), args.KVHeads}, Threads: [3]int{128},
		Shared: attentionShared(per*group, args.HeadDim),
	}
	return d.launch("attention", "attention_", g, m[0].at, m[0].stride, m[1].at, m[1].stride, m[2].at, m[2].stride,
		m[3].at, m[3].stride, m[4].at, m[4].stride, m[5].at, m[5].stride, at[0], at[1], group, args.HeadDim, per, args.Scale)
}

// attentionShared is the shared memory of a block, in bytes: queries, outputs,
// keys, scores, maxima, and sums in double.
func attentionShared(queries, dim int) int {
	floats := 2*queries*dim + attentionKeys*(dim+1) + queries*attentionKeys + (queries+1)/2*2
	return floats*4 + queries*8
}

// attentionTile is query rows row..row+n-1, which one block of a grid takes.
type attentionTile struct{ row, n int32 }

// attentionTiles cuts query rows into tiles of at most most neighbours that see
// much the same keys: rows of other sequences see others, far away. No result
// depends on where the cuts are.
func attentionTiles(spans []cuda.Span, most int) []attentionTile {
	tiles := make([]attentionTile, 0, len(spans)/most+1)
	var ctx, blk reach // of the last tile
	widest := int32(0) // and of its rows
	for i, s := range spans {
		c, b := ctx.with(s.CtxLo, s.CtxHi), blk.with(s.BlkLo, s.BlkHi)
		own := reach{}.with(s.CtxLo, s.CtxHi).steps() + reach{}.with(s.BlkLo, s.BlkHi).steps()
		wide := max(widest, own)
		if n := len(tiles); n > 0 && int(tiles[n-1].n) < most && c.steps()+b.steps() <= wide+1 {
			tiles[n-1].n++
			ctx, blk, widest = c, b, wide
			continue
		}
		tiles = append(tiles, attentionTile{int32(i), 1})
		ctx, blk, widest = reach{}.with(s.CtxLo, s.CtxHi), reach{}.with(s.BlkLo, s.BlkHi), own
	}
	return tiles
}

// reach is the keys lo..hi-1 that some rows see, and those between.
type reach struct{ lo, hi int32 }

func (r reach) with(lo, hi int32) reach {
	switch {
	case lo >= hi:
		return r
	case r.lo >= r.hi:
		return reach{lo, hi}
	}
	return reach{min(r.lo, lo), max(r.hi, hi)}
}

// steps is how many tiles of keys a block goes through.
func (r reach) steps() int32 {
	if r.lo >= r.hi {
		return 0
	}
	return (r.hi+cuda.KeyTile-1)/cuda.KeyTile - r.lo/cuda.KeyTile
}
