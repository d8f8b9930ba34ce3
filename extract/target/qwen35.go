package target

import "github.com/draftscope/draftscope/cuda"

// loadGatedAttention is Qwen3.5's full-attention mixer: Qwen3's, with norms
// of gain 1+w, a rotation of the first dims only, and an output gate a query
// head. q_proj has a head's query and its gate one after the other.
func loadGatedAttention(l *loader, c Config, keys *arena, prefix string) mixer {
	p := prefix + "self_attn."
	var parts []part
	for _, gate := range []int{0, 1} {
		for h := range c.QHeads {
			at := (2*h + gate) * c.HeadDim
			parts = append(parts, part{name: p + "q_proj.weight", rows: 2 * c.QHeads * c.HeadDim, lo: at, hi: at + c.HeadDim})
		}
	}
	return readAttention(l, c, keys, p, &attention{gated: true}, parts...)
}

// deltaNet is Qwen3.5's linear mixer, the gated DeltaNet: a short causal
// convolution over q, k and v, the gated delta rule, and a norm per head that
// is gated after it is applied and whose gain is plain w.
type deltaNet struct {
	cfg      Config
	qkv      cuda.Tensor // [Dc, H]: all q heads, all k heads, all v heads
	z        cuda.Tensor // [Hv*dv, H]
	a, b     cuda.Tensor // [Hv, H]: decay input, write-strength input
	conv     cuda.Tensor // [Dc, taps]
	aLog, dt cuda.Tensor // [1, Hv]
	norm     cuda.Tensor // [1, dv]
	out      cuda.Tensor // [H, Hv*dv]
}

func loadDeltaNet(l *loader, c Config, prefix string) mixer {
	p, n := prefix+"linear_attn.", c.Linear
	return &deltaNet{
		cfg:  c,
		qkv:  l.matrix(p+"in_proj_qkv.weight", n.channels(), c.Hidden),
		z:    l.matrix(p+"in_proj_z.weight", n.ValHeads*n.ValDim, c.Hidden),
		a:    l.matrix(p+"in_proj_a.weight", n.ValHeads, c.Hidden),
		b:    l.matrix(p+"in_proj_b.weight", n.ValHeads, c.Hidden),
		conv: l.tensor(l.prefix+p+"conv1d.weight", n.channels(), n.Taps, n.channels(), 1, n.Taps),
		aLog: l.vector(p+"A_log", n.ValHeads),
		dt:   l.vector(p+"dt_bias", n.ValHeads),
		norm: l.vector(p+"norm.weight", n.ValDim),
		out:  l.matrix(p+"out_proj.weight", c.Hidden, n.ValHeads*n.ValDim),
	}
}

// A prompt is cut where chunks of the delta rule end, which start anew in every
// call: so its states do not depend on the cuts. This compiles only where
// prefillRows is a multiple of 64.
var _ [0]struct{} = [prefillRows % 64]struct{}{}

// recurrent is the memory of one sequence, of constant size.
type recurrent struct {
	state   cuda.Tensor // [Hv*dk, dv], fp32
	history cuda.Tensor // [taps-1, Dc]: the last rows before the convolution
}

func (d *deltaNet) remember(dev cuda.Device) (past, error) {
	n := d.cfg.Linear
	state, err := dev.New(n.ValHeads * n.KeyDim * n.ValDim)
	if err != nil {
		return nil, err
	}
	history, err := dev.New((n.Taps - 1) * n.channels())
	if err != nil {
		state.Close()
		return nil, err
	}
	return &recurrent{
		state:   cuda.Matrix(state, n.ValHeads*n.KeyDim, n.ValDim),
		history: cuda.Matrix(history, n.Taps-1, n.channels()),
	}, nil
}

func (r *recurrent) close() {
	r.state.Buf.Close()
	r.history.Buf.Close()
}

func (d *deltaNet) mix(c *call, pasts []past, u, x cuda.Tensor) error {
	n := d.cfg.Linear
	e, err := c.project("qkv", u, d.qkv)
	if err != nil {
		return err
	}
	z, err := c.project("z", u, d.z)
	if err != nil {
		return err
	}
	a, err := c.project("a", u, d.a)
	if err != nil {
		return err
	}
	b, err := c.project("b", u, d.b)
	if err != nil {
		return err
	}
	y, err := c.work("convolved", u.Rows, n.channels())
	if err != nil {
		return err
	}
	o, err := c.work("ruled", u.Rows, n.ValHeads*n.ValDim)
	if err != nil {
		return err
	}
	keys := n.KeyHeads * n.KeyDim
	for i, p := range c.pieces {
		if p.lo == p.hi {
			continue
		}
		mem := pasts[i].(*recurrent)
		rows := y.RowRange(p.lo, p.hi)
		if err := c.dev.Conv(rows, e.RowRange(p.lo, p.hi), d.conv, mem.history); err != nil {
			return err
		}
		if err := c.dev.DeltaRule(o.RowRange(p.lo, p.hi), cuda.DeltaArgs{
			Q: rows.ColRange(0, keys), K: rows.ColRange(keys, 2*keys), V: rows.ColRange(2*keys, n.channels()),
			A: a.RowRange(p.lo, p.hi), B: b.RowRange(p.lo, p.hi), ALog: d.aLog, DTBias: d.dt,
			State:    mem.state,
			KeyHeads: n.KeyHeads, ValHeads: n.ValHeads, KeyDim: n.KeyDim, ValDim: n.ValDim,
			Chunk: c.Chunk,
		}); err != nil {
			return err
		}
	}
	heads := o.Heads(n.ValDim)
	if err := c.dev.RMSNorm(heads, heads, d.norm, d.cfg.Eps, 0); err != nil {
		return err
	}
	if err := c.dev.GateMul(o, z, o, cuda.SiLU); err != nil {
		return err
	}
	return c.dev.Gemm(x, o, d.out, true)
}
