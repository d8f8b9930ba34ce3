package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/extract/safetensors/safetensorstest"
)

// tinyDrafter writes a drafter of one layer, width 4, for a target of 4096
// tokens of which it drafts 8; change may alter its tensors.
func tinyDrafter(t *testing.T, hidden int, change func(tensors map[string]*safetensorstest.Tensor)) string {
	t.Helper()
	dir := t.TempDir()
	config := fmt.Sprintf(`{"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 4, "mask_token_id": 3,
		"draft_vocab_size": 8, "aux_hidden_state_layer_ids": [1, 2], "transformer_layer_config": {"vocab_size": 4096, "hidden_size": %d,
		"intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 2, "rope_theta": 10000.0}}`, hidden)
	tensors := map[string]*safetensorstest.Tensor{}
	var order []string
	add := func(x safetensorstest.Tensor) { tensors[x.Name], order = &x, append(order, x.Name) }
	floats := func(name string, shape ...int) {
		n := 1
		for _, d := range shape {
			n *= d
		}
		vals := make([]float32, n)
		for i := range vals {
			vals[i] = float32(i%7) - 2.5
		}
		add(safetensorstest.F32(name, vals, shape...))
	}
	floats("fc.weight", 4, 8)
	for _, name := range []string{"hidden_norm.weight", "norm.weight", "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"} {
		floats(name, 4)
	}
	for _, name := range []string{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"} {
		floats("layers.0."+name+".weight", 4, 4)
	}
	floats("layers.0.self_attn.q_norm.weight", 2)
	floats("layers.0.self_attn.k_norm.weight", 2)
	floats("lm_head.weight", 8, 4)
	add(offsets(1, 1, 1, 1, 1, 1, 1, 1))
	if change != nil {
		change(tensors)
	}
	var list []safetensorstest.Tensor
	for _, name := range order {
		list = append(list, *tensors[name])
	}
	if t2d := tensors["t2d"]; t2d != nil {
		list = append(list, *t2d)
	}
	for name, content := range map[string][]byte{"config.json": []byte(config), "model.safetensors": safetensorstest.File(list...)} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// offsets is a d2t.
func offsets(vals ...int64) safetensorstest.Tensor {
	x := safetensorstest.Tensor{Name: "d2t", DType: "I64", Shape: []int{len(vals)}}
	for _, v := range vals {
		x.Data = binary.LittleEndian.AppendUint64(x.Data, uint64(v))
	}
	return x
}

func withOffsets(vals ...int64) func(map[string]*safetensorstest.Tensor) {
	return func(tensors map[string]*safetensorstest.Tensor) { *tensors["d2t"] = offsets(vals...) }
}

// withT2D adds a t2d that marks tokens.
func withT2D(change func(map[string]*safetensorstest.Tensor), tokens ...int64) func(map[string]*safetensorstest.Tensor) {
	return func(tensors map[string]*safetensorstest.Tensor) {
		change(tensors)
		marks := make([]int64, 4096)
		for _, id := range tokens {
			marks[id] = 1
		}
		x := whole("t2d", marks)
		tensors["t2d"] = &x
	}
}

func TestADraftersWeightsAreHeldAgainstItsConfig(t *testing.T) {
	for name, tt := range map[string]struct {
		dir  string
		args []string
		code int
		want []string
	}{
		"good":              {tinyDrafter(t, 4, nil), []string{"--strict"}, exitOK, []string{"1 samples checked, 0 faulty, 0 faults, 0 warnings"}},
		"another width":     {tinyDrafter(t, 8, nil), nil, exitUsage, []string{"model.safetensors, sample fc.weight, K6: fc.weight has shape [4 8]; by config.json it has [8 16]", "1 samples checked, 1 faulty"}},
		"a short d2t":       {tinyDrafter(t, 4, withOffsets(1, 1)), nil, exitUsage, []string{"sample d2t, K6: d2t has shape [2]; by config.json it has [8]"}},
		"past the target":   {tinyDrafter(t, 4, withOffsets(1, 1, 1, 1, 1, 5000, 1, 1)), nil, exitUsage, []string{"model.safetensors, sample d2t, row 5, K11: 5000: draft token 5 stands for 5005, outside the target's vocabulary of 4096"}},
		"twice the same":    {tinyDrafter(t, 4, withOffsets(1, 1, 0, 1, 1, 1, 1, 1)), []string{"--target", "demo"}, exitUsage, []string{"sample d2t, row 2, K11: 0: draft tokens 1 and 2 stand for the same token 2"}},
		"absolute":          {tinyDrafter(t, 4, withOffsets(1, 3, 4, 8, 9, 20, 30, 4090)), nil, exitUsage, []string{"row 7, K11: 4090: draft token 7 stands for 4097, outside the target's vocabulary of 4096; it holds tokens, where offsets belong"}},
		"0, 1, 2":           {tinyDrafter(t, 4, withT2D(withOffsets(0, 1, 2, 3, 4, 5, 6, 7), 0, 1, 2, 3, 4, 5, 6, 7)), nil, exitUsage, []string{"row 1, K11: t2d marks token 1, for which no draft token stands; it holds tokens, where offsets belong"}},
		"a bit of t2d gone": {tinyDrafter(t, 4, withT2D(withOffsets(0, 0, 0, 0, 0, 0, 0, 0), 0, 1, 2, 3, 4, 5, 6)), nil, exitUsage, []string{"K11: t2d marks 7 tokens, the draft vocabulary has 8"}},
		"a narrow head": {tinyDrafter(t, 4, func(tensors map[string]*safetensorstest.Tensor) {
			head := tensors["lm_head.weight"]
			head.Shape, head.Data = []int{7, 4}, head.Data[:7*4*4]
		}), nil, exitUsage, []string{"K6: lm_head.weight has shape [7 4]; by config.json it has [8 4]"}},
		"another target's": {tinyDrafter(t, 4, nil), []string{"--target", "demo"}, exitUsage, []string{"K12: opening drafter"}},
	} {
		var stdout, stderr strings.Builder
		code := run(t.Context(), append([]string{"validate", tt.dir}, tt.args...), &stdout, &stderr)
		if code != tt.code {
			t.Errorf("%s: exit %d, want %d: %s", name, code, tt.code, &stderr)
		}
		for _, want := range tt.want {
			if !strings.Contains(stdout.String(), want) {
				t.Errorf("%s: no %q in\n%s", name, want, &stdout)
			}
		}
	}
}

func TestFoldersOfWeightsAreComparedAndTheirFaultsNamed(t *testing.T) {
	withNaN := func(tensors map[string]*safetensorstest.Tensor) { // row 1, column 1
		binary.LittleEndian.PutUint32(tensors["fc.weight"].Data[4*9:], math.Float32bits(float32(math.NaN())))
	}
	withZeros := func(tensors map[string]*safetensorstest.Tensor) { clear(tensors["fc.weight"].Data) }
	good, target := tinyDrafter(t, 4, nil), t.TempDir()
	if err := os.CopyFS(target, os.DirFS(good)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(target, "config.json"), []byte(`{"architectures": ["Qwen3ForCausalLM"]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		b    string
		code int
		want string // of stdout and stderr
		not  string
	}{
		"equal":           {tinyDrafter(t, 4, nil), exitOK, "equal", "FAULT"},
		"another d2t":     {tinyDrafter(t, 4, withOffsets(1, 1, 1, 1, 1, 1, 2, 3)), exitOK, "2 of 8 entries differ", "I64"},
		"not finite":      {tinyDrafter(t, 4, withNaN), exitPartial, "fc.weight: 1 of 32 values are not finite, the first NaN at [1 1]: not compared", "tap 1"},
		"zeros":           {tinyDrafter(t, 4, withZeros), exitOK, "all zero on one side", "NaN"},
		"another width":   {tinyDrafter(t, 8, nil), exitPartial, "fc.weight has shape [4 8]; by config.json it has [8 16]", "NaN"},
		"a target, Qwen3": {target, exitUsage, `is a drafter, DFlash, and ` + target + ` is a model of architecture "Qwen3ForCausalLM": compare two of a kind`, "cosine"},
	} {
		var both strings.Builder
		if code := run(t.Context(), []string{"compare", good, tt.b}, &both, &both); code != tt.code || !strings.Contains(both.String(), tt.want) || strings.Contains(both.String(), tt.not) {
			t.Errorf("%s: exit %d, want %d and %q, not %q:\n%s", name, code, tt.code, tt.want, tt.not, &both)
		}
		var stdout, stderr strings.Builder
		if code := run(t.Context(), []string{"compare", good, tt.b, "--json"}, &stdout, &stderr); code != tt.code || tt.code != exitUsage && !json.Valid([]byte(stdout.String())) {
			t.Errorf("%s: exit %d with --json, want %d: %s", name, code, tt.code, &stderr)
		}
	}
}
