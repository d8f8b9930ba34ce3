package drafter_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/backendtest"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/schemas"
)

// The demo's target.
const (
	layers = 8
	hidden = 256
	vocab  = 4096
	eps    = 1e-6
)

// world is the demo's target on a device, and what it lends.
type world struct {
	tb    testing.TB
	dev   cuda.Device
	model *target.Model
	host  drafter.Host
}

func newWorld(tb testing.TB) *world {
	tb.Helper()
	return newWorldOn(tb, backendtest.Open(tb))
}

// newWorldOn opens the world on dev, and closes dev in the end.
func newWorldOn(tb testing.TB, dev cuda.Device) *world {
	tb.Helper()
	tb.Cleanup(func() {
		if err := dev.Close(); err != nil {
			tb.Error(err)
		}
	})
	m, err := target.Open(demotest.FS(tb), "target", dev)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { m.Close() })
	w := &world{tb: tb, dev: dev, model: m, host: drafter.Host{
		Embedding: m.Embedding(), Head: m.Head(),
		Vocab: m.Config().Vocab, Hidden: m.Config().Hidden, Layers: m.Config().Layers,
	}}
	w.host.FinalNorm, w.host.Eps, w.host.Gain = m.FinalNorm()
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
	seq, err := w.model.NewSequence()
	w.must(err)
	defer seq.Close()
	c.recorded = []int{0, 1, 2, 3, 4, 5, 6, 7, 8}
	out, err := w.model.Forward([]*target.Sequence{seq}, [][]int32{c.ids}, c.recorded)
	w.must(err)
	c.states = out.States
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
