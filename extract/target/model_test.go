package target_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/safetensors/safetensorstest"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/schemas"
)

// parts is a model directory taken apart, to be changed and written again.
type parts struct {
	config  map[string]any
	tensors []safetensorstest.Tensor
}

func takeApart(tb testing.TB, dir string) *parts {
	tb.Helper()
	p := &parts{}
	if err := json.Unmarshal(demotest.Read(tb, dir+"/config.json"), &p.config); err != nil {
		tb.Fatal(err)
	}
	c, err := safetensors.Open(demotest.FS(tb), dir)
	if err != nil {
		tb.Fatal(err)
	}
	for _, name := range c.Names() {
		info, _ := c.Info(name)
		raw, err := c.Raw(name)
		if err != nil {
			tb.Fatal(err)
		}
		p.tensors = append(p.tensors, safetensorstest.Tensor{Name: name, DType: string(info.DType), Shape: info.Shape, Data: raw})
	}
	return p
}

const (
	cutLayers = 2
	cutVocab  = 512
)

// cutDown is the demo's target with its first two layers and 512 tokens only,
// which is quicker to write and to read.
func cutDown(tb testing.TB) *parts {
	tb.Helper()
	p := takeApart(tb, "target")
	var kept []safetensorstest.Tensor
	for _, t := range p.tensors {
		layer := 0
		if _, err := fmt.Sscanf(t.Name, "model.layers.%d.", &layer); err == nil && layer >= cutLayers {
			continue
		}
		if t.Name == "model.embed_tokens.weight" {
			t.Shape, t.Data = []int{cutVocab, t.Shape[1]}, t.Data[:2*cutVocab*t.Shape[1]]
		}
		kept = append(kept, t)
	}
	p.tensors = kept
	p.config["num_hidden_layers"], p.config["vocab_size"] = cutLayers, cutVocab
	p.config["layer_types"] = p.config["layer_types"].([]any)[:cutLayers]
	return p
}

// The rows that pad a vocabulary are no tokens: they are in no argmax and no
// softmax, however large.
func TestAVocabularyMayBePadded(t *testing.T) {
	plain := cutDown(t)
	m, err := target.Open(plain.whole(t), "m", device(t))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	wide := cutDown(t)
	embed := wide.find("model.embed_tokens.weight")
	embed.Shape = []int{cutVocab + 4, embed.Shape[1]}
	embed.Data = append(slices.Clone(embed.Data), bytes.Repeat([]byte{0x80, 0x42}, 4*embed.Shape[1])...) // 64
	padded, err := target.Open(wide.whole(t), "m", device(t))
	if err != nil {
		t.Fatal(err)
	}
	defer padded.Close()
	if a, b := m.Head(), padded.Head(); a.Rows != cutVocab || b.Rows != cutVocab || padded.Config().Vocab != cutVocab {
		t.Errorf("heads of %d and %d rows", a.Rows, b.Rows)
	}
	embed.Shape[0] = cutVocab + 1025
	embed.Data = make([]byte, 2*embed.Shape[0]*embed.Shape[1])
	if _, err := target.Open(wide.whole(t), "m", device(t)); err == nil || !strings.Contains(err.Error(), "config.json asks for") {
		t.Errorf("another vocabulary: %v", err)
	}
}

// someIDs are n ids of the cut model.
func someIDs(n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(i * 37 % cutVocab)
	}
	return ids
}

func (p *parts) find(name string) *safetensorstest.Tensor {
	for i := range p.tensors {
		if p.tensors[i].Name == name {
			return &p.tensors[i]
		}
	}
	return nil
}

func (p *parts) remove(name string) {
	var kept []safetensorstest.Tensor
	for _, t := range p.tensors {
		if t.Name != name {
			kept = append(kept, t)
		}
	}
	p.tensors = kept
}

// untie gives the model a head of its own, equal to its embedding.
func (p *parts) untie() {
	head := *p.find("model.embed_tokens.weight")
	head.Name = "lm_head.weight"
	p.tensors = append(p.tensors, head)
	p.config["tie_word_embeddings"] = false
}

// convert rewrites every tensor in another dtype, value by value.
func (p *parts) convert(dtype string, f func(v float32) []byte) {
	for i := range p.tensors {
		t := &p.tensors[i]
		var data []byte
		for _, v := range schemas.BF16.AppendFloats(nil, t.Data) {
			data = append(data, f(v)...)
		}
		t.DType, t.Data = dtype, data
	}
}

// whole writes the parts as one file, sharded as many.
func (p *parts) whole(tb testing.TB) fstest.MapFS {
	tb.Helper()
	return fstest.MapFS{"m/config.json": {Data: p.json(tb)}, "m/model.safetensors": {Data: safetensorstest.File(p.tensors...)}}
}

func (p *parts) sharded(tb testing.TB, n int) fs.FS {
	tb.Helper()
	fsys := fstest.MapFS{"m/config.json": {Data: p.json(tb)}}
	index := map[string]string{}
	for i := range n {
		name := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, n)
		var mine []safetensorstest.Tensor
		for j, t := range p.tensors {
			if j%n == i {
				mine = append(mine, t)
				index[t.Name] = name
			}
		}
		fsys["m/"+name] = &fstest.MapFile{Data: safetensorstest.File(mine...)}
	}
	data, err := json.Marshal(map[string]any{"weight_map": index})
	if err != nil {
		tb.Fatal(err)
	}
	fsys["m/model.safetensors.index.json"] = &fstest.MapFile{Data: data}
	return fsys
}

func (p *parts) json(tb testing.TB) []byte {
	tb.Helper()
	data, err := json.Marshal(p.config)
	if err != nil {
		tb.Fatal(err)
	}
	return data
}

// halfBits is v as an IEEE half; v must be one, as bf16 values within its
// normal range are.
func halfBits(v float32) uint16 {
	bits := math.Float32bits(v)
	if bits<<1 == 0 {
		return uint16(bits >> 16)
	}
	return uint16(bits>>16&0x8000) | uint16(bits>>23&0xff-127+15)<<10 | uint16(bits>>13&0x3ff)
}

// inHalf is v, or 0 where a half would be subnormal.
func inHalf(v float32) float32 {
	if math.Abs(float64(v)) < 0x1p-14 {
		return 0
	}
	return v
}

// TestOtherFilesOfTheSameWeightsRunTheSame compares all states and the head,
// bit for bit.
func TestOtherFilesOfTheSameWeightsRunTheSame(t *testing.T) {
	ids := someIDs(40)
	f32 := func(v float32) []byte { return binary.LittleEndian.AppendUint32(nil, math.Float32bits(v)) }
	run := func(fsys fs.FS) (states [][]float32, lse []float32) {
		m := open(t, fsys, "m")
		states = forward(t, m, ids, len(ids))
		_, res := head(t, m, states[len(states)-1])
		return states, res.LSE
	}
	want, wantLSE := run(cutDown(t).whole(t))
	halves := cutDown(t)
	halves.convert("F32", func(v float32) []byte { return f32(inHalf(v)) })
	wantHalf, wantHalfLSE := run(halves.whole(t))
	for _, tc := range []struct {
		name  string
		build func(p *parts) fs.FS
		half  bool
	}{
		{"three shards", func(p *parts) fs.FS { return p.sharded(t, 3) }, false},
		{"an untied head", func(p *parts) fs.FS { p.untie(); return p.whole(t) }, false},
		{"a tied head that the file holds too", func(p *parts) fs.FS { p.untie(); p.config["tie_word_embeddings"] = true; return p.whole(t) }, false},
		{"F32", func(p *parts) fs.FS { p.convert("F32", f32); return p.whole(t) }, false},
		{"F16", func(p *parts) fs.FS {
			p.convert("F16", func(v float32) []byte { return binary.LittleEndian.AppendUint16(nil, halfBits(inHalf(v))) })
			return p.whole(t)
		}, true},
		{"layers of the draft and the eye beside it", func(p *parts) fs.FS {
			p.tensors = append(p.tensors, safetensorstest.F32("mtp.norm.weight", []float32{1}, 1), safetensorstest.F32("model.visual.x", []float32{1}, 1))
			return p.whole(t)
		}, false},
		{"no layer_types, rope_theta at the top", func(p *parts) fs.FS {
			delete(p.config, "layer_types")
			delete(p.config, "rope_parameters")
			return p.whole(t)
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, lse := run(tc.build(cutDown(t)))
			ref, refLSE := want, wantLSE
			if tc.half {
				ref, refLSE = wantHalf, wantHalfLSE
			}
			for c := range ref {
				if at := bitsEqual(got[c], ref[c]); at >= 0 {
					t.Errorf("state %d differs at row %d", c, at/256)
				}
			}
			if at := bitsEqual(lse, refLSE); at >= 0 {
				t.Errorf("logsumexp differs at row %d", at)
			}
		})
	}
}

func TestAMultimodalHybridRunsTheSame(t *testing.T) {
	ids := integers(t, golden(t, "hybrid/golden.safetensors"), "input_ids")[:30]
	want := forward(t, open(t, demotest.FS(t), "hybrid"), ids, len(ids))
	p := takeApart(t, "hybrid")
	for i := range p.tensors {
		if rest, ok := strings.CutPrefix(p.tensors[i].Name, "model."); ok {
			p.tensors[i].Name = "model.language_model." + rest
		}
	}
	delete(p.config, "layer_types") // every fourth layer attends by default
	delete(p.config, "architectures")
	p.config = map[string]any{"architectures": []string{"Qwen3_5ForConditionalGeneration"}, "text_config": p.config}
	got := forward(t, open(t, p.whole(t), "m"), ids, len(ids))
	for c := range want {
		if at := bitsEqual(got[c], want[c]); at >= 0 {
			t.Errorf("state %d differs at row %d", c, at/128)
		}
	}
}

// TestASlidingWindowSeesItsLastPositionsOnly uses that a row which sees w
// positions is the last row of those w tokens alone: at any depth for w = 1,
// in the first layer for w = 3, where only distances enter.
func TestASlidingWindowSeesItsLastPositionsOnly(t *testing.T) {
	ids := someIDs(20)
	run := func(window int) [][]float32 {
		p := cutDown(t)
		p.config["use_sliding_window"], p.config["sliding_window"], p.config["max_window_layers"] = true, window, 0
		delete(p.config, "layer_types")
		return forward(t, open(t, p.whole(t), "m"), ids, 7)
	}
	m := open(t, cutDown(t).whole(t), "m")
	full := forward(t, m, ids, len(ids))
	one, three, wide := run(1), run(3), run(20)
	for i, id := range ids {
		alone := forward(t, m, []int32{id}, 1)
		for c := range alone {
			if at := bitsEqual(one[c][i*256:(i+1)*256], alone[c]); at >= 0 {
				t.Errorf("window 1: row %d, state %d is not that of its token alone", i, c)
			}
		}
		lo := max(0, i-2)
		three3 := forward(t, m, ids[lo:i+1], 3)[1]
		if rel, _ := relative(three[1][i*256:(i+1)*256], three3[(i-lo)*256:], 256); rel > 1e-5 {
			t.Errorf("window 3: row %d is off by %.2g", i, rel)
		}
	}
	if at := bitsEqual(wide[cutLayers], full[cutLayers]); at >= 0 {
		t.Errorf("a window of all rows differs from none at row %d", at/256)
	}
	if bitsEqual(three[cutLayers], full[cutLayers]) < 0 {
		t.Error("a window of 3 changes nothing")
	}
}

func TestModelsThatDoNotFitTheirConfigAreRefusedByName(t *testing.T) {
	set := func(key string, v any) func(*parts) { return func(p *parts) { p.config[key] = v } }
	for _, tc := range []struct {
		name, dir string
		edit      func(*parts)
		want      string
	}{
		{"another architecture", "target", set("architectures", []string{"LlamaForCausalLM"}), `architecture "LlamaForCausalLM"`},
		{"Qwen3-Next", "target", set("architectures", []string{"Qwen3NextForCausalLM"}), "Qwen3NextForCausalLM: its layers fuse"},
		{"no architecture", "target", func(p *parts) { delete(p.config, "architectures"); delete(p.config, "model_type") }, `architecture ""`},
		{"attention bias", "target", set("attention_bias", true), "attention_bias"},
		{"gelu", "target", set("hidden_act", "gelu"), `hidden_act "gelu"`},
		{"yarn", "target", set("rope_parameters", map[string]any{"rope_type": "yarn"}), `rope_type "yarn"`},
		{"older linear scaling", "target", set("rope_scaling", map[string]any{"type": "linear"}), `rope_type "linear"`},
		{"quantised", "target", set("quantization_config", map[string]any{"bits": 4}), "quantization_config"},
		{"a linear layer in Qwen3", "target", func(p *parts) { p.config["layer_types"].([]any)[1] = "linear_attention" }, `layer_types[1] "linear_attention"`},
		{"a window of unknown size", "target", func(p *parts) { p.config["layer_types"].([]any)[1] = "sliding_attention" }, "sliding_window is missing"},
		{"too few layer types", "target", set("layer_types", []string{"full_attention"}), "1 entries for 2 layers"},
		{"a million layers", "target", set("num_hidden_layers", 1_000_000), "num_hidden_layers is 1000000"},
		{"no head_dim", "target", func(p *parts) { delete(p.config, "head_dim") }, "head_dim is 0"},
		{"heads that do not divide", "target", set("num_attention_heads", 5), "do not share"},
		{"an odd rotation", "hybrid", func(p *parts) {
			p.config["rope_parameters"].(map[string]any)["partial_rotary_factor"] = 0.11
		}, "7 of 64 head dims"},
		{"a sigmoid gate", "hybrid", set("output_gate_type", "sigmoid"), `output_gate_type "sigmoid"`},
		{"no attention gate", "hybrid", set("attn_output_gate", false), "attn_output_gate"},
		{"an end outside the vocabulary", "target", set("eos_token_id", 512), "eos_token_id 512"},
		{"a missing tensor", "target", func(p *parts) { p.remove("model.layers.1.mlp.up_proj.weight") }, `"model.layers.1.mlp.up_proj.weight" is missing`},
		{"a missing head", "target", set("tie_word_embeddings", false), `"lm_head.weight" is missing`},
		{"an unknown tensor", "target", func(p *parts) {
			p.tensors = append(p.tensors, safetensorstest.F32("model.layers.0.self_attn.q_proj.bias", []float32{1}, 1))
		}, "model.layers.0.self_attn.q_proj.bias"},
		{"a layer too many", "target", set("num_hidden_layers", 1), "2 entries"},
		{"another width", "target", set("intermediate_size", 641), "has shape [640 256], config.json asks for [641 256]"},
		{"a transposed tensor", "target", func(p *parts) { p.find("model.layers.1.mlp.down_proj.weight").Shape = []int{640, 256} }, `"model.layers.1.mlp.down_proj.weight"`},
		{"integers", "target", func(p *parts) {
			norm := p.find("model.norm.weight")
			norm.DType, norm.Data = "I16", make([]byte, 512)
		}, "unsupported dtype: I16"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := takeApart(t, "hybrid")
			if tc.dir == "target" {
				p = cutDown(t)
			}
			tc.edit(p)
			_, err := target.Open(p.whole(t), "m", device(t))
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.HasPrefix(err.Error(), "opening target m: ") {
				t.Fatalf("error is %v, want one with %q", err, tc.want)
			}
			if !errors.Is(err, target.ErrModel) && !errors.Is(err, target.ErrUnsupported) && !errors.Is(err, safetensors.ErrDType) {
				t.Errorf("%v wraps no sentinel", err)
			}
		})
	}
	if _, err := target.Open(fstest.MapFS{}, "none", device(t)); !errors.Is(err, target.ErrModel) || !strings.Contains(err.Error(), "none/config.json does not exist; give") {
		t.Errorf("an empty directory: %v", err)
	}
}

func TestStopTokensComeFromBothFiles(t *testing.T) {
	fsys := cutDown(t).whole(t)
	fsys["m/generation_config.json"] = &fstest.MapFile{Data: []byte(`{"eos_token_id":[2,0]}`)}
	if got := fmt.Sprint(open(t, fsys, "m").Config().EOS); got != "[0 2]" {
		t.Errorf("stop tokens are %s", got)
	}
}

func TestFingerprintsTellModelsApart(t *testing.T) {
	a, b := cutDown(t), cutDown(t)
	b.config["rope_theta"] = 2e4
	c := cutDown(t)
	norm := c.find("model.norm.weight")
	norm.Data = append([]byte{norm.Data[0] ^ 1}, norm.Data[1:]...)
	prints := map[string]bool{}
	for _, p := range []*parts{a, b, c} {
		prints[open(t, p.whole(t), "m").Fingerprint()] = true
	}
	if len(prints) != 3 {
		t.Errorf("%d fingerprints of 3 models", len(prints))
	}
}

func FuzzConfig(f *testing.F) {
	f.Add(demotest.Read(f, "target/config.json"))
	f.Add(demotest.Read(f, "hybrid/config.json"))
	f.Add([]byte(`{"architectures":["Qwen3ForCausalLM"],"eos_token_id":[],"rope_parameters":null,"text_config":{}}`))
	file := safetensorstest.File(safetensorstest.F32("x", []float32{1}, 1))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := target.Open(fstest.MapFS{"config.json": {Data: data}, "model.safetensors": {Data: file}}, ".", device(t))
		if err == nil {
			m.Close()
			t.Error("a model without tensors opens")
		}
	})
}
