//go:build cuda && cgo

package gpu

import (
	"errors"
	"fmt"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// What the launches of kernels/fast_attention.cu need; a test compares the
// shared memory with the source.
const (
	fastAttentionRows      = 64 // of a tile's products: query rows times heads
	fastAttentionGroup     = 8  // heads of a group, at most
	fastAttentionThreads   = 160
	fastAttentionShared128 = 114816
	fastAttentionShared256 = 163968
)

// fastAttention says whether Hopper's kernel can take a call. That depends on
// the model alone, never on the rows. The kernel takes keys in tiles counted
// from the first: block rows, whose place in a call is no property of theirs,
// must therefore come in blocks that divide a tile.
func (d *Device) fastAttention(args cuda.AttentionArgs) bool {
	block := args.BlkK.Rows == 0 || args.Block%16 == 0 && args.Block > 0 && cuda.KeyTile%args.Block == 0
	return d.hopper() && block && (args.HeadDim == 128 || args.HeadDim == 256) && args.QHeads <= fastAttentionGroup*args.KVHeads
}

// attentionFast starts Hopper's kernel.
func (d *Device) attentionFast(m []matrix, args cuda.AttentionArgs) error {
	group := args.QHeads / args.KVHeads
	per := fastAttentionRows // query rows of a tile: a multiple of 8, for the swizzle
	for per*group > fastAttentionRows {
		per /= 2
	}
	in := [5]matrix{}
	var maps [5][]byte
	for i, name := range []string{"q", "context k", "context v", "block k", "block v"} {
		in[i] = m[1+i]
		if in[i].rows == 0 {
			in[i] = in[0] // never read, but a map must be of something
		}
		var err error
		if in[i].at%16 != 0 || in[i].stride%8 != 0 {
			if in[i], err = d.dense("fast "+name, in[i]); err != nil {
				return err
			}
		}
		tall := cuda.KeyTile
		if i == 0 {
			tall = per
		}
		if maps[i], err = driver.TensorMap(operand(in[i]), tall); err != nil {
			return err
		}
	}
	tiles := attentionTiles(args.Spans, per)
	at, err := d.params.send(maps[0], maps[1], maps[2], maps[3], maps[4], bytesOf(args.Spans), bytesOf(tiles))
	if err != nil {
		return err
	}
	dst, to := m[0], m[0]
	away := dst.at%4 != 0 || dst.stride%2 != 0
	if away {
		to = matrix{rows: dst.rows, cols: dst.cols, stride: dst.cols}
		if to.at, err = d.room("fast dst", dst.rows*dst.cols*2); err != nil {
			return err
		}
	}
	shared := fastAttentionShared128
	if args.HeadDim == 256 {
		shared = fastAttentionShared256
	}
	g := driver.Grid{Blocks: [3]int{len(tiles), args.KVHeads}, Threads: [3]int{fastAttentionThreads}, Shared: shared}
	err = d.launch("fast_attention", fmt.Sprintf("fast_attention_%d", args.HeadDim), g,
		at[0], at[1], at[2], at[3], at[4], at[5], at[6], to.at, to.stride, group, per, float64(args.Scale))
	if away {
		err = errors.Join(err, d.pack(operand(dst), operand(to), dst.cols))
	}
	return err
}
