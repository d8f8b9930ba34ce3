package drafter

import (
	"errors"
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
	fc        cuda.Tensor // [H, taps*H]
	ctxNorm   cuda.Tensor
	norm      cuda.Tensor
	layers    []dflashLayer
	scratch   scratch
}

type dflashLayer struct {
	rule             Visibility
	inNorm, postNorm cuda.Tensor // [1, H]
	qNorm, kNorm     cuda.Tensor // [1, head dim]
	// Weights are [out, in]. Those that share an input lie one below the other,
	// for one product: q, k and v, of which kv are the last two; gate and up.
	qkv, kv, o   cuda.Tensor
	gateUp, down cuda.Tensor
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

// load takes every tensor of the family, in the shapes of [Spec.tensors].
func (m *dflash) load(l *loader, targetLayers int) error {
	if err := m.checkProjection(l, targetLayers); err != nil {
		return err
	}
	r := reader{l: l, want: shapesOf(m.spec.tensors(l, targetLayers))}
	m.fc = r.matrix("fc.weight")
	m.ctxNorm = r.matrix("hidden_norm.weight")
	m.norm = r.matrix("norm.weight")
	if r.err == nil && l.has(embeddingName) {
		same, err := l.copyOf(embeddingName, m.embedding)
		if err != nil {
			return err
		}
		if !same {
			m.embedding = r.matrix(embeddingName)
		}
	}
	for i, rule := range m.spec.Attention {
		layer, err := r.layer(i)
		if err = errors.Join(r.err, err); err != nil {
			return err
		}
		layer.rule = rule
		m.layers = append(m.layers, layer)
	}
	return r.err
}

// layer takes the tensors of layer i.
func (r *reader) layer(i int) (layer dflashLayer, err error) {
	r.prefix = fmt.Sprintf("layers.%d.", i)
	h := r.shape("self_attn.q_proj.weight")[1]
	wide, narrow, inter := r.shape("self_attn.q_proj.weight")[0], r.shape("self_attn.k_proj.weight")[0], r.shape("mlp.gate_proj.weight")[0]
	if layer.qkv, err = r.l.room(wide+2*narrow, h); err != nil {
		return layer, fmt.Errorf("placing the weights of layer %d: %w", i, err)
	}
	if layer.gateUp, err = r.l.room(2*inter, h); err != nil {
		return layer, fmt.Errorf("placing the weights of layer %d: %w", i, err)
	}
	layer.kv = layer.qkv.RowRange(wide, wide+2*narrow)
	layer.inNorm = r.matrix("input_layernorm.weight")
	layer.postNorm = r.matrix("post_attention_layernorm.weight")
	r.into("self_attn.q_proj.weight", layer.qkv.RowRange(0, wide))
	r.into("self_attn.k_proj.weight", layer.kv.RowRange(0, narrow))
	r.into("self_attn.v_proj.weight", layer.kv.RowRange(narrow, 2*narrow))
	layer.o = r.matrix("self_attn.o_proj.weight")
	layer.qNorm = r.matrix("self_attn.q_norm.weight")
	layer.kNorm = r.matrix("self_attn.k_norm.weight")
	r.into("mlp.gate_proj.weight", layer.gateUp.RowRange(0, inter))
	r.into("mlp.up_proj.weight", layer.gateUp.RowRange(inter, 2*inter))
	layer.down = r.matrix("mlp.down_proj.weight")
	return layer, r.err
}

// checkProjection finds out which taps enter fc, whose width must be that of
// them together.
func (m *dflash) checkProjection(l *loader, targetLayers int) error {
	const name = "fc.weight"
	shape, err := l.shape(name)
	if err != nil {
		return err
	}
	m.spec.Taps = m.spec.entering(l, targetLayers)
	if h, n := m.spec.Hidden, len(m.spec.Taps); len(shape) == 2 && shape[1] != n*h {
		return fmt.Errorf("%w: %s has %d inputs, which is %.4g states of %d; the configuration names %d (%v)",
			ErrWeights, name, shape[1], float64(shape[1])/float64(h), h, n, m.spec.States())
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
	var spans []cuda.Span
	for i := range m.layers {
		l := &m.layers[i]
		qkv := s.tensor(&o, "qkv", rows, l.qkv.Rows)
		if i == 0 {
			m.projectDistinct(&o, l, qkv, append(tokens[:n:n], m.spec.MaskToken), source)
		} else {
			m.project(&o, l, qkv, x)
		}
		q, k, v := m.split(qkv)
		o.normRope(q, l.qNorm, pos, m.spec)
		o.normRope(k, l.kNorm, pos, m.spec)
		if i == 0 || l.rule != m.layers[i-1].rule {
			spans = make([]cuda.Span, rows)
			for r := range spans {
				spans[r] = l.rule.Span(int(anchors[r/b]), r%b, r/b*b, b)
			}
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

// project multiplies the normed rows of x by a layer's Wq, Wk and Wv.
func (m *dflash) project(o *ops, l *dflashLayer, qkv, x cuda.Tensor) {
	u := m.scratch.tensor(o, "u", x.Rows, x.Cols)
	o.norm(u, x, l.inNorm, m.spec.Eps)
	o.gemm(qkv, u, l.qkv, false)
}

// projectDistinct is project for the first layer, where a row is the embedding
// of one of few tokens: each is multiplied once and then copied to its slots.
func (m *dflash) projectDistinct(o *ops, l *dflashLayer, qkv cuda.Tensor, tokens, source []int32) {
	x := m.scratch.tensor(o, "distinct", len(tokens), m.spec.Hidden)
	o.gather(x, m.embedding, tokens)
	few := m.scratch.tensor(o, "distinct qkv", len(tokens), qkv.Cols)
	m.project(o, l, few, x)
	o.gather(qkv, few, source)
}

// split views the columns of qkv.
func (m *dflash) split(qkv cuda.Tensor) (q, k, v cuda.Tensor) {
	wide, narrow := m.spec.Heads*m.spec.HeadDim, m.spec.KVHeads*m.spec.HeadDim
	return qkv.ColRange(0, wide), qkv.ColRange(wide, wide+narrow), qkv.ColRange(wide+narrow, wide+2*narrow)
}

// mlp adds Wdown·(silu(Wgate·y) ⊙ Wup·y) to x, with y = RMSNorm(x).
func (m *dflash) mlp(o *ops, l *dflashLayer, x cuda.Tensor) {
	y := m.scratch.tensor(o, "u", x.Rows, m.spec.Hidden)
	both := m.scratch.tensor(o, "gate up", x.Rows, l.gateUp.Rows)
	gate, up := both.ColRange(0, m.spec.Inter), both.ColRange(m.spec.Inter, 2*m.spec.Inter)
	o.norm(y, x, l.postNorm, m.spec.Eps)
	o.gemm(both, y, l.gateUp, false)
	o.gateMul(gate, gate, up)
	o.gemm(x, gate, l.down, true)
}
