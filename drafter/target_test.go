package drafter_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/cpu"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/schemas"
)

// The demo's target.
const (
	layers  = 8
	hidden  = 256
	vocab   = 4096
	qHeads  = 4
	kvHeads = 2
	headDim = 64
	eps     = 1e-6
	theta   = 1e4
)

// world is the demo's target on a CPU, and what it lends.
type world struct {
	tb   testing.TB
	dev  cuda.Device
	host drafter.Host
	w    map[string]cuda.Tensor
}

func newWorld(tb testing.TB) *world {
	tb.Helper()
	dev, err := cpu.New(cpu.Config{})
	if err != nil {
		tb.Fatal(err)
	}
	w := &world{tb: tb, dev: dev, w: map[string]cuda.Tensor{}}
	c := checkpoint(tb, "target")
	for _, name := range c.Names() {
		vals, err := c.Float32s(name)
		if err != nil {
			tb.Fatal(err)
		}
		shape, _ := c.Shape(name)
		rows, cols := 1, shape[len(shape)-1]
		if len(shape) == 2 {
			rows = shape[0]
		}
		w.w[strings.TrimSuffix(strings.TrimPrefix(name, "model."), ".weight")] = w.upload(vals, rows, cols)
	}
	w.host = drafter.Host{
		Embedding: w.w["embed_tokens"], Head: w.w["embed_tokens"], FinalNorm: w.w["norm"],
		Eps: eps, Vocab: vocab, Hidden: hidden, Layers: layers,
	}
	return w
}

func checkpoint(tb testing.TB, dir string) *safetensors.Checkpoint {
	tb.Helper()
	c, err := safetensors.Open(demotest.FS(tb), dir)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	return c
}

func (w *world) must(err error) {
	w.tb.Helper()
	if err != nil {
		w.tb.Fatal(err)
	}
}

func (w *world) alloc(rows, cols int) cuda.Tensor {
	w.tb.Helper()
	buf, err := w.dev.New(rows * cols)
	w.must(err)
	return cuda.Matrix(buf, rows, cols)
}

func (w *world) upload(vals []float32, rows, cols int) cuda.Tensor {
	w.tb.Helper()
	t := w.alloc(rows, cols)
	w.must(w.dev.Upload(t, vals))
	return t
}

func (w *world) download(t cuda.Tensor) []float32 {
	w.tb.Helper()
	vals := make([]float32, t.Rows*t.Cols)
	w.must(w.dev.Download(vals, t))
	return vals
}

// drafter opens one of the fixtures' drafters.
func (w *world) drafter(name string) *drafter.Drafter {
	w.tb.Helper()
	dir := "drafters/" + name
	d, err := drafter.Open(name, demotest.Read(w.tb, dir+"/config.json"), checkpoint(w.tb, dir), w.host, w.dev)
	w.must(err)
	w.tb.Cleanup(d.Close)
	return d
}

// states runs the target over ids and gives its states 0..8 before any final
// norm, each [len(ids), hidden].
func (w *world) states(ids []int32) [][]float32 {
	w.tb.Helper()
	n := len(ids)
	pos, spans := make([]int32, n), make([]cuda.Span, n)
	for t := range n {
		pos[t], spans[t] = int32(t), cuda.Span{BlkHi: int32(t + 1)}
	}
	x := w.alloc(n, hidden)
	w.must(w.dev.GatherRows(x, w.w["embed_tokens"], ids))
	out := [][]float32{w.download(x)}
	norm := func(dst, x cuda.Tensor, name string) { w.must(w.dev.RMSNorm(dst, x, w.w[name], eps, 0)) }
	linear := func(x cuda.Tensor, name string) cuda.Tensor {
		y := w.alloc(n, w.w[name].Rows)
		w.must(w.dev.Gemm(y, x, w.w[name], false))
		return y
	}
	u := w.alloc(n, hidden)
	for i := range layers {
		in := func(name string) string { return fmt.Sprintf("layers.%d.%s", i, name) }
		norm(u, x, in("input_layernorm"))
		q, k, v := linear(u, in("self_attn.q_proj")), linear(u, in("self_attn.k_proj")), linear(u, in("self_attn.v_proj"))
		norm(q.Heads(headDim), q.Heads(headDim), in("self_attn.q_norm"))
		norm(k.Heads(headDim), k.Heads(headDim), in("self_attn.k_norm"))
		w.must(w.dev.RoPE(q, pos, headDim, headDim, theta))
		w.must(w.dev.RoPE(k, pos, headDim, headDim, theta))
		mixed := w.alloc(n, q.Cols)
		w.must(w.dev.Attention(mixed, cuda.AttentionArgs{
			Q: q, BlkK: k, BlkV: v, Spans: spans, QHeads: qHeads, KVHeads: kvHeads, HeadDim: headDim, Scale: 1. / 8,
		}))
		w.must(w.dev.Gemm(x, mixed, w.w[in("self_attn.o_proj")], true))
		norm(u, x, in("post_attention_layernorm"))
		gate, up := linear(u, in("mlp.gate_proj")), linear(u, in("mlp.up_proj"))
		w.must(w.dev.GateMul(gate, gate, up, cuda.SiLU))
		w.must(w.dev.Gemm(x, gate, w.w[in("mlp.down_proj")], true))
		out = append(out, w.download(x))
	}
	return out
}

// captured is a sequence as a capture records it.
type captured struct {
	id        string
	promptLen int
	ids       []int32
	recorded  []int       // which states
	states    [][]float32 // by index into recorded
}

// sequences lists the fixtures' prompts.
func sequences(tb testing.TB) []captured {
	tb.Helper()
	var out []captured
	dec := json.NewDecoder(strings.NewReader(string(demotest.Read(tb, "sequences.jsonl"))))
	for dec.More() {
		var row struct {
			ID        string  `json:"id"`
			PromptLen int     `json:"prompt_len"`
			IDs       []int32 `json:"input_ids"`
		}
		if err := dec.Decode(&row); err != nil {
			tb.Fatal(err)
		}
		out = append(out, captured{id: row.ID, promptLen: row.PromptLen, ids: row.IDs})
	}
	return out
}

// run records states 0..8 of a sequence.
func (w *world) run(c captured) captured {
	w.tb.Helper()
	c.recorded, c.states = []int{0, 1, 2, 3, 4, 5, 6, 7, 8}, w.states(c.ids)
	return c
}

// record is the capture record of positions lo..hi-1.
func (c captured) record(tb testing.TB, w *world, lo, hi int) schemas.Capture {
	tb.Helper()
	out := schemas.Capture{Spec: schemas.CaptureSpec{Run: "r1", Hidden: hidden, Layers: layers, States: c.recorded, DType: schemas.F32}}
	for t := lo; t < hi; t++ {
		out.Tokens = append(out.Tokens, schemas.Token{SeqID: c.id, Pos: int32(t), TokenID: c.ids[t], LossMask: t >= c.promptLen})
	}
	for _, s := range c.states {
		out.States = append(out.States, schemas.F32.AppendBytes(nil, s[lo*hidden:hi*hidden]))
	}
	return out
}
