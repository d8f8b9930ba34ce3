package drafter

import (
	"fmt"
	"math"

	"github.com/draftscope/draftscope/cuda"
)

// DFlash (arXiv 2602.06036): a small Qwen3-like transformer turns the
// embeddings of [anchor, mask, mask, ...] into B vectors in one pass. The
// target's taps reach it as extra keys and values in every layer: with
// c_t = RMSNorm(Wfc·[tap_1; ...; tap_n]) for positions t below the anchor,
//
//	K = rope(k_norm([Wk·c ; Wk·u]))   V = [Wv·c ; Wv·u]   u = RMSNorm(x)
//
// where x are the block's rows. c is the same for all layers and does not
// pass their input norm, so a position's keys and values never change.

// claimsDFlash accepts the architecture of z-lab and SpecForge and the
// speculator type of the speculators project.
func claimsDFlash(h header) bool {
	kind := h.kind()
	return kind == "DFlashDraftModel" || kind == "DFlashSpeculator" || kind == "dflash"
}

// dflash is a loaded DFlash drafter.
type dflash struct {
	spec      Spec
	dev       cuda.Device
	embedding cuda.Tensor
	fc        []cuda.Tensor // one [H, H] a tap: the column blocks of fc
	kv        cuda.Tensor   // every layer's k and v, one below the other: views in layers
	ctxNorm   cuda.Tensor
	norm      cuda.Tensor
	layers    []dflashLayer
	scratch   scratch
}

type dflashLayer struct {
	rule             Visibility
	inNorm, postNorm cuda.Tensor // [1, H]
	q, k, v, o       cuda.Tensor // [out, in]
	qNorm, kNorm     cuda.Tensor // [1, head dim]
	gate, up, down   cuda.Tensor
}

func openDFlash(o opening) (Model, error) {
	spec, err := ParseDFlash(o.config, o.host.Layers)
	if err != nil {
		return nil, err
	}
	if spec.Hidden != o.host.Hidden {
		return nil, fmt.Errorf("%w: hidden_size is %d, the target's %d", ErrConfig, spec.Hidden, o.host.Hidden)
	}
	if spec.Vocab != o.host.Vocab {
		return nil, fmt.Errorf("%w: vocab_size is %d, the target's %d", ErrConfig, spec.Vocab, o.host.Vocab)
	}
	m := &dflash{spec: spec, dev: o.dev, embedding: o.host.Embedding, scratch: scratch{dev: o.dev}}
	if err := m.load(o.load, o.host.Layers); err != nil {
		return nil, err
	}
	return m, nil
}

// load takes every tensor of the family.
func (m *dflash) load(l *loader, targetLayers int) error {
	h := m.spec.Hidden
	if err := m.loadProjection(l, targetLayers); err != nil {
		return err
	}
	r := reader{l: l}
	m.ctxNorm = r.matrix("hidden_norm.weight", 0, h)
	m.norm = r.matrix("norm.weight", 0, h)
	if l.has(embeddingName) {
		same, err := l.copyOf(embeddingName, m.embedding)
		if err != nil {
			return err
		}
		if !same {
			m.embedding = r.matrix(embeddingName, m.spec.Vocab, h)
		}
	}
	wide, narrow := m.spec.Heads*m.spec.HeadDim, m.spec.KVHeads*m.spec.HeadDim
	var err error
	if m.kv, err = l.room(2*narrow*len(m.spec.Attention), h); err != nil {
		return fmt.Errorf("placing keys' and values' weights: %w", err)
	}
	for i, rule := range m.spec.Attention {
		r.prefix = fmt.Sprintf("layers.%d.", i)
		m.layers = append(m.layers, dflashLayer{
			rule:     rule,
			inNorm:   r.matrix("input_layernorm.weight", 0, h),
			postNorm: r.matrix("post_attention_layernorm.weight", 0, h),
			q:        r.matrix("self_attn.q_proj.weight", wide, h),
			k:        r.into("self_attn.k_proj.weight", m.kv.RowRange(2*i*narrow, (2*i+1)*narrow)),
			v:        r.into("self_attn.v_proj.weight", m.kv.RowRange((2*i+1)*narrow, (2*i+2)*narrow)),
			o:        r.matrix("self_attn.o_proj.weight", h, wide),
			qNorm:    r.matrix("self_attn.q_norm.weight", 0, m.spec.HeadDim),
			kNorm:    r.matrix("self_attn.k_norm.weight", 0, m.spec.HeadDim),
			gate:     r.matrix("mlp.gate_proj.weight", m.spec.Inter, h),
			up:       r.matrix("mlp.up_proj.weight", m.spec.Inter, h),
			down:     r.matrix("mlp.down_proj.weight", h, m.spec.Inter),
		})
	}
	return r.err
}

// loadProjection takes fc, whose width must be that of the taps together.
func (m *dflash) loadProjection(l *loader, targetLayers int) error {
	const name = "fc.weight"
	h := m.spec.Hidden
	shape, err := l.shape(name)
	if err != nil {
		return err
	}
	n := len(m.spec.Taps)
	if last := n - 1; last > 0 && m.spec.Taps[last] == (Tap{State: targetLayers}) && len(shape) == 2 && shape[1] == last*h {
		// The speculators project captures the final state beside the taps
		// for the target's logits; it does not enter fc.
		m.spec.Taps = m.spec.Taps[:last]
		n = last
	}
	if len(shape) == 2 && shape[1] != n*h {
		return fmt.Errorf("%w: %s has %d inputs, which is %.4g states of %d; the configuration names %d (%v)",
			ErrWeights, name, shape[1], float64(shape[1])/float64(h), h, n, m.spec.States())
	}
	fc, err := l.matrix(name, h, n*h)
	if err != nil {
		return err
	}
	for p := range n {
		m.fc = append(m.fc, fc.ColRange(p*h, (p+1)*h))
	}
	return nil
}

// BlockSize implements [Model].
func (m *dflash) BlockSize() int { return m.spec.BlockSize }

// DraftVocab implements [Model].
func (m *dflash) DraftVocab() int { return m.spec.DraftVocab }

// Taps implements [Model].
func (m *dflash) Taps() []Tap { return m.spec.Taps }

// Close implements [Model].
func (m *dflash) Close() { m.scratch.close() }

// Draft implements [Context].
func (c *dflashContext) Draft(anchors, tokens []int32) (cuda.Tensor, error) {
	z, err := c.draft(anchors, tokens)
	if err != nil {
		return cuda.Tensor{}, fmt.Errorf("drafting at %d anchors: %w", len(anchors), err)
	}
	return z, nil
}

func (c *dflashContext) draft(anchors, tokens []int32) (cuda.Tensor, error) {
	m, b := c.model, c.model.spec.BlockSize
	if len(tokens) != len(anchors) {
		return cuda.Tensor{}, fmt.Errorf("%w: %d tokens", ErrAnchor, len(tokens))
	}
	n := len(anchors)
	rows := n * b
	ids, pos := make([]int32, rows), make([]int32, rows)
	source := make([]int32, rows) // rows of the distinct inputs: n anchors, then the mask
	keep := make([]int32, 0, n*(b-1))
	for i, a := range anchors {
		if a < 0 || int(a) > c.rows {
			return cuda.Tensor{}, fmt.Errorf("%w: anchor %d, context of %d", ErrAnchor, a, c.rows)
		}
		for j := range b {
			ids[i*b+j], pos[i*b+j], source[i*b+j] = m.spec.MaskToken, a+int32(j), int32(n)
			if j > 0 {
				keep = append(keep, int32(i*b+j))
			}
		}
		// The anchor enters by its embedding alone; its states do not exist yet.
		ids[i*b], source[i*b] = tokens[i], int32(i)
	}
	s := &m.scratch
	o := ops{dev: m.dev}
	x := s.tensor(&o, "x", rows, m.spec.Hidden)
	o.gather(x, m.embedding, ids)
	spans := make([]cuda.Span, rows)
	for i := range m.layers {
		l := &m.layers[i]
		var q, k, v cuda.Tensor
		if i == 0 {
			q, k, v = c.projectDistinct(&o, l, append(tokens[:n:n], m.spec.MaskToken), source)
		} else {
			u := s.tensor(&o, "u", rows, m.spec.Hidden)
			o.norm(u, x, l.inNorm, m.spec.Eps)
			q, k, v = m.project(&o, l, u, "")
		}
		o.norm(q.Heads(m.spec.HeadDim), q.Heads(m.spec.HeadDim), l.qNorm, m.spec.Eps)
		o.norm(k.Heads(m.spec.HeadDim), k.Heads(m.spec.HeadDim), l.kNorm, m.spec.Eps)
		o.rope(q, pos, m.spec)
		o.rope(k, pos, m.spec)
		for r := range spans {
			spans[r] = l.rule.Span(int(anchors[r/b]), r%b, r/b*b, b)
		}
		mixed := s.tensor(&o, "mixed", rows, q.Cols)
		ctxK, ctxV := c.layer(i, 0, c.rows)
		o.attention(mixed, cuda.AttentionArgs{
			Q: q, CtxK: ctxK, CtxV: ctxV, BlkK: k, BlkV: v, Spans: spans, Block: b,
			QHeads: m.spec.Heads, KVHeads: m.spec.KVHeads, HeadDim: m.spec.HeadDim,
			Scale: float32(1 / math.Sqrt(float64(m.spec.HeadDim))),
		})
		o.gemm(x, mixed, l.o, true)
		m.mlp(&o, l, x)
	}
	z := s.tensor(&o, "z", len(keep), m.spec.Hidden)
	o.gather(z, x, keep)
	o.norm(z, z, m.norm, m.spec.Eps)
	return z, o.err
}

// project multiplies normed rows by a layer's Wq, Wk and Wv.
func (m *dflash) project(o *ops, l *dflashLayer, u cuda.Tensor, tag string) (q, k, v cuda.Tensor) {
	q = m.scratch.tensor(o, "q"+tag, u.Rows, l.q.Rows)
	k = m.scratch.tensor(o, "k"+tag, u.Rows, l.k.Rows)
	v = m.scratch.tensor(o, "v"+tag, u.Rows, l.v.Rows)
	o.gemm(q, u, l.q, false)
	o.gemm(k, u, l.k, false)
	o.gemm(v, u, l.v, false)
	return q, k, v
}

// projectDistinct is project for the first layer, where a row is the embedding
// of one of few tokens: each is multiplied once and then copied to its slots.
func (c *dflashContext) projectDistinct(o *ops, l *dflashLayer, tokens, source []int32) (q, k, v cuda.Tensor) {
	m := c.model
	u := m.scratch.tensor(o, "u", len(tokens), m.spec.Hidden)
	o.gather(u, m.embedding, tokens)
	o.norm(u, u, l.inNorm, m.spec.Eps)
	q0, k0, v0 := m.project(o, l, u, "0")
	q = m.scratch.tensor(o, "q", len(source), q0.Cols)
	k = m.scratch.tensor(o, "k", len(source), k0.Cols)
	v = m.scratch.tensor(o, "v", len(source), v0.Cols)
	o.gather(q, q0, source)
	o.gather(k, k0, source)
	o.gather(v, v0, source)
	return q, k, v
}

// mlp adds Wdown·(silu(Wgate·y) ⊙ Wup·y) to x, with y = RMSNorm(x).
func (m *dflash) mlp(o *ops, l *dflashLayer, x cuda.Tensor) {
	y := m.scratch.tensor(o, "u", x.Rows, m.spec.Hidden)
	gate := m.scratch.tensor(o, "gate", x.Rows, m.spec.Inter)
	up := m.scratch.tensor(o, "up", x.Rows, m.spec.Inter)
	o.norm(y, x, l.postNorm, m.spec.Eps)
	o.gemm(gate, y, l.gate, false)
	o.gemm(up, y, l.up, false)
	o.gateMul(gate, gate, up)
	o.gemm(x, gate, l.down, true)
}
