package target

import (
	"math"

	"github.com/draftscope/draftscope/cuda"
)

// attention is Qwen3's mixer: grouped queries, q and k normed per head,
// rotary positions, a causal softmax over all positions or the last window.
type attention struct {
	cfg    Config
	number int  // of the layer in the arena
	window int  // 0: all positions
	gated  bool // Qwen3.5: each query head has an output gate
	// qkv is all query heads, where gated all their gates, then the key and
	// the value heads [.., H]: one product makes them.
	qkv          cuda.Tensor
	o            cuda.Tensor // [H, Hq*hd]
	normQ, normK cuda.Tensor // [1, hd]
}

func loadAttention(l *loader, c Config, keys *arena, prefix string, window int) mixer {
	p, q := prefix+"self_attn.", c.QHeads*c.HeadDim
	return readAttention(l, c, keys, p, &attention{window: window}, part{name: p + "q_proj.weight", rows: q})
}

// readAttention fills in a with what all kinds of attention share. queries are
// the parts of q_proj, in the order in which they are wanted.
func readAttention(l *loader, c Config, keys *arena, p string, a *attention, queries ...part) *attention {
	kv := c.KVHeads * c.HeadDim
	a.cfg, a.number = c, keys.add()
	a.qkv = l.stack(c.Hidden, append(queries, part{name: p + "k_proj.weight", rows: kv}, part{name: p + "v_proj.weight", rows: kv})...)
	a.o = l.matrix(p+"o_proj.weight", c.Hidden, c.QHeads*c.HeadDim)
	a.normQ, a.normK = l.vector(p+"q_norm.weight", c.HeadDim), l.vector(p+"k_norm.weight", c.HeadDim)
	return a
}

// inArena is the past of an attention layer: rows of the arena, which the
// sequence has in all layers alike.
type inArena struct{}

func (inArena) close() {}

func (a *attention) remember(cuda.Device) (past, error) { return inArena{}, nil }

// mix appends the keys and values of all rows to the arena and reads all keys
// from there, so that a row sums them in one order however it came.
func (a *attention) mix(c *call, _ []past, u, x cuda.Tensor) error {
	cfg, dev := a.cfg, c.dev
	qkv, err := c.project("qkv", u, a.qkv)
	if err != nil {
		return err
	}
	wide, kv := cfg.QHeads*cfg.HeadDim, cfg.KVHeads*cfg.HeadDim
	q, gate := qkv.ColRange(0, wide), qkv.ColRange(wide, 2*wide)
	both := qkv.ColRange(qkv.Cols-2*kv, qkv.Cols) // keys and values
	for _, n := range []struct {
		x, w  cuda.Tensor
		heads int
	}{{q, a.normQ, cfg.QHeads}, {both.ColRange(0, kv), a.normK, cfg.KVHeads}} {
		if err := dev.NormRoPE(n.x, cuda.NormRoPEArgs{
			X: n.x, W: n.w, Heads: n.heads, HeadDim: cfg.HeadDim, Step: cfg.HeadDim, Eps: cfg.Eps, Gain: cfg.gain(),
			Pos: c.pos, Rotary: cfg.Rotary, Theta: cfg.Theta,
		}); err != nil {
			return err
		}
	}
	if err := dev.ScatterRows(c.arena.layers[a.number], both, c.kept); err != nil {
		return err
	}
	out, err := c.work("attended", u.Rows, wide)
	if err != nil {
		return err
	}
	if err := dev.Attention(out, cuda.AttentionArgs{
		Q: q, CtxK: c.arena.keys(a.number), CtxV: c.arena.values(a.number), Spans: c.seen(a.window),
		QHeads: cfg.QHeads, KVHeads: cfg.KVHeads, HeadDim: cfg.HeadDim,
		Scale: float32(1 / math.Sqrt(float64(cfg.HeadDim))),
	}); err != nil {
		return err
	}
	if a.gated {
		if err := dev.GateMul(out, gate, out, cuda.Sigmoid); err != nil {
			return err
		}
	}
	return dev.Gemm(x, out, a.o, true)
}
