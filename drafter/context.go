package drafter

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
)

// extendRows bounds the rows that one pass of [Context.Extend] projects, and
// so its scratch memory.
const extendRows = 1024

// dflashContext holds a sequence's keys and values, ready for attention: row t
// of layer i's K is rope(k_norm(Wk·c_t)), of its V Wv·c_t.
type dflashContext struct {
	model *dflash
	rows  int
	keys  []cuda.Buffer // one a layer, [rows, kv heads * head dim]
	vals  []cuda.Buffer
}

// NewContext implements [Model].
func (m *dflash) NewContext() (Context, error) {
	return &dflashContext{model: m, keys: make([]cuda.Buffer, len(m.layers)), vals: make([]cuda.Buffer, len(m.layers))}, nil
}

// Len implements [Context].
func (c *dflashContext) Len() int { return c.rows }

// Close implements [Context].
func (c *dflashContext) Close() {
	for i := range c.keys {
		for _, b := range []cuda.Buffer{c.keys[i], c.vals[i]} {
			if b != nil {
				b.Close()
			}
		}
		c.keys[i], c.vals[i] = nil, nil
	}
	c.rows = 0
}

// layer views positions lo..hi-1 of layer i's keys and values.
func (c *dflashContext) layer(i, lo, hi int) (k, v cuda.Tensor) {
	if hi == 0 {
		return cuda.Tensor{}, cuda.Tensor{}
	}
	width := c.model.spec.KVHeads * c.model.spec.HeadDim
	return cuda.Matrix(c.keys[i], hi, width).RowRange(lo, hi), cuda.Matrix(c.vals[i], hi, width).RowRange(lo, hi)
}

// Extend implements [Context].
func (c *dflashContext) Extend(taps []cuda.Tensor) error {
	m := c.model
	if len(taps) != len(m.fc) {
		return fmt.Errorf("extending a context: %d taps, want %d", len(taps), len(m.fc))
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
	ctx := m.scratch.tensor(&o, "ctx", n, m.spec.Hidden)
	for p, w := range m.fc {
		o.gemm(ctx, taps[p].RowRange(lo, hi), w, p > 0)
	}
	o.norm(ctx, ctx, m.ctxNorm, m.spec.Eps)
	pos, same := make([]int32, n), make([]int32, n)
	for i := range pos {
		pos[i], same[i] = int32(c.rows+i), int32(i)
	}
	// One product for all layers fills a GPU; a row of weights gives the same
	// numbers wherever it lies.
	kv := m.scratch.tensor(&o, "kv", n, m.kv.Rows)
	o.gemm(kv, ctx, m.kv, false)
	for i := range m.layers {
		l := &m.layers[i]
		k, v := c.layer(i, c.rows, c.rows+n)
		o.gather(k, kv.ColRange(2*i*k.Cols, (2*i+1)*k.Cols), same)
		o.gather(v, kv.ColRange((2*i+1)*k.Cols, (2*i+2)*k.Cols), same)
		o.norm(k.Heads(m.spec.HeadDim), k.Heads(m.spec.HeadDim), l.kNorm, m.spec.Eps)
		o.rope(k, pos, m.spec)
	}
	if o.err == nil {
		c.rows += n
	}
	return o.err
}

// grow makes room for rows positions.
func (c *dflashContext) grow(rows int) error {
	for _, bufs := range [][]cuda.Buffer{c.keys, c.vals} {
		for i, b := range bufs {
			grown, err := c.model.dev.Grow(b, rows*c.model.spec.KVHeads*c.model.spec.HeadDim)
			if err != nil {
				return err
			}
			bufs[i] = grown
		}
	}
	return nil
}
