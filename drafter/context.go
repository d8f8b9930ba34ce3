package drafter

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
)

// extendRows bounds the rows that one pass of [Context.Extend] projects, and
// so its scratch memory. A GPU's products need some thousands to fill it.
const extendRows = 4096

// dflashContext holds a sequence's keys and values, ready for attention: row t
// of layer i's K is rope(k_norm(Wk·c_t)), of its V Wv·c_t.
type dflashContext struct {
	model *dflash
	rows  int
	kv    []cuda.Buffer // one a layer, K beside V: [rows, 2 * kv heads * head dim]
}

// NewContext implements [Model].
func (m *dflash) NewContext() (Context, error) {
	return &dflashContext{model: m, kv: make([]cuda.Buffer, len(m.layers))}, nil
}

// Len implements [Context].
func (c *dflashContext) Len() int { return c.rows }

// Close implements [Context].
func (c *dflashContext) Close() {
	for i, b := range c.kv {
		if b != nil {
			b.Close()
		}
		c.kv[i] = nil
	}
	c.rows = 0
}

// layer views positions lo..hi-1 of layer i's keys and values.
func (c *dflashContext) layer(i, lo, hi int) (k, v cuda.Tensor) {
	if hi == 0 {
		return cuda.Tensor{}, cuda.Tensor{}
	}
	width := c.model.spec.KVHeads * c.model.spec.HeadDim
	both := cuda.Matrix(c.kv[i], hi, 2*width).RowRange(lo, hi)
	return both.ColRange(0, width), both.ColRange(width, 2*width)
}

// Extend implements [Context].
func (c *dflashContext) Extend(taps []cuda.Tensor) error {
	m := c.model
	if len(taps) != len(m.spec.Taps) {
		return fmt.Errorf("extending a context: %d taps, want %d", len(taps), len(m.spec.Taps))
	}
	for _, t := range taps {
		if t.Rows != taps[0].Rows || t.Cols != m.spec.Hidden {
			return fmt.Errorf("extending a context: %w: a tap of %d x %d, want %d x %d", cuda.ErrShape, t.Rows, t.Cols, taps[0].Rows, m.spec.Hidden)
		}
	}
	// All the room at once: on a GPU, taking memory waits for the work before.
	if err := c.grow(c.rows + taps[0].Rows); err != nil {
		return fmt.Errorf("extending a context: %w", err)
	}
	for lo := 0; lo < taps[0].Rows; lo += extendRows {
		if err := c.extend(taps, lo, min(lo+extendRows, taps[0].Rows)); err != nil {
			return fmt.Errorf("extending a context: %w", err)
		}
	}
	return nil
}

// extend appends rows lo..hi-1 of the taps.
func (c *dflashContext) extend(taps []cuda.Tensor, lo, hi int) error {
	m, n := c.model, hi-lo
	o := ops{dev: m.dev}
	in := m.beside(&o, taps, lo, hi)
	ctx := m.scratch.tensor(&o, "ctx", n, m.spec.Hidden)
	o.gemm(ctx, in, m.fc, false)
	o.norm(ctx, ctx, m.ctxNorm, m.spec.Eps)
	pos := make([]int32, n)
	for i := range pos {
		pos[i] = int32(c.rows + i)
	}
	for i := range m.layers {
		l := &m.layers[i]
		k, v := c.layer(i, c.rows, c.rows+n)
		both := k
		both.Cols += v.Cols
		o.gemm(both, ctx, l.kv, false)
		o.normRope(k, l.kNorm, pos, m.spec)
	}
	if o.err == nil {
		c.rows += n
	}
	return o.err
}

// beside views rows lo..hi-1 of the taps as one matrix [hi-lo, taps*H], where
// they are columns of one that follow each other; else it lays them out so.
func (m *dflash) beside(o *ops, taps []cuda.Tensor, lo, hi int) cuda.Tensor {
	all, h := taps[0], m.spec.Hidden
	all.Cols = len(taps) * h
	together := all.Stride >= all.Cols
	for p, t := range taps {
		together = together && t.Buf == all.Buf && t.Stride == all.Stride && t.Off == all.Off+p*h
	}
	if together {
		return all.RowRange(lo, hi)
	}
	all = m.scratch.tensor(o, "taps", hi-lo, all.Cols)
	same := make([]int32, hi-lo)
	for i := range same {
		same[i] = int32(i)
	}
	for p, t := range taps {
		o.gather(all.ColRange(p*h, (p+1)*h), t.RowRange(lo, hi), same)
	}
	return all
}

// grow makes room for rows positions.
func (c *dflashContext) grow(rows int) error {
	for i, b := range c.kv {
		grown, err := c.model.dev.Grow(b, rows*2*c.model.spec.KVHeads*c.model.spec.HeadDim)
		if err != nil {
			return err
		}
		c.kv[i] = grown
	}
	return nil
}
