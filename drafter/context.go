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
	cap   int
	keys  []cuda.Buffer // one a layer, [cap, kv heads * head dim]
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
	c.rows, c.cap = 0, 0
}

// layer views positions lo..hi-1 of layer i's keys and values.
func (c *dflashContext) layer(i, lo, hi int) (k, v cuda.Tensor) {
	if hi == 0 {
		return cuda.Tensor{}, cuda.Tensor{}
	}
	width := c.model.spec.KVHeads * c.model.spec.HeadDim
	return cuda.Matrix(c.keys[i], c.cap, width).RowRange(lo, hi), cuda.Matrix(c.vals[i], c.cap, width).RowRange(lo, hi)
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

// grow makes room for rows positions, at least doubling what there was.
func (c *dflashContext) grow(rows int) error {
	if rows <= c.cap {
		return nil
	}
	m := c.model
	room := max(rows, 2*c.cap, 64)
	width := m.spec.KVHeads * m.spec.HeadDim
	for _, bufs := range [][]cuda.Buffer{c.keys, c.vals} {
		for i, old := range bufs {
			grown, err := regrow(m.dev, old, c.rows, room, width)
			if err != nil {
				return err
			}
			bufs[i] = grown
		}
	}
	c.cap = room
	return nil
}

// regrow moves the first rows of old, which may be nil, to a new buffer of
// room rows and closes old. On an error old is untouched.
func regrow(dev cuda.Device, old cuda.Buffer, rows, room, width int) (cuda.Buffer, error) {
	grown, err := dev.New(room * width)
	if err != nil {
		return nil, err
	}
	if old == nil {
		return grown, nil
	}
	same := make([]int32, rows)
	for i := range same {
		same[i] = int32(i)
	}
	if err := dev.GatherRows(cuda.Matrix(grown, rows, width), cuda.Matrix(old, rows, width), same); err != nil {
		grown.Close()
		return nil, err
	}
	old.Close()
	return grown, nil
}
