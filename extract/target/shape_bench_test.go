package target_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/backendtest"
	"github.com/draftscope/draftscope/cuda/gpu"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/schemas"
)

// shape is a Qwen3 of some size, and how much it is given to do.
type shape struct {
	layers, hidden, inter, heads, kv, dim, vocab int
	batch, prompt, fresh                         int
}

// qwen3of8B is what docs/bench/cuda.md measures, beside the baseline there.
var qwen3of8B = shape{36, 4096, 12288, 32, 8, 128, 151936, 32, 512, 64}

func (s shape) config() string {
	return fmt.Sprintf(`{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": %d, "hidden_size": %d,
		"intermediate_size": %d, "num_hidden_layers": %d, "num_attention_heads": %d, "num_key_value_heads": %d, "head_dim": %d,
		"rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960, "tie_word_embeddings": true, "eos_token_id": 0}`,
		s.vocab, s.hidden, s.inter, s.layers, s.heads, s.kv, s.dim)
}

// taps are five states, where the baseline has them.
func (s shape) taps() []int {
	var out []int
	for i := range 5 {
		out = append(out, 1+int(math.Round(1+float64(i)*float64(s.layers-4)/4)))
	}
	return slices.Compact(out)
}

// madeUp are weights of a shape, cut from one run of random bf16 values; the
// norms are ones.
type madeUp struct {
	shapes      map[string][]int
	noise, ones []byte
}

func newMadeUp(s shape) madeUp {
	m := madeUp{shapes: map[string][]int{"model.embed_tokens.weight": {s.vocab, s.hidden}, "model.norm.weight": {s.hidden}}}
	for i := range s.layers {
		for name, shape := range map[string][]int{
			"input_layernorm": {s.hidden}, "post_attention_layernorm": {s.hidden},
			"self_attn.q_proj": {s.heads * s.dim, s.hidden}, "self_attn.k_proj": {s.kv * s.dim, s.hidden},
			"self_attn.v_proj": {s.kv * s.dim, s.hidden}, "self_attn.o_proj": {s.hidden, s.heads * s.dim},
			"self_attn.q_norm": {s.dim}, "self_attn.k_norm": {s.dim},
			"mlp.gate_proj": {s.inter, s.hidden}, "mlp.up_proj": {s.inter, s.hidden}, "mlp.down_proj": {s.hidden, s.inter},
		} {
			m.shapes[fmt.Sprintf("model.layers.%d.%s.weight", i, name)] = shape
		}
	}
	largest := 2 * s.hidden * max(s.vocab, s.inter, s.heads*s.dim)
	rng := rand.New(rand.NewPCG(1, 1))
	const period = 1<<20 + 7
	values := make([]float32, period)
	for i := range values {
		values[i] = float32(rng.NormFloat64() * .02)
	}
	m.noise = schemas.BF16.AppendBytes(make([]byte, 0, max(largest, 2*period)), values)
	for len(m.noise) < largest {
		m.noise = append(m.noise, m.noise[:min(len(m.noise), largest-len(m.noise))]...)
	}
	ones := make([]float32, max(s.hidden, s.dim))
	for i := range ones {
		ones[i] = 1
	}
	m.ones = schemas.BF16.AppendBytes(nil, ones)
	return m
}

func (m madeUp) Names() []string {
	var out []string
	for name := range m.shapes {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

func (m madeUp) Info(name string) (safetensors.Info, bool) {
	s, ok := m.shapes[name]
	return safetensors.Info{DType: safetensors.BF16, Shape: s}, ok
}

func (m madeUp) Raw(name string) ([]byte, error) {
	n := 2
	for _, d := range m.shapes[name] {
		n *= d
	}
	if strings.Contains(name, "norm") {
		return m.ones[:n], nil
	}
	return m.noise[:n], nil
}

func (m madeUp) Float32s(string) ([]float32, error) { return nil, errors.New("all weights are bf16") }
func (m madeUp) Fingerprint() string                { return "made up" }
func (m madeUp) Close() error                       { return nil }

// BenchmarkQwen3Of8B measures native capture at that shape in bf16, as the
// baseline measures a user of transformers: wall time of a prefill of 32
// prompts of 512 tokens, with and without five taps in the host's memory, and
// of decoding 64 tokens of each. A short run has a small model on any device.
func BenchmarkQwen3Of8B(b *testing.B) {
	s := qwen3of8B
	var dev cuda.Device
	if testing.Short() {
		s = shape{6, 64, 128, 4, 2, 16, 500, 3, 20, 4}
		dev = backendtest.Open(b)
	} else {
		dev = backendtest.OpenGPU(b, gpu.Config{Precision: gpu.BF16})
	}
	defer func() { must(b, dev.Close()) }()
	b.Log(dev.Name())
	weights := newMadeUp(s)
	clock := &clocked{Device: dev, took: map[string]time.Duration{}}
	start := time.Now()
	m, err := target.OpenWeights(s.config(), weights, clock)
	must(b, err)
	defer func() { must(b, m.Close()) }()
	bytes := 0
	for _, name := range weights.Names() {
		raw, err := weights.Raw(name)
		must(b, err)
		bytes += len(raw)
	}
	took := time.Since(start)
	b.Logf("loaded %.2f GB of bf16 weights in %.2f s, %.1f GB/s", float64(bytes)/1e9, took.Seconds(), float64(bytes)/1e9/took.Seconds())
	w := &work{b: b, s: s, m: m, dev: dev}
	w.fetchRate()
	rng := rand.New(rand.NewPCG(2, 2))
	for range s.batch {
		ids := make([]int32, s.prompt)
		for i := range ids {
			ids[i] = int32(rng.IntN(s.vocab))
		}
		w.prompts = append(w.prompts, ids)
	}
	rows := s.batch * s.prompt
	for range s.taps() {
		mem, err := dev.HostAlloc(rows * s.hidden * 2)
		must(b, err)
		defer dev.HostFree(mem)
		w.host = append(w.host, mem)
	}
	for range b.N {
		w.compare()
	}
	w.source("the first, which pins the host's memory")
	w.source("one more")
	clock.on = true
	w.prefill(false)
	clock.print(b)
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// work is one model and what it is given.
type work struct {
	b       *testing.B
	s       shape
	m       *target.Model
	dev     cuda.Device
	prompts [][]int32
	host    [][]byte // of each tap
}

// done returns when the device has ended what was asked of it.
func (w *work) done() {
	must(w.b, w.dev.Download(make([]float32, 1), w.m.Embedding().RowRange(0, 1).ColRange(0, 1)))
}

// fetchRate measures the copy to the host where nothing else is to do.
func (w *work) fetchRate() {
	rows := min(w.s.vocab, w.s.batch*w.s.prompt)
	mem, err := w.dev.HostAlloc(rows * w.s.hidden * 2)
	must(w.b, err)
	defer w.dev.HostFree(mem)
	x := w.m.Embedding().RowRange(0, rows)
	const times = 8
	run := func() float64 {
		start := time.Now()
		var flights []cuda.Flight
		for range times {
			f, err := w.dev.Fetch(x, cuda.BF16, []cuda.Landing{{Lo: 0, Hi: rows, To: mem}})
			must(w.b, err)
			flights = append(flights, f)
		}
		for _, f := range flights {
			_, err := f.Wait()
			must(w.b, err)
		}
		return float64(times*len(mem)) / 1e9 / time.Since(start).Seconds()
	}
	run()
	w.b.Logf("fetching %d x %d MB: %.1f GB/s", times, len(mem)/1e6, max(run(), run(), run()))
}

// begin is new sequences with room for what is asked of them.
func (w *work) begin() []*target.Sequence {
	var seqs []*target.Sequence
	for range w.s.batch {
		s, err := w.m.NewSequence()
		must(w.b, err)
		must(w.b, s.Reserve(w.s.prompt+w.s.fresh))
		seqs = append(seqs, s)
	}
	return seqs
}

// pass runs ids and starts the way of the taps to the host.
func (w *work) pass(seqs []*target.Sequence, ids [][]int32, capture bool) (cuda.Tensor, []cuda.Flight) {
	var taps []target.Tap
	if capture {
		width := w.s.hidden * 2
		for i, state := range w.s.taps() {
			t := target.Tap{State: state, As: cuda.BF16}
			for k, own := range ids {
				at := k * len(own) * width
				t.To = append(t.To, w.host[i][at:at+len(own)*width])
			}
			taps = append(taps, t)
		}
	}
	final, flights, err := w.m.Capture(seqs, ids, taps)
	must(w.b, err)
	return final, flights
}

func (w *work) wait(flights []cuda.Flight) {
	for _, f := range flights {
		odd, err := f.Wait()
		must(w.b, err)
		for i, n := range odd {
			if n != 0 {
				w.b.Fatalf("row %d holds %d values that are not finite", i, n)
			}
		}
	}
}

// prefill is tokens a second of two prefills in a row, after one more: at full
// power the clock depends on what ran just before.
func (w *work) prefill(capture bool) float64 {
	var start time.Time
	for i := range 3 {
		if i == 1 {
			w.done()
			start = time.Now()
		}
		seqs := w.begin()
		_, flights := w.pass(seqs, w.prompts, capture)
		w.wait(flights)
		for _, s := range seqs {
			s.Close()
		}
	}
	w.done()
	return float64(2*w.s.batch*w.s.prompt) / time.Since(start).Seconds()
}

// decode is tokens a second of greedy decoding after the prompts.
func (w *work) decode(capture bool) float64 {
	seqs := w.begin()
	defer func() {
		for _, s := range seqs {
			s.Close()
		}
	}()
	w.pass(seqs, w.prompts, false)
	ids := make([][]int32, len(seqs))
	for i := range ids {
		ids[i] = []int32{int32(i)}
	}
	w.done()
	start := time.Now()
	for range w.s.fresh {
		final, flights := w.pass(seqs, ids, capture)
		normed, err := w.m.Normed(final)
		must(w.b, err)
		res, err := w.dev.Head(cuda.HeadArgs{Hidden: normed, Weight: w.m.Head(), K: 1})
		must(w.b, err)
		w.wait(flights)
		for i, id := range res.TopIDs {
			ids[i] = []int32{id}
		}
	}
	return float64(w.s.batch*w.s.fresh) / time.Since(start).Seconds()
}

// compare runs all ways in turns, three times after one to warm up, and
// reports medians.
func (w *work) compare() {
	ways := []struct {
		name string
		run  func() float64
		got  []float64
	}{
		{"prefill", func() float64 { return w.prefill(false) }, nil},
		{"prefill, taps", func() float64 { return w.prefill(true) }, nil},
		{"decode", func() float64 { return w.decode(false) }, nil},
		{"decode, taps", func() float64 { return w.decode(true) }, nil},
	}
	for round := range 4 {
		for i := range ways {
			way := &ways[(i+round)%len(ways)]
			if rate := way.run(); round > 0 {
				way.got = append(way.got, rate)
			}
		}
	}
	for _, way := range ways {
		slices.Sort(way.got)
		w.b.Logf("%-14s %9.0f tokens/s (%.0f to %.0f)", way.name, way.got[1], way.got[0], way.got[2])
		w.b.ReportMetric(way.got[1], strings.NewReplacer(", ", "+").Replace(way.name)+"-tok/s")
	}
}

// source is a whole capture of given sequences, with the target's own next
// tokens scored and the records built.
func (w *work) source(which string) {
	cfg := target.SourceConfig{Model: w.m, Run: "bench", States: w.s.taps(), DType: schemas.BF16, Batch: w.s.batch}
	for i := range 3 * w.s.batch {
		cfg.Inputs = append(cfg.Inputs, target.Input{ID: fmt.Sprint("s", i), IDs: w.prompts[i%w.s.batch], PromptLen: w.s.prompt / 2})
	}
	src, err := target.NewSource(cfg)
	must(w.b, err)
	defer func() { must(w.b, src.Close()) }()
	start := time.Now()
	for {
		_, rec, _, err := src.Next(context.Background())
		if errors.Is(err, io.EOF) {
			break
		}
		must(w.b, err)
		rec.Release()
	}
	took := time.Since(start).Seconds()
	w.b.Logf("whole capture of %d sequences, scored, as records, %s: %.0f tokens/s", len(cfg.Inputs), which, float64(len(cfg.Inputs)*w.s.prompt)/took)
}

// clocked times every operation by itself, where it is on.
type clocked struct {
	cuda.Device
	on   bool
	took map[string]time.Duration
	at   cuda.Buffer
}

func (c *clocked) time(name string, run func() error) error {
	if !c.on {
		return run()
	}
	if c.at == nil {
		c.at, _ = c.New(1)
	}
	wait := func() error { return c.Download(make([]float32, 1), cuda.Matrix(c.at, 1, 1)) }
	if err := wait(); err != nil {
		return err
	}
	start := time.Now()
	err := errors.Join(run(), wait())
	c.took[name] += time.Since(start)
	return err
}

func (c *clocked) print(b *testing.B) {
	c.on = false
	c.at.Close()
	for _, name := range slices.Sorted(maps.Keys(c.took)) {
		t := c.took[name]
		b.Logf("alone: %-24s %7.2f ms a prefill", name, float64(t)/3e6)
	}
}

func (c *clocked) Gemm(dst, a, w cuda.Tensor, add bool) error {
	return c.time(fmt.Sprintf("Gemm by %d x %d", w.Rows, w.Cols), func() error { return c.Device.Gemm(dst, a, w, add) })
}

func (c *clocked) RMSNorm(dst, x, w cuda.Tensor, eps, gain float32) error {
	return c.time("RMSNorm", func() error { return c.Device.RMSNorm(dst, x, w, eps, gain) })
}

func (c *clocked) NormRoPE(dst cuda.Tensor, args cuda.NormRoPEArgs) error {
	return c.time("NormRoPE", func() error { return c.Device.NormRoPE(dst, args) })
}

func (c *clocked) Attention(dst cuda.Tensor, args cuda.AttentionArgs) error {
	return c.time("Attention", func() error { return c.Device.Attention(dst, args) })
}

func (c *clocked) GateMul(dst, gate, x cuda.Tensor, act cuda.Activation) error {
	return c.time("GateMul", func() error { return c.Device.GateMul(dst, gate, x, act) })
}

func (c *clocked) ScatterRows(dst, src cuda.Tensor, rows []int32) error {
	return c.time("ScatterRows", func() error { return c.Device.ScatterRows(dst, src, rows) })
}
