package diagnose

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/extract/safetensors"
)

// packed are the weights of one of the drafters that testdata/trained/train.py
// made: NAME/TENSOR in codes of 8 bits or 4, with a scale for 64 weights.
type packed struct {
	file *safetensors.Checkpoint
	name string
}

// trainedDrafters opens a file of train.py and lists its drafters.
func trainedDrafters(t *testing.T, path string) (*safetensors.Checkpoint, []string) {
	t.Helper()
	dir, file := ".", path
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		dir, file = path[:i], path[i+1:]
	}
	c, err := safetensors.OpenFile(os.DirFS(dir), file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	var names []string
	for _, tensor := range c.Names() {
		name, _, _ := strings.Cut(tensor, "/")
		names = append(names, name)
	}
	slices.Sort(names)
	return c, slices.Compact(names)
}

func (p packed) Names() []string {
	var out []string
	for _, tensor := range p.file.Names() {
		if own, ok := strings.CutPrefix(tensor, p.name+"/"); ok && !strings.HasSuffix(own, ".scale") {
			out = append(out, own)
		}
	}
	return out
}

func (p packed) Shape(name string) ([]int, bool) {
	own := p.name + "/" + name
	info, ok := p.file.Info(own)
	if shape, scaled := p.file.Shape(own + ".scale"); scaled {
		return []int{shape[0], 64 * shape[1]}, ok
	}
	return info.Shape, ok
}

func (p packed) Ints(name string) ([]int64, error) { return p.file.Ints(p.name + "/" + name) }

func (p packed) Float32s(name string) ([]float32, error) {
	own := p.name + "/" + name
	if _, scaled := p.file.Info(own + ".scale"); !scaled {
		return p.file.Float32s(own)
	}
	codes, err := p.file.Ints(own)
	if err != nil {
		return nil, err
	}
	scales, err := p.file.Float32s(own + ".scale")
	if err != nil {
		return nil, err
	}
	if len(codes) == 32*len(scales) { // two codes a byte, low first
		pairs := codes
		codes = make([]int64, 0, 2*len(pairs))
		for _, c := range pairs {
			codes = append(codes, c&15-8, c>>4-8)
		}
	}
	if len(codes) != 64*len(scales) {
		return nil, fmt.Errorf("%s has %d codes and %d scales", own, len(codes), len(scales))
	}
	out := make([]float32, len(codes))
	for i, c := range codes {
		out[i] = float32(c) * scales[i/64]
	}
	return out, nil
}

// checkpoint is the drafter with the configuration that it declares.
func (p packed) checkpoint(t *testing.T) Checkpoint {
	t.Helper()
	shape := func(name string) []int {
		s, ok := p.Shape(name)
		if !ok {
			t.Fatalf("%s has no %s", p.name, name)
		}
		return s
	}
	layers := 0
	for _, name := range p.Names() {
		if strings.HasSuffix(name, "input_layernorm.weight") {
			layers++
		}
	}
	ids := map[int][]int{2: {1, 5}, 4: {1, 3, 4, 5}}[shape("fc.weight")[1]/256]
	switch p.name {
	case "healthy-othertaps":
		ids = []int{0, 2, 4, 6}
	case "finalnorm":
		ids = []int{1, 3, 5, 7}
	}
	config, err := json.Marshal(map[string]any{
		"architectures": []string{"DFlashDraftModel"}, "vocab_size": 4096, "hidden_size": 256, "hidden_act": "silu",
		"intermediate_size": shape("layers.0.mlp.up_proj.weight")[0], "num_hidden_layers": layers,
		"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": shape("layers.0.self_attn.q_norm.weight")[0],
		"rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_target_layers": 8, "block_size": 16,
		"dflash_config": map[string]any{"mask_token_id": 3, "target_layer_ids": ids},
	})
	if err != nil {
		t.Fatal(err)
	}
	return Checkpoint{Name: p.name, Config: config, Weights: p}
}

// What train.py's small drafters must be told to be, from the target and text
// alone. Their configuration is that of a healthy one.
func TestDraftersAreNamedForWhatTheyWereTrainedWith(t *testing.T) {
	file, names := trainedDrafters(t, "testdata/trained/small.safetensors")
	want := map[string]string{
		"leak": "anchor-leak", "slot0": "slot-0", "offset+1": "rope-offset", "offset-1": "rope-offset",
		"late": "tap-late", "soon": "tap-late", "label-1": keyShift, "healthy": "", "healthy-quarter": "",
	}
	if len(names) != len(want) {
		t.Fatalf("drafters %v", names)
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			c := families(demoCase(t, "good"), "anchor-leak", "slot-0", "rope-offset", "tap-late", "context-end", "window", "causality")
			c.Drafter = packed{file, name}.checkpoint(t)
			r := examine(t, c, probeDrafter)
			if want[name] == "" {
				wantSilence(t, r)
				return
			}
			wantFirst(t, r, want[name], Confirmed)
		})
	}
}
