package drafter_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
)

// The Qwen3.6-27B drafter's shape, in full attention as the PyTorch baseline
// of docs/bench/cuda.md has it.
const (
	bigHidden, bigInter, bigVocab, bigTaps, bigLayers = 5120, 17408, 248320, 5, 5
	bigHeads, bigKV, bigDim                           = 32, 8, 128
)

const bigConfig = `{
	"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": 248320,
	"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32,
	"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000000,
	"layer_types": ["full_attention", "full_attention", "full_attention", "full_attention", "full_attention"],
	"num_target_layers": 64, "block_size": 16,
	"dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]}}`

// madeUp are weights of that shape, cut from one run of random values.
type madeUp struct {
	shapes map[string][]int
	noise  []float32
}

func newMadeUp() madeUp {
	m := madeUp{shapes: map[string][]int{
		"fc.weight": {bigHidden, bigTaps * bigHidden}, "hidden_norm.weight": {bigHidden}, "norm.weight": {bigHidden},
	}, noise: make([]float32, bigHidden*bigTaps*bigHidden)}
	for i := range bigLayers {
		for name, shape := range map[string][]int{
			"input_layernorm.weight": {bigHidden}, "post_attention_layernorm.weight": {bigHidden},
			"self_attn.q_proj.weight": {bigHeads * bigDim, bigHidden}, "self_attn.k_proj.weight": {bigKV * bigDim, bigHidden},
			"self_attn.v_proj.weight": {bigKV * bigDim, bigHidden}, "self_attn.o_proj.weight": {bigHidden, bigHeads * bigDim},
			"self_attn.q_norm.weight": {bigDim}, "self_attn.k_norm.weight": {bigDim},
			"mlp.gate_proj.weight": {bigInter, bigHidden}, "mlp.up_proj.weight": {bigInter, bigHidden}, "mlp.down_proj.weight": {bigHidden, bigInter},
		} {
			m.shapes[fmt.Sprintf("layers.%d.%s", i, name)] = shape
		}
	}
	rng := rand.New(rand.NewPCG(1, 1))
	const period = 1<<20 + 7
	for i := range period {
		m.noise[i] = float32(rng.NormFloat64() * .02)
	}
	for at := period; at < len(m.noise); at *= 2 {
		copy(m.noise[at:], m.noise[:at])
	}
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

func (m madeUp) Shape(name string) ([]int, bool) { s, ok := m.shapes[name]; return s, ok }

func (m madeUp) Float32s(name string) ([]float32, error) {
	n := 1
	for _, d := range m.shapes[name] {
		n *= d
	}
	return m.noise[:n], nil
}

// BenchmarkStageAtQwen36Shape times the three parts of drafting at the shape of
// the Qwen3.6-27B drafter, in bf16, as the PyTorch baseline does: medians of
// wall time from the call until its result is there.
func BenchmarkStageAtQwen36Shape(b *testing.B) {
	dev := inBF16(b)
	b.Cleanup(func() { dev.Close() })
	b.Log(dev.Name())
	w := &world{tb: b, dev: dev}
	weights := newMadeUp()
	table := w.alloc(bigVocab, bigHidden)
	const rows = 8192
	for lo := 0; lo < bigVocab; lo += rows {
		part := table.RowRange(lo, min(lo+rows, bigVocab))
		from := lo % 1000
		w.must(dev.Upload(part, weights.noise[from:from+part.Rows*bigHidden]))
	}
	host := drafter.Host{
		Embedding: table, Head: table, FinalNorm: table.RowRange(0, 1), Eps: 1e-6,
		Vocab: bigVocab, Hidden: bigHidden, Layers: 64,
	}
	d, err := drafter.Open("big", []byte(bigConfig), weights, host, dev)
	w.must(err)
	b.Cleanup(d.Close)
	for _, size := range []struct{ context, anchors int }{{2048, 32}, {2048, 128}, {4096, 128}} {
		benchmarkStage(b, w, d, host, weights.noise, size.context, size.anchors)
	}
}

func benchmarkStage(b *testing.B, w *world, d *drafter.Drafter, host drafter.Host, noise []float32, length, anchors int) {
	all := w.upload(noise[:length*bigTaps*bigHidden], length, bigTaps*bigHidden) // as a stage places them
	var taps []cuda.Tensor
	for i := range bigTaps {
		taps = append(taps, all.ColRange(i*bigHidden, (i+1)*bigHidden))
	}
	at, tokens := make([]int32, anchors), make([]int32, anchors)
	for i := range at {
		lo, hi := length/8, length-16-2
		at[i], tokens[i] = int32(lo+(hi-lo)*i/(anchors-1)), int32(i*7)
	}
	// done returns when the device has ended what was asked of it; Head, whose
	// results are the host's, has then ended by itself.
	done := func() { w.must(w.dev.Download(make([]float32, 1), host.Head.RowRange(0, 1).ColRange(0, 1))) }
	median := func(name string, run func()) {
		b.Run(fmt.Sprintf("%dx%d/%s", length, anchors, name), func(b *testing.B) {
			for range 3 {
				run()
			}
			var times []time.Duration
			for b.Loop() {
				start := time.Now()
				run()
				times = append(times, time.Since(start))
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)/2])/1e6, "median-ms")
		})
	}
	median("context", func() {
		ctx, err := d.NewContext()
		w.must(err)
		w.must(ctx.Extend(taps))
		done()
		ctx.Close()
	})
	ctx, err := d.NewContext()
	w.must(err)
	defer ctx.Close()
	w.must(ctx.Extend(taps))
	var z cuda.Tensor
	calls := 0
	median("draft", func() {
		// Other anchors each time: what a device keeps of the last call is of no use.
		calls++
		moved := slices.Clone(at)
		for i := range moved {
			moved[i] += int32(calls%64 - 48)
		}
		z, err = ctx.Draft(moved, tokens)
		w.must(err)
		done()
	})
	labels := make([]int32, z.Rows)
	for i := range labels {
		labels[i] = int32(i * 37 % bigVocab)
	}
	head := func(losses cuda.Losses) func() {
		args := cuda.HeadArgs{Hidden: z, Weight: host.Head, K: 8, Labels: labels, Losses: losses, Target: taps[0].RowRange(0, z.Rows/15+15)}
		for i := range labels {
			args.TargetRow = append(args.TargetRow, int32(i/15+i%15))
		}
		return func() {
			_, err := w.dev.Head(args)
			w.must(err)
		}
	}
	median("head", head(0))
	median("head with KL", head(cuda.KL))
}
