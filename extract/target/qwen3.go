package target

import (
	"fmt"
	"math"

	"github.com/draftscope/draftscope/cuda"
)

// attention is Qwen3's mixer: grouped queries, q and k normed per head,
// rotary positions, a causal softmax over all positions or the last window.
type attention struct {
	cfg        Config
	window     int         // 0: all positions
	q, k, v    cuda.Tensor // [Hq*hd, H], [Hkv*hd, H] twice
	o          cuda.Tensor // [H, Hq*hd]
	normQ      cuda.Tensor // [1, hd]
	normK      cuda.Tensor
	gatedQuery bool // Qwen3.5: each head of q is followed by its output gate
}

func loadAttention(l *loader, c Config, prefix string, window int) mixer {
	return readAttention(l, c, prefix, window, false)
}

func readAttention(l *loader, c Config, prefix string, window int, gated bool) *attention {
	p := prefix + "self_attn."
	rows := c.QHeads * c.HeadDim
	if gated {
		rows *= 2
	}
	return &attention{
		cfg: c, window: window, gatedQuery: gated,
		q:     l.matrix(p+"q_proj.weight", rows, c.Hidden),
		k:     l.matrix(p+"k_proj.weight", c.KVHeads*c.HeadDim, c.Hidden),
		v:     l.matrix(p+"v_proj.weight", c.KVHeads*c.HeadDim, c.Hidden),
		o:     l.matrix(p+"o_proj.weight", c.Hidden, c.QHeads*c.HeadDim),
		normQ: l.vector(p+"q_norm.weight", c.HeadDim),
		normK: l.vector(p+"k_norm.weight", c.HeadDim),
	}
}

// cache holds the keys, after norm and rotation, and the values of one
// sequence.
type cache struct {
	dev  cuda.Device
	k, v cuda.Tensor // [tokens, Hkv*hd]
}

func (a *attention) remember(dev cuda.Device) (past, error) {
	return &cache{dev: dev}, nil
}

func (c *cache) close() {
	for _, t := range []*cuda.Tensor{&c.k, &c.v} {
		if t.Buf != nil {
			t.Buf.Close()
		}
		*t = cuda.Tensor{}
	}
}

// reserve makes room for n rows of cols values, keeping those there are.
func (c *cache) reserve(n, cols int) error {
	for _, t := range []*cuda.Tensor{&c.k, &c.v} {
		buf, err := c.dev.Grow(t.Buf, n*cols)
		if err != nil {
			return fmt.Errorf("growing the key/value cache to %d tokens: %w", n, err)
		}
		*t = cuda.Matrix(buf, n, cols)
	}
	return nil
}

func (a *attention) mix(c *call, pasts []past, u, x cuda.Tensor) error {
	out, err := a.attend(c, pasts, u)
	if err != nil {
		return err
	}
	return c.dev.Gemm(x, out, a.o, true)
}

// attend is everything before o_proj.
func (a *attention) attend(c *call, pasts []past, u cuda.Tensor) (cuda.Tensor, error) {
	var none cuda.Tensor
	cfg, dev := a.cfg, c.dev
	q, err := c.project("q", u, a.q)
	if err != nil {
		return none, err
	}
	k, err := c.project("k", u, a.k)
	if err != nil {
		return none, err
	}
	v, err := c.project("v", u, a.v)
	if err != nil {
		return none, err
	}
	queries, gate := q.Heads(cfg.HeadDim), none
	if a.gatedQuery {
		both := q.Heads(2 * cfg.HeadDim)
		queries, gate = both.ColRange(0, cfg.HeadDim), both.ColRange(cfg.HeadDim, 2*cfg.HeadDim)
	}
	normed, err := c.work("q normed", u.Rows, cfg.QHeads*cfg.HeadDim)
	if err != nil {
		return none, err
	}
	if err := dev.RMSNorm(normed.Heads(cfg.HeadDim), queries, a.normQ, cfg.Eps, cfg.gain()); err != nil {
		return none, err
	}
	if err := dev.RMSNorm(k.Heads(cfg.HeadDim), k.Heads(cfg.HeadDim), a.normK, cfg.Eps, cfg.gain()); err != nil {
		return none, err
	}
	for _, t := range []cuda.Tensor{normed, k} {
		if err := dev.RoPE(t, c.pos, cfg.HeadDim, cfg.Rotary, cfg.Theta); err != nil {
			return none, err
		}
	}
	out, err := c.work("attended", u.Rows, cfg.QHeads*cfg.HeadDim)
	if err != nil {
		return none, err
	}
	for i, p := range c.pieces {
		if err := a.attendPiece(dev, pasts[i].(*cache), p, out, normed, k, v); err != nil {
			return none, err
		}
	}
	if a.gatedQuery {
		heads := out.Heads(cfg.HeadDim)
		return out, dev.GateMul(heads, gate, heads, cuda.Sigmoid)
	}
	return out, nil
}

// attendPiece appends the piece's keys and values to its cache and reads all
// keys from there, so that a row sums them in one order however it came.
func (a *attention) attendPiece(dev cuda.Device, kv *cache, p piece, out, q, k, v cuda.Tensor) error {
	n := p.hi - p.lo
	if n == 0 {
		return nil
	}
	end := p.pos + n
	if err := kv.reserve(end, k.Cols); err != nil {
		return err
	}
	rows := make([]int32, n)
	spans := make([]cuda.Span, n)
	for i := range rows {
		rows[i] = int32(p.lo + i)
		spans[i].CtxHi = int32(p.pos + i + 1)
		if a.window > 0 {
			spans[i].CtxLo = max(0, spans[i].CtxHi-int32(a.window))
		}
	}
	if err := dev.GatherRows(kv.k.RowRange(p.pos, end), k, rows); err != nil {
		return err
	}
	if err := dev.GatherRows(kv.v.RowRange(p.pos, end), v, rows); err != nil {
		return err
	}
	return dev.Attention(out.RowRange(p.lo, p.hi), cuda.AttentionArgs{
		Q:    q.RowRange(p.lo, p.hi),
		CtxK: kv.k.RowRange(0, end), CtxV: kv.v.RowRange(0, end),
		Spans:  spans,
		QHeads: a.cfg.QHeads, KVHeads: a.cfg.KVHeads, HeadDim: a.cfg.HeadDim,
		Scale: float32(1 / math.Sqrt(float64(a.cfg.HeadDim))),
	})
}
