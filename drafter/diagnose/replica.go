package diagnose

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
)

// replica is a DFlash drafter that obeys any [Graph]. It is written from the
// paper's formulas and not from package drafter's engine, with which it must
// agree on the declared graph: each checks the other.
type replica struct {
	dev       cuda.Device
	host      drafter.Host
	spec      drafter.Spec
	embedding cuda.Tensor
	head      cuda.Tensor // one row a draft token
	targets   []int32     // the target's token of each draft token; nil where they are the same
	drafts    map[int32]int32
	fc        cuda.Tensor // [H, taps*H]
	ctxNorm   cuda.Tensor
	norm      cuda.Tensor
	layers    []plainLayer
	heads     map[ordering][]headLayer
	scratch   map[string]cuda.Buffer
	buffers   []cuda.Buffer
}

// plainLayer is what no ordering of heads touches.
type plainLayer struct {
	in, post, v, gate, up, down cuda.Tensor
	// The rest is permuted before it is placed.
	q, k, o, qNorm, kNorm []float32
}

// headLayer is what depends on the order of heads and of their dims.
type headLayer struct{ q, k, o, qNorm, kNorm cuda.Tensor }

// ordering are the choices that a device carries out by permuted weights.
type ordering struct {
	interleaved, tiled bool
	rotary             int // of interleaved dims, else 0
}

// newReplica loads a checkpoint whose spec was parsed for the host. The
// caller closes it.
func newReplica(spec drafter.Spec, w drafter.Weights, host drafter.Host, dev cuda.Device) (*replica, error) {
	r := &replica{dev: dev, host: host, spec: spec, embedding: host.Embedding, head: host.Head, heads: map[ordering][]headLayer{}, scratch: map[string]cuda.Buffer{}}
	if err := r.load(w); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// tensors reads a checkpoint's tensors by their plain names.
type tensors struct {
	w     drafter.Weights
	names map[string]string
	err   error
}

func tensorsOf(w drafter.Weights) *tensors {
	t := &tensors{w: w, names: map[string]string{}}
	for _, name := range w.Names() {
		t.names[strings.TrimPrefix(name, "model.")] = name
	}
	return t
}

// floats are the n values of a tensor.
func (t *tensors) floats(name string, n int) []float32 {
	if t.err != nil {
		return nil
	}
	vals, err := t.w.Float32s(t.names[name])
	if err == nil && len(vals) != n {
		err = fmt.Errorf("%s has %d values, want %d", name, len(vals), n)
	}
	t.err = err
	return vals
}

func (r *replica) load(w drafter.Weights) error {
	t, s := tensorsOf(w), r.spec
	var errs []error
	place := func(vals []float32, rows, cols int) cuda.Tensor {
		m, err := r.place(vals, rows, cols)
		errs = append(errs, err)
		return m
	}
	matrix := func(name string, rows, cols int) cuda.Tensor { return place(t.floats(name, rows*cols), rows, cols) }
	h, wide, narrow := s.Hidden, s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
	r.fc = matrix("fc.weight", h, len(s.Taps)*h)
	r.ctxNorm = matrix("hidden_norm.weight", 1, h)
	r.norm = matrix("norm.weight", 1, h)
	if _, own := t.names["embed_tokens.weight"]; own {
		r.embedding = matrix("embed_tokens.weight", s.Vocab, h)
	}
	ids, err := drafter.ReadVocabulary(w, s.DraftVocab, s.Vocab)
	errs = append(errs, err)
	if _, own := t.names["lm_head.weight"]; own {
		r.head = matrix("lm_head.weight", s.DraftVocab, h)
	} else if ids != nil {
		r.head = place(make([]float32, len(ids)*h), len(ids), h)
		errs = append(errs, r.dev.GatherRows(r.head, r.host.Head, ids))
	}
	if r.targets = ids; ids != nil {
		r.drafts = map[int32]int32{}
		for d, id := range ids {
			r.drafts[id] = int32(d)
		}
	}
	for i := range s.Attention {
		p := fmt.Sprintf("layers.%d.", i)
		r.layers = append(r.layers, plainLayer{
			in: matrix(p+"input_layernorm.weight", 1, h), post: matrix(p+"post_attention_layernorm.weight", 1, h),
			v: matrix(p+"self_attn.v_proj.weight", narrow, h), gate: matrix(p+"mlp.gate_proj.weight", s.Inter, h),
			up: matrix(p+"mlp.up_proj.weight", s.Inter, h), down: matrix(p+"mlp.down_proj.weight", h, s.Inter),
			q: t.floats(p+"self_attn.q_proj.weight", wide*h), k: t.floats(p+"self_attn.k_proj.weight", narrow*h),
			o:     t.floats(p+"self_attn.o_proj.weight", h*wide),
			qNorm: t.floats(p+"self_attn.q_norm.weight", s.HeadDim), kNorm: t.floats(p+"self_attn.k_norm.weight", s.HeadDim),
		})
	}
	return errors.Join(append(errs, t.err)...)
}

// place uploads a matrix that lives as long as the replica.
func (r *replica) place(vals []float32, rows, cols int) (cuda.Tensor, error) {
	if len(vals) != rows*cols {
		return cuda.Tensor{}, nil // its reading failed, and said so
	}
	buf, err := r.dev.New(len(vals))
	if err != nil {
		return cuda.Tensor{}, err
	}
	r.buffers = append(r.buffers, buf)
	m := cuda.Matrix(buf, rows, cols)
	return m, r.dev.Upload(m, vals)
}

func (r *replica) close() {
	for _, b := range r.buffers {
		b.Close()
	}
	for _, b := range r.scratch {
		b.Close()
	}
	r.buffers, r.scratch = nil, nil
}

// ordered places the weights of every layer for an ordering, once.
func (r *replica) ordered(o ordering) ([]headLayer, error) {
	if ready, ok := r.heads[o]; ok {
		return ready, nil
	}
	s := r.spec
	dims := make([]int, s.HeadDim) // dims[new] is the stored dim
	for i := range dims {
		dims[i] = i
	}
	if o.interleaved {
		for i := range o.rotary / 2 {
			dims[i], dims[o.rotary/2+i] = 2*i, 2*i+1
		}
	}
	qHeads, kvHeads := make([]int, s.Heads), make([]int, s.KVHeads)
	for g := range qHeads {
		qHeads[g] = g
	}
	if o.tiled { // stored head g reads kv head g mod kv: it moves beside it
		for g := range s.Heads {
			qHeads[g%s.KVHeads*(s.Heads/s.KVHeads)+g/s.KVHeads] = g
		}
	}
	for g := range kvHeads {
		kvHeads[g] = g
	}
	var errs []error
	place := func(vals []float32, rows, cols int) cuda.Tensor {
		m, err := r.place(vals, rows, cols)
		errs = append(errs, err)
		return m
	}
	var out []headLayer
	for _, l := range r.layers {
		out = append(out, headLayer{
			q:     place(permuteRows(l.q, s.Hidden, qHeads, dims), s.Heads*s.HeadDim, s.Hidden),
			k:     place(permuteRows(l.k, s.Hidden, kvHeads, dims), s.KVHeads*s.HeadDim, s.Hidden),
			o:     place(permuteHeadColumns(l.o, s.Hidden, s.HeadDim, qHeads), s.Hidden, s.Heads*s.HeadDim),
			qNorm: place(permuteRows(l.qNorm, 1, []int{0}, dims), 1, s.HeadDim),
			kNorm: place(permuteRows(l.kNorm, 1, []int{0}, dims), 1, s.HeadDim),
		})
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	r.heads[o] = out
	return out, nil
}

// permuteRows reorders rows of the given width: row dim d of head g becomes
// stored row dims[d] of stored head heads[g].
func permuteRows(vals []float32, width int, heads, dims []int) []float32 {
	out := make([]float32, 0, len(vals))
	for _, g := range heads {
		for _, d := range dims {
			row := g*len(dims) + d
			out = append(out, vals[row*width:(row+1)*width]...)
		}
	}
	return out
}

// permuteHeadColumns reorders the column blocks of a matrix of some rows.
func permuteHeadColumns(vals []float32, rows, dim int, heads []int) []float32 {
	out := make([]float32, 0, len(vals))
	width := len(heads) * dim
	for r := range rows {
		for _, g := range heads {
			out = append(out, vals[r*width+g*dim:r*width+(g+1)*dim]...)
		}
	}
	return out
}

// work is scratch memory by name; its content is whatever was left there.
func (r *replica) work(name string, rows, cols int) (cuda.Tensor, error) {
	buf := r.scratch[name]
	if buf == nil || buf.Len() < rows*cols {
		grown, err := r.dev.New(rows * cols)
		if err != nil {
			return cuda.Tensor{}, err
		}
		if buf != nil {
			buf.Close()
		}
		r.scratch[name], buf = grown, grown
	}
	return cuda.Matrix(buf, rows, cols), nil
}

// tapRows gives a state of every position of a sequence, on the device.
type tapRows func(drafter.Tap) (cuda.Tensor, error)

// blocks are what one pass drafts: at each anchor the first slots slots.
type blocks struct {
	anchors []int32
	tokens  []int32 // at the anchors
	slots   int
	length  int // of the sequence
}

// undraftable is the rank of a label that the drafter has no token for: a miss
// by any measure.
const undraftable = math.MaxInt32

// draft runs one pass under a graph and returns the most likely token of slot
// k of block i at i*slots+k-1, and the ranks of labels, -1 for none.
func (r *replica) draft(g Graph, rows tapRows, b blocks, labels []int32) (tokens, ranks []int32, err error) {
	p := &pass{replica: r, graph: g, blocks: b}
	z, err := p.run(rows)
	if err != nil {
		return nil, nil, err
	}
	own := labels
	if r.targets != nil {
		own = make([]int32, len(labels))
		for i, id := range labels {
			own[i] = -1
			if d, ok := r.drafts[id]; ok {
				own[i] = d
			}
		}
	}
	head, err := r.dev.Head(cuda.HeadArgs{Hidden: z, Weight: r.head, K: 1, Labels: own})
	if err != nil {
		return nil, nil, err
	}
	for i := range head.TopIDs {
		if r.targets == nil {
			break
		}
		head.TopIDs[i] = r.targets[head.TopIDs[i]]
		if labels[i] >= 0 && own[i] < 0 {
			head.LabelRank[i] = undraftable
		}
	}
	return head.TopIDs, head.LabelRank, nil
}

// scale of the attention's scores.
func (r *replica) scale() float32 { return float32(1 / math.Sqrt(float64(r.spec.HeadDim))) }
