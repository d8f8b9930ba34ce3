package diagnose

import (
	"context"
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/cpu"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/extract/tokenizer"
	"github.com/draftscope/draftscope/schemas"
)

// world is the demo's target with a few sequences run through it once for all
// tests.
type world struct {
	dev   cuda.Device
	host  drafter.Host
	text  func(int32) string
	ids   func(string) []int32
	seqs  []Sequence // with every state recorded
	clean map[string][][]float32
	model *target.Model
}

// recompute runs the target on ids, once for all tests.
func (w *world) recompute(_ context.Context, ids []int32) ([][]float32, error) {
	if states, ok := w.clean[key(ids)]; ok {
		return states, nil
	}
	seq, err := w.model.NewSequence()
	if err != nil {
		return nil, err
	}
	defer seq.Close()
	out, err := w.model.Forward([]*target.Sequence{seq}, [][]int32{ids}, []int{0, 1, 2, 3, 4, 5, 6, 7, 8})
	if err != nil {
		return nil, err
	}
	w.clean[key(ids)] = out.States
	return out.States, nil
}

const (
	testSequences = 24
	testAnchors   = 96
)

var theWorld struct {
	sync.Once
	*world
}

func sharedWorld(t *testing.T) *world {
	t.Helper()
	theWorld.Do(func() { theWorld.world = newWorld(t) })
	if theWorld.world == nil {
		t.Fatal("the shared world could not be made")
	}
	return theWorld.world
}

// newWorld is kept for the life of the test program: its memory is not given
// back.
func newWorld(t *testing.T) *world {
	t.Helper()
	dev, err := cpu.New(cpu.Config{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := target.Open(demotest.FS(t), "target", dev)
	if err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.Load(demotest.FS(t), "target")
	if err != nil {
		t.Fatal(err)
	}
	w := &world{dev: dev, model: m, clean: map[string][][]float32{}, host: drafter.Host{
		Embedding: m.Embedding(), Head: m.Head(),
		Vocab: m.Config().Vocab, Hidden: m.Config().Hidden, Layers: m.Config().Layers,
	}, text: func(id int32) string { return tok.Decode([]int32{id}) }, ids: tok.Encode}
	w.host.FinalNorm, w.host.Eps, w.host.Gain = m.FinalNorm()
	dec := json.NewDecoder(strings.NewReader(string(demotest.Read(t, "sequences.jsonl"))))
	for dec.More() && len(w.seqs) < testSequences {
		var row struct {
			ID        string  `json:"id"`
			PromptLen int     `json:"prompt_len"`
			IDs       []int32 `json:"input_ids"`
		}
		if err := dec.Decode(&row); err != nil {
			t.Fatal(err)
		}
		all, err := w.recompute(t.Context(), row.IDs)
		if err != nil {
			t.Fatal(err)
		}
		q := Sequence{ID: row.ID, PromptLen: row.PromptLen, Greedy: true, States: map[int][]float32{}}
		for c, vals := range all {
			q.States[c] = vals
		}
		turn, role := tok.Turns(row.IDs)
		for i, id := range row.IDs {
			q.Tokens = append(q.Tokens, schemas.Token{SeqID: row.ID, Pos: int32(i), TokenID: id, LossMask: i >= row.PromptLen, Turn: turn[i], Role: role[i]})
		}
		w.seqs = append(w.seqs, q)
	}
	// The recorded answers are the target's.
	s := &study{Case: Case{Device: dev, Host: w.host}}
	for _, q := range w.seqs {
		answers, _, err := s.answers(q.States[w.host.Layers], nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := range q.Tokens {
			q.Tokens[i].TargetArgmax = &answers[i]
		}
	}
	return w
}

func key(ids []int32) string {
	var b strings.Builder
	for _, id := range ids {
		b.WriteRune(id)
	}
	return b.String()
}

// demoCase is a clean capture and one of the fixtures' drafters. The
// sequences are copies; states are shared and must be replaced, not changed.
func demoCase(t *testing.T, name string) Case {
	t.Helper()
	w := sharedWorld(t)
	c := Case{Device: w.dev, Host: w.host, Text: w.text, Encode: w.ids, Anchors: testAnchors, Capture: Capture{DType: schemas.F32, Exact: true}}
	c.Drafter = fixture(t, name)
	c.Recompute = w.recompute
	for _, q := range w.seqs {
		q.Tokens, q.States = slices.Clone(q.Tokens), maps.Clone(q.States)
		c.Sequences = append(c.Sequences, q)
	}
	return c
}

func fixture(t *testing.T, name string) Checkpoint {
	t.Helper()
	weights, err := safetensors.Open(demotest.FS(t), "drafters/"+name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { weights.Close() })
	return Checkpoint{Name: name, Config: demotest.Read(t, "drafters/"+name+"/config.json"), Weights: weights}
}

type probe = func(context.Context, *study, *Report) error

// examine runs some of the probes.
func examine(t *testing.T, c Case, probes ...probe) *Report {
	t.Helper()
	s, err := newStudy(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	r := &Report{Drafter: c.Drafter.Name}
	for _, p := range probes {
		if err := p(context.Background(), s, r); err != nil {
			t.Fatal(err)
		}
	}
	r.rank()
	r.conclude("")
	return r
}

// find is the finding of a key.
func find(t *testing.T, r *Report, key string) Finding {
	t.Helper()
	for _, f := range r.Findings {
		if f.Key == key {
			return f
		}
	}
	t.Fatalf("no finding %s", key)
	return Finding{}
}

// wantFirst checks that a fault is named first.
func wantFirst(t *testing.T, r *Report, key string, verdict Verdict) {
	t.Helper()
	f := r.Findings[0]
	if f.Key != key || f.Verdict != verdict || !f.alarm() {
		t.Errorf("first is %s, %s; want %s, %s\n%s\n%s", f.Key, f.Verdict, key, verdict, f.Sentence, f.Measure)
	}
	t.Logf("%s %s: %s (%s)", f.Verdict, f.Key, f.Sentence, f.Measure)
	for _, other := range r.Findings[1:] {
		if other.alarm() {
			t.Logf("  also %s %s: %s", other.Verdict, other.Key, other.Measure)
		}
	}
}

// wantSilence checks that nothing is an alarm.
func wantSilence(t *testing.T, r *Report) {
	t.Helper()
	for _, f := range r.Findings {
		if f.alarm() {
			t.Errorf("a false alarm: %s %s: %s (%s)", f.Verdict, f.Key, f.Sentence, f.Measure)
		}
	}
}

// families limits the variants to some families, unless all are asked for:
// drafting with all takes minutes over all plants.
func families(c Case, keys ...string) Case {
	if os.Getenv("DRAFTSCOPE_ALL_FAMILIES") == "" {
		c.Families = keys
	}
	return c
}

// setConfig changes fields of a config.json.
func setConfig(t *testing.T, raw []byte, change func(map[string]any)) []byte {
	t.Helper()
	var doc map[string]any
	if err := json.Unmarshal(raw, &doc); err != nil {
		t.Fatal(err)
	}
	change(doc)
	out, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// edited are weights with some tensors changed as they are read.
type edited struct {
	drafter.Weights
	change func(name string, vals []float32) []float32
}

func (e edited) Float32s(name string) ([]float32, error) {
	vals, err := e.Weights.Float32s(name)
	if err != nil {
		return nil, err
	}
	return e.change(name, slices.Clone(vals)), nil
}
