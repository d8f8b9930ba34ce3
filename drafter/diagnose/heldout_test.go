package diagnose

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/extract/tokenizer"
	"github.com/draftscope/draftscope/schemas"
)

// studio makes captures that the fixtures do not hold: other prompts, sampled
// and endless replies, several turns.
type studio struct {
	*world
	model *target.Model
	tok   *tokenizer.Tokenizer
	rows  []row
}

// row is a line of sequences.jsonl.
type row struct {
	ID        string  `json:"id"`
	PromptLen int     `json:"prompt_len"`
	IDs       []int32 `json:"input_ids"`
}

func newStudio(t *testing.T) *studio {
	t.Helper()
	s := &studio{world: sharedWorld(t)}
	var err error
	if s.model, err = target.Open(demotest.FS(t), "target", s.dev); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.model.Close() })
	if s.tok, err = tokenizer.Load(demotest.FS(t), "target"); err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(strings.NewReader(string(demotest.Read(t, "sequences.jsonl"))))
	for {
		var r row
		if err := dec.Decode(&r); err == io.EOF {
			return s
		} else if err != nil {
			t.Fatal(err)
		}
		s.rows = append(s.rows, r)
	}
}

// all are the numbers of every state.
func (s *studio) all() (out []int) {
	for c := range s.host.Layers + 1 {
		out = append(out, c)
	}
	return out
}

// sampling says how a reply is written. Temperature 0 is greedy.
type sampling struct {
	temperature, topP float64
	most              int  // tokens
	endless           bool // the stop token is never drawn
}

// write continues every prompt.
func (s *studio) write(t *testing.T, prompts [][]int32, how sampling) (out []row) {
	t.Helper()
	rng := rand.New(rand.NewPCG(77, uint64(how.most)+uint64(100*how.temperature)))
	seqs, next := make([]*target.Sequence, len(prompts)), make([][]int32, len(prompts))
	for i, p := range prompts {
		var err error
		if seqs[i], err = s.model.NewSequence(); err != nil {
			t.Fatal(err)
		}
		defer seqs[i].Close()
		next[i] = p
		out = append(out, row{fmt.Sprintf("w%03d", i), len(p), slices.Clone(p)})
	}
	live := make([]int, len(prompts))
	for i := range live {
		live[i] = i
	}
	for n := 0; n < how.most && len(live) > 0; n++ {
		var ss []*target.Sequence
		var ids [][]int32
		var last []int32
		at := 0
		for _, i := range live {
			ss, ids = append(ss, seqs[i]), append(ids, next[i])
			at += len(next[i])
			last = append(last, int32(at-1))
		}
		o, err := s.model.Forward(ss, ids, nil)
		if err != nil {
			t.Fatal(err)
		}
		logits := s.logits(t, o.Final, last)
		var still []int
		for j, i := range live {
			id := choose(logits[j*s.host.Vocab:(j+1)*s.host.Vocab], how, rng)
			out[i].IDs = append(out[i].IDs, id)
			next[i] = []int32{id}
			if id != 2 {
				still = append(still, i)
			}
		}
		live = still
	}
	return out
}

func (s *studio) logits(t *testing.T, final cuda.Tensor, rows []int32) []float32 {
	t.Helper()
	place := func(cols int) cuda.Tensor {
		buf, err := s.dev.New(len(rows) * cols)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { buf.Close() })
		return cuda.Matrix(buf, len(rows), cols)
	}
	x, y := place(s.host.Hidden), place(s.host.Vocab)
	if err := s.dev.GatherRows(x, final, rows); err != nil {
		t.Fatal(err)
	}
	if err := s.dev.RMSNorm(x, x, s.host.FinalNorm, s.host.Eps, s.host.Gain); err != nil {
		t.Fatal(err)
	}
	if err := s.dev.Gemm(y, x, s.host.Head, false); err != nil {
		t.Fatal(err)
	}
	out := make([]float32, len(rows)*s.host.Vocab)
	if err := s.dev.Download(out, y); err != nil {
		t.Fatal(err)
	}
	return out
}

// choose draws a token.
func choose(logits []float32, how sampling, rng *rand.Rand) int32 {
	order := make([]int32, 0, len(logits))
	for id := range logits {
		if !how.endless || id > 3 {
			order = append(order, int32(id))
		}
	}
	slices.SortFunc(order, func(a, b int32) int { return cmpFloat(float64(logits[b]), float64(logits[a])) })
	if how.temperature == 0 {
		return order[0]
	}
	p, sum := make([]float64, len(order)), 0.0
	for i, id := range order {
		p[i] = math.Exp(float64(logits[id]-logits[order[0]]) / how.temperature)
		sum += p[i]
	}
	if how.topP > 0 {
		kept := 0.0
		for i := range p {
			if kept += p[i]; kept >= how.topP*sum {
				p, sum = p[:i+1], kept
				break
			}
		}
	}
	at := rng.Float64() * sum
	for i := range p {
		if at -= p[i]; at < 0 {
			return order[i]
		}
	}
	return order[len(p)-1]
}

// prompts are those of rows lo..hi-1 of the fixtures.
func (s *studio) prompts(lo, hi int) (out [][]int32) {
	for _, r := range s.rows[lo:hi] {
		out = append(out, slices.Clone(r.IDs[:r.PromptLen]))
	}
	return out
}

// capture runs the target over rows and records every state. The mask is 1
// from the prompt's end on.
func (s *studio) capture(t *testing.T, rows []row) (out []Sequence) {
	t.Helper()
	study := &study{Case: Case{Device: s.dev, Host: s.host}}
	for _, r := range rows {
		q := Sequence{ID: r.ID, PromptLen: r.PromptLen, States: map[int][]float32{}}
		clean := s.run(t, s.model, r.IDs)
		s.clean[key(r.IDs)] = clean
		for c, vals := range clean {
			q.States[c] = vals
		}
		answers, _, err := study.answers(clean[s.host.Layers], nil)
		if err != nil {
			t.Fatal(err)
		}
		turn, role := s.tok.Turns(r.IDs)
		for i, id := range r.IDs {
			q.Tokens = append(q.Tokens, schemas.Token{SeqID: r.ID, Pos: int32(i), TokenID: id, LossMask: i >= r.PromptLen, Turn: turn[i], Role: role[i], TargetArgmax: &answers[i]})
		}
		out = append(out, q)
	}
	return out
}

// run gives every state of a text.
func (s *studio) run(t *testing.T, m *target.Model, ids []int32) [][]float32 {
	t.Helper()
	seq, err := m.NewSequence()
	if err != nil {
		t.Fatal(err)
	}
	defer seq.Close()
	o, err := m.Forward([]*target.Sequence{seq}, [][]int32{ids}, s.all())
	if err != nil {
		t.Fatal(err)
	}
	return o.States
}

// conversation is a talk of some turns whose replies the target writes.
func (s *studio) conversation(t *testing.T, system string, turns, n int) (out []row) {
	t.Helper()
	for i := range n {
		text := ""
		if system != "" {
			text = "<|im_start|>system\n" + system + "<|im_end|>\n"
		}
		ids := s.tok.Encode(text)
		var r row
		for k := range turns {
			p := s.rows[(i*turns+k)%len(s.rows)]
			ids = append(ids, p.IDs[:p.PromptLen]...)
			r = s.write(t, [][]int32{ids}, sampling{most: 60})[0]
			if ids = slices.Clone(r.IDs); ids[len(ids)-1] != 2 {
				ids = append(ids, 2)
			}
			ids = append(ids, lineFeed)
		}
		r.ID = fmt.Sprintf("c%03d", i)
		out = append(out, r)
	}
	return out
}

// replies sets the mask to the assistant's replies, closing token included.
func replies(c *Case) {
	for i := range c.Sequences {
		q := &c.Sequences[i]
		inside, header := false, false
		for t := range q.Tokens {
			tok := &q.Tokens[t]
			if tok.TokenID == 1 {
				inside, header = false, true
			}
			tok.LossMask = inside
			if header && tok.TokenID == lineFeed {
				header, inside = false, tok.Role == roleAssistant
			}
			if tok.TokenID == 2 {
				inside = false
			}
		}
	}
}

// lineFeed is the fixtures' token that ends a header.
const lineFeed = 202

// recomputed are the states of a text that was captured, or of its beginning.
func (s *studio) recomputed(_ context.Context, ids []int32) ([][]float32, error) {
	if clean := s.clean[key(ids)]; clean != nil {
		return clean, nil
	}
	for whole, clean := range s.clean {
		if !strings.HasPrefix(whole, key(ids)) {
			continue
		}
		var out [][]float32
		for _, vals := range clean {
			out = append(out, vals[:len(ids)*s.host.Hidden])
		}
		return out, nil
	}
	return nil, fmt.Errorf("a text of %d tokens was never captured", len(ids))
}

// heldOut is one thing that is examined: from is the drafter it begins with.
type heldOut struct {
	name, from string
	make       func(*testing.T, *studio, *Case)
}

// scaledBy, quantised … are changes of weights.
type weightChange = func(name string, vals []float32) []float32

func editing(change weightChange) func(*testing.T, *studio, *Case) {
	return func(_ *testing.T, _ *studio, c *Case) { c.Drafter.Weights = edited{c.Drafter.Weights, change} }
}

func configuring(change func(map[string]any)) func(*testing.T, *studio, *Case) {
	return func(t *testing.T, _ *studio, c *Case) { c.Drafter.Config = setConfig(t, c.Drafter.Config, change) }
}

func matrix(name string) bool { return strings.Contains(name, "proj") || name == "fc.weight" }

func rmsOf(vals []float32) float64 {
	var s float64
	for _, v := range vals {
		s += float64(v) * float64(v)
	}
	return math.Sqrt(s / float64(len(vals)))
}

func rngOf(name string, seed uint64) *rand.Rand {
	h := uint64(14695981039346656037)
	for _, b := range []byte(name) {
		h = (h ^ uint64(b)) * 1099511628211
	}
	return rand.New(rand.NewPCG(seed, h))
}

// gaussianShare adds noise of a share of a matrix's own rms.
func gaussianShare(share float64, seed uint64) weightChange {
	return func(name string, vals []float32) []float32 {
		if !matrix(name) {
			return vals
		}
		rng, size := rngOf(name, seed), share*rmsOf(vals)
		for i := range vals {
			vals[i] += float32(size * rng.NormFloat64())
		}
		return vals
	}
}

// pruned zeroes the share of a matrix's entries that are smallest.
func pruned(share float64) weightChange {
	return func(name string, vals []float32) []float32 {
		if !matrix(name) {
			return vals
		}
		mags := make([]float64, len(vals))
		for i, v := range vals {
			mags[i] = math.Abs(float64(v))
		}
		slices.Sort(mags)
		cut := mags[int(share*float64(len(mags)-1))]
		for i, v := range vals {
			if math.Abs(float64(v)) < cut {
				vals[i] = 0
			}
		}
		return vals
	}
}

// codes rounds groups of values to whole codes of some bits.
func codes(bits, group int) weightChange {
	return func(name string, vals []float32) []float32 {
		if matrix(name) {
			roundCodes(vals, bits, group)
		}
		return vals
	}
}

func roundCodes(vals []float32, bits, group int) {
	top := float64(int(1)<<(bits-1) - 1)
	for lo := 0; lo < len(vals); lo += group {
		g := vals[lo:min(lo+group, len(vals))]
		most := 0.0
		for _, v := range g {
			most = math.Max(most, math.Abs(float64(v)))
		}
		if most == 0 {
			continue
		}
		for i, v := range g {
			g[i] = float32(math.Round(float64(v)*top/most) * most / top)
		}
	}
}

// mantissa rounds to a float of so many bits of mantissa.
func mantissa(bits int) weightChange {
	return func(_ string, vals []float32) []float32 {
		for i, v := range vals {
			f, e := math.Frexp(float64(v))
			vals[i] = float32(math.Ldexp(math.RoundToEven(f*float64(int(2)<<bits))/float64(int(2)<<bits), e))
		}
		return vals
	}
}

// gauges changes every scale and order that no draft depends on.
func gauges(name string, vals []float32) []float32 {
	const kv, inter = 2, 640
	layer, _, _ := strings.Cut(strings.TrimPrefix(name, "layers."), ".")
	rng := rngOf("gauge"+layer, 5)
	heads, factors := []int{1, 0, 3, 2}, make([]float32, 8)
	for i := range factors {
		factors[i] = float32(math.Exp(rng.NormFloat64()))
	}
	units := rng.Perm(inter)
	dims := make([]int, fixtureDim)
	for i := range dims {
		dims[i] = i
	}
	scaleRows := func(rows int) { // of heads
		for i := range vals {
			vals[i] *= factors[i/(rows*fixtureWide)%8]
		}
	}
	switch {
	case name == "fc.weight":
		for i := range vals {
			vals[i] *= 1000
		}
	case strings.HasSuffix(name, "q_proj.weight"):
		vals = permuteRows(vals, fixtureWide, heads, dims)
		scaleRows(fixtureDim)
	case strings.HasSuffix(name, "k_proj.weight"):
		scaleRows(fixtureDim)
	case strings.HasSuffix(name, "o_proj.weight"):
		vals = permuteHeadColumns(vals, fixtureWide, fixtureDim, heads)
	case strings.HasSuffix(name, "gate_proj.weight"), strings.HasSuffix(name, "up_proj.weight"):
		vals = permuteRows(vals, fixtureWide, units, []int{0})
	case strings.HasSuffix(name, "down_proj.weight"):
		vals = permuteHeadColumns(vals, fixtureWide, 1, units)
	}
	return vals
}

// untrained draws every matrix anew.
func untrained(seed uint64, size float64) weightChange {
	return func(name string, vals []float32) []float32 {
		rng := rngOf(name, seed)
		for i := range vals {
			if vals[i] = 1; matrix(name) {
				vals[i] = float32(size * rng.NormFloat64())
			}
		}
		return vals
	}
}

// embeddingOnly lets nothing but slot embeddings through.
func embeddingOnly(name string, vals []float32) []float32 {
	for i := range vals {
		if vals[i] = 1; matrix(name) {
			vals[i] = 0
		}
	}
	return vals
}

// mixed averages with another drafter's weights.
func mixed(with string, share float32) func(*testing.T, *studio, *Case) {
	return func(t *testing.T, s *studio, c *Case) {
		other := fixture(t, with).Weights
		editing(func(name string, vals []float32) []float32 {
			theirs, err := other.Float32s(name)
			if err != nil {
				t.Fatal(err)
			}
			for i := range vals {
				vals[i] = (1-share)*vals[i] + share*theirs[i]
			}
			return vals
		})(t, s, c)
	}
}

// shallower are the weights without one layer of two.
type shallower struct {
	drafter.Weights
	without string
}

func (w shallower) stored(name string) string {
	if w.without == "0" {
		return strings.Replace(name, "layers.0.", "layers.1.", 1)
	}
	return name
}

func (w shallower) Names() []string {
	return slices.DeleteFunc(slices.Clone(w.Weights.Names()), func(n string) bool { return strings.Contains(n, "layers.1.") })
}
func (w shallower) Shape(name string) ([]int, bool) { return w.Weights.Shape(w.stored(name)) }
func (w shallower) Float32s(name string) ([]float32, error) {
	return w.Weights.Float32s(w.stored(name))
}

func without(layer string) func(*testing.T, *studio, *Case) {
	return func(t *testing.T, s *studio, c *Case) {
		c.Drafter.Weights = shallower{c.Drafter.Weights, layer}
		configuring(func(m map[string]any) { m["num_hidden_layers"], m["layer_types"] = 1, []string{"full_attention"} })(t, s, c)
	}
}

func blocksOf(n int) func(map[string]any) { return func(m map[string]any) { m["block_size"] = n } }

// reduced drafts over every second token alone, and says so.
type reduced struct{ drafter.Weights }

func (r reduced) Names() []string { return append(slices.Clone(r.Weights.Names()), "d2t", "t2d") }
func (r reduced) Shape(name string) ([]int, bool) {
	switch name {
	case "d2t":
		return []int{2048}, true
	case "t2d":
		return []int{4096}, true
	}
	return r.Weights.Shape(name)
}

func (r reduced) Ints(name string) ([]int64, error) {
	var out []int64
	switch name {
	case "d2t": // the first 2048 tokens, the most frequent ones of a BPE
		return make([]int64, 2048), nil
	case "t2d":
		for i := range 4096 {
			out = append(out, int64(min(1, max(0, 2048-i))))
		}
		return out, nil
	}
	return r.Weights.Ints(name)
}

func reducedVocabulary(t *testing.T, _ *studio, c *Case) {
	c.Drafter.Config = setConfig(t, c.Drafter.Config, func(m map[string]any) {
		nested := map[string]any{}
		for k, v := range m {
			if k != "dflash_config" && k != "architectures" && k != "block_size" && k != "num_target_layers" {
				nested[k] = v
			}
			delete(m, k)
		}
		m["speculators_model_type"], m["architectures"] = "dflash", []string{"DFlashSpeculator"}
		m["transformer_layer_config"], m["block_size"], m["mask_token_id"] = nested, 16, 3
		m["aux_hidden_state_layer_ids"], m["draft_vocab_size"] = []int{2, 4, 5, 6}, 2048
	})
	c.Drafter.Weights = reduced{c.Drafter.Weights}
}

// writing captures what the target writes after some of the fixtures' prompts.
func writing(lo, hi int, how sampling) func(*testing.T, *studio, *Case) {
	return func(t *testing.T, s *studio, c *Case) {
		c.Sequences = s.capture(t, s.write(t, s.prompts(lo, hi), how))
	}
}

func stored(lo, hi int) func(*testing.T, *studio, *Case) {
	return func(t *testing.T, s *studio, c *Case) { c.Sequences = s.capture(t, s.rows[lo:hi]) }
}

func together(parts ...func(*testing.T, *studio, *Case)) func(*testing.T, *studio, *Case) {
	return func(t *testing.T, s *studio, c *Case) {
		for _, p := range parts {
			p(t, s, c)
		}
	}
}

var proses = []string{
	"Write a letter to a friend about the weather in the north.", "What is the capital of France?", "Explain why the sky is blue.",
	"Tell me a story of a fox and a crow.", "List five animals.", "Summarise the history of printing.", "How do I bake bread?", "Who wrote the first novel?",
	"Translate: good morning", "Describe the sea at night.", "Give me advice on learning a language.", "What does a clock measure?",
}

func prose(t *testing.T, s *studio, c *Case) {
	var prompts [][]int32
	for _, p := range proses {
		chat, err := s.tok.Chat([]tokenizer.Message{{Role: "user", Content: p}})
		if err != nil {
			t.Fatal(err)
		}
		prompts = append(prompts, chat.IDs)
	}
	c.Sequences = s.capture(t, s.write(t, prompts, sampling{most: 120}))
}

// exchanged gives each prompt the reply to another: text that the target did
// not write.
func exchanged(t *testing.T, s *studio, c *Case) {
	var rows []row
	for i := range 24 {
		p, q := s.rows[i+24], s.rows[i+25]
		rows = append(rows, row{fmt.Sprintf("x%03d", i), p.PromptLen, slices.Concat(p.IDs[:p.PromptLen], q.IDs[q.PromptLen:])})
	}
	c.Sequences = s.capture(t, rows)
}

func talking(system string, turns, n int) func(*testing.T, *studio, *Case) {
	return func(t *testing.T, s *studio, c *Case) {
		c.Sequences = s.capture(t, s.conversation(t, system, turns, n))
		replies(c)
	}
}

// healthyDrafters must raise no alarm, whatever they draft.
var healthyDrafters = []heldOut{
	{"gauges", "good", editing(gauges)},
	{"fc a thousandth", "good", editing(func(n string, v []float32) []float32 {
		for i := range v {
			if n == "fc.weight" {
				v[i] /= 1000
			}
		}
		return v
	})},
	{"random", "good", editing(untrained(1, 0.02))},
	{"random, large", "good", editing(untrained(2, 0.2))},
	{"random, another", "good", editing(untrained(3, 0.05))},
	{"random, and another", "good", editing(untrained(4, 0.1))},
	{"embedding alone", "good", editing(embeddingOnly)},
	{"good without its last layer", "good", without("1")},
	{"good without its first layer", "good", without("0")},
	{"early without its last layer", "early", without("1")},
	{"noise of 30 %", "good", editing(gaussianShare(0.3, 1))},
	{"noise of 30 % on early", "early", editing(gaussianShare(0.3, 2))},
	{"noise of 60 %", "good", editing(gaussianShare(0.6, 3))},
	{"noise of 15 %", "good", editing(gaussianShare(0.15, 4))},
	{"noise of 10 % on early", "early", editing(gaussianShare(0.1, 5))},
	{"noise of 5 %", "good", editing(gaussianShare(0.05, 6))},
	{"half pruned", "good", editing(pruned(0.5))},
	{"seven tenths pruned", "good", editing(pruned(0.7))},
	{"half pruned, early", "early", editing(pruned(0.5))},
	{"a fifth pruned", "good", editing(pruned(0.2))},
	{"4 bits", "good", editing(codes(4, 64))},
	{"4 bits, early", "early", editing(codes(4, 64))},
	{"3 bits", "good", editing(codes(3, 64))},
	{"8 bits", "good", editing(codes(8, 256))},
	{"fp8", "good", editing(mantissa(3))},
	{"2 bits of mantissa", "early", editing(mantissa(2))},
	{"half good, half early", "good", mixed("early", 0.5)},
	{"a quarter early", "good", mixed("early", 0.25)},
	{"three quarters early", "good", mixed("early", 0.75)},
	{"blocks of 8", "good", configuring(blocksOf(8))},
	{"blocks of 4", "good", configuring(blocksOf(4))},
	{"blocks of 12, early", "early", configuring(blocksOf(12))},
	{"a reduced vocabulary", "good", reducedVocabulary},
	{"a reduced vocabulary, early", "early", reducedVocabulary},
	{"other prompts", "good", stored(24, 48)},
	{"other prompts, early", "early", stored(24, 48)},
	{"48 sequences", "good", stored(48, 96)},
	{"48 sequences, early", "early", stored(48, 96)},
	{"12 sequences", "good", stored(60, 72)},
	{"12 sequences, early", "early", stored(60, 72)},
	{"6 sequences", "good", stored(72, 78)},
	{"6 sequences, early", "early", stored(72, 78)},
	{"3 sequences", "good", stored(90, 93)},
	{"3 sequences, early", "early", stored(90, 93)},
	{"2 sequences", "early", stored(93, 95)},
	{"replies of 6 tokens", "good", writing(24, 64, sampling{most: 6, endless: true})},
	{"replies of 6 tokens, early", "early", writing(24, 64, sampling{most: 6, endless: true})},
	{"replies of 500 tokens", "good", writing(24, 32, sampling{most: 500, endless: true})},
	{"replies of 500 tokens, early", "early", writing(24, 32, sampling{most: 500, endless: true})},
	{"replies of 1200 tokens", "good", writing(32, 36, sampling{most: 1200, endless: true})},
	{"sampled long replies", "good", writing(24, 34, sampling{temperature: 0.8, most: 400, endless: true})},
	{"temperature 0.7", "good", writing(24, 48, sampling{temperature: 0.7, most: 100})},
	{"temperature 0.7, early", "early", writing(24, 48, sampling{temperature: 0.7, most: 100})},
	{"temperature 1.5", "good", writing(24, 48, sampling{temperature: 1.5, most: 100})},
	{"temperature 1.5, early", "early", writing(24, 48, sampling{temperature: 1.5, most: 100})},
	{"temperature 1, top-p 0.9", "early", writing(48, 72, sampling{temperature: 1, topP: 0.9, most: 100})},
	{"three turns", "good", talking("", 3, 10)},
	{"three turns, early", "early", talking("", 3, 10)},
	{"a system prompt and six turns", "good", talking("You write Go.", 6, 6)},
	{"prose", "good", prose},
	{"prose, early", "early", prose},
	{"replies to other prompts", "good", exchanged},
	{"replies to other prompts, early", "early", exchanged},
	{"noise of 30 % on 6 sequences", "good", together(stored(72, 78), editing(gaussianShare(0.3, 7)))},
	{"half early on sampled text", "good", together(writing(24, 48, sampling{temperature: 1, most: 80}), mixed("early", 0.5))},
	{"4 bits on long replies", "early", together(writing(24, 32, sampling{most: 300, endless: true}), editing(codes(4, 64)))},
	{"random on prose", "good", together(prose, editing(untrained(5, 0.05)))},
	{"without its last layer on prose", "good", together(prose, without("1"))},
}

// examined runs a held-out thing as the command does, but for the engine's
// pass over all anchors. DRAFTSCOPE_HELD_OUT is "all" or the families of
// variants to try, with commas; without it few are tried at few anchors.
func (h heldOut) examined(t *testing.T, s *studio) *Report {
	t.Helper()
	c := demoCase(t, h.from)
	c.Anchors = 0
	c.Recompute = s.recomputed
	switch only := os.Getenv("DRAFTSCOPE_HELD_OUT"); only {
	case "all":
	case "":
		c.Anchors, c.Families = 96, []string{"rope-base", "window", "tap-order", "slot-0"}
	default:
		c.Families = strings.Split(only, ",")
	}
	h.make(t, s, &c)
	return examine(t, c, probeStates, probeLabels, probeMask, probeDrafter, probeIdentity)
}

// Two of the held-out things under which the former rules raised an alarm, with
// the families that did.
func TestADrafterThatHitsByChanceRaisesNoAlarm(t *testing.T) {
	for _, h := range []heldOut{
		{"random", "mask-token", editing(untrained(1, 0.02))},
		{"without its first layer", "state-number", without("0")},
	} {
		t.Run(h.name, func(t *testing.T) {
			c := families(demoCase(t, "good"), h.from)
			c.Anchors = 0
			h.make(t, nil, &c)
			r := examine(t, c, probeDrafter)
			wantSilence(t, r)
			if f := find(t, r, h.from); f.Verdict != CannotTell {
				t.Errorf("%s: %s: %s", f.Key, f.Verdict, f.Measure)
			}
		})
	}
}

// someOf is every 23rd of the held-out things, or all of them where
// DRAFTSCOPE_HELD_OUT asks for that, which takes an hour.
func someOf[T any](all []T) (some []T) {
	if os.Getenv("DRAFTSCOPE_HELD_OUT") != "" {
		return all
	}
	for i := 0; i < len(all); i += 23 {
		some = append(some, all[i])
	}
	return some
}

// TestHeldOutHealthyThingsRaiseNoAlarm prints what is said of them: the
// tables of docs/diagnose.md.
func TestHeldOutHealthyThingsRaiseNoAlarm(t *testing.T) {
	s := newStudio(t)
	for _, h := range someOf(healthyDrafters) {
		t.Run(h.name, func(t *testing.T) {
			r := h.examined(t, s)
			said := "silent"
			for _, f := range r.Findings {
				if f.alarm() {
					said = "ALARM"
					t.Errorf("ALARM %s: %s %s: %s", h.name, f.Verdict, f.Key, f.Measure)
				}
			}
			t.Logf("HEALTHY %s (%s): %s; %s; %s", h.name, h.from, said, find(t, r, keyShift).Measure, find(t, r, keySource).Measure)
		})
	}
}

// TestHeldOutFaultsGetNoOtherName does so of the faults: none may be given another
// name.
func TestHeldOutFaultsGetNoOtherName(t *testing.T) {
	s := newStudio(t)
	for _, h := range someOf(faultyDrafters) {
		t.Run(h.name, func(t *testing.T) {
			r := heldOut{h.name, h.from, h.make}.examined(t, s)
			f := r.Findings[0]
			said := "nothing"
			if f.alarm() {
				said = string(f.Verdict) + " " + f.Key
			}
			switch {
			case !f.alarm():
				t.Logf("MISSED %s", h.name)
			case f.Key != h.key:
				t.Errorf("WRONG %s: %s, want %s", h.name, said, h.key)
			}
			t.Logf("FAULT %s (%s): %s: %s %s", h.name, h.from, said, f.Sentence, f.Measure)
			for _, other := range r.Findings[1:] {
				if other.alarm() {
					t.Logf("  also %s %s: %s", other.Verdict, other.Key, other.Measure)
				}
			}
		})
	}
}
