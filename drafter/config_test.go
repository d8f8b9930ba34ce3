package drafter_test

import (
	"encoding/json"
	"errors"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/drafter"
)

// qwen36 is the configuration of the Qwen3.6-27B drafter, as SpecForge has it.
const qwen36 = `{
	"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": 248320,
	"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32,
	"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000000,
	"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
	"use_sliding_window": true, "sliding_window": 2048, "num_target_layers": 64, "block_size": 16,
	"dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]}}`

// speculators is the same drafter as the speculators project would store it.
const speculators = `{
	"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 16,
	"mask_token_id": 248070, "aux_hidden_state_layer_ids": [2, 17, 32, 47, 62], "draft_vocab_size": 248320,
	"target_hidden_size": 5120, "transformer_layer_config": {
		"model_type": "qwen3", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
		"num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
		"rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}, "sliding_window": 2048,
		"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]}}`

func taps(states ...int) []drafter.Tap {
	var out []drafter.Tap
	for _, s := range states {
		out = append(out, drafter.Tap{State: s})
	}
	return out
}

// edit sets fields of a configuration; nil deletes one. A key a.b is in a.
func edit(t testing.TB, config string, set map[string]any) []byte {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal([]byte(config), &m); err != nil {
		t.Fatal(err)
	}
	for key, v := range set {
		at := m
		if outer, inner, ok := strings.Cut(key, "."); ok {
			at, key = m[outer].(map[string]any), inner
		}
		if v == nil {
			delete(at, key)
		} else {
			at[key] = v
		}
	}
	raw, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestEveryFlavourOfConfigurationMeansTheSame(t *testing.T) {
	moving := drafter.Visibility{Window: 2048, Causal: true}
	fixed := drafter.Visibility{Window: 2048, Fixed: true, Causal: true}
	spec := func(layer drafter.Visibility, states ...int) drafter.Spec {
		return drafter.Spec{
			Hidden: 5120, Inter: 17408, Layers: 5, Heads: 32, KVHeads: 8, HeadDim: 128, Vocab: 248320, DraftVocab: 248320,
			Eps: 1e-6, Theta: 1e7, Rotary: 128, BlockSize: 16, MaskToken: 248070, Taps: taps(states...),
			Attention: []drafter.Visibility{layer, layer, layer, layer, {}},
		}
	}
	flat := spec(moving, 2, 17, 32, 47, 62)
	change := func(s drafter.Spec, f func(*drafter.Spec)) drafter.Spec {
		s.Attention = slices.Clone(s.Attention)
		f(&s)
		return s
	}
	for _, tt := range []struct {
		name string
		raw  []byte
		want drafter.Spec
	}{
		{"flat", []byte(qwen36), flat},
		{"flat, block size inside", edit(t, qwen36, map[string]any{"block_size": nil, "dflash_config.block_size": 16}), flat},
		{"flat, default layers", edit(t, qwen36, map[string]any{"dflash_config.target_layer_ids": nil}), flat},
		{"flat, one default layer", edit(t, qwen36, map[string]any{
			"dflash_config.target_layer_ids": nil, "num_hidden_layers": 1, "layer_types": []string{"full_attention"},
		}), change(flat, func(s *drafter.Spec) {
			s.Layers, s.Taps, s.Attention = 1, taps(33), []drafter.Visibility{{}}
		})},
		{
			"flat, the last layer is stored normed", edit(t, qwen36, map[string]any{"dflash_config.target_layer_ids": []int{1, 63}}),
			change(flat, func(s *drafter.Spec) { s.Taps = []drafter.Tap{{State: 2}, {State: 64, Normed: true}} }),
		},
		{
			"flat, without layer types", edit(t, qwen36, map[string]any{"layer_types": nil, "use_sliding_window": false}),
			change(flat, func(s *drafter.Spec) { s.Attention = make([]drafter.Visibility, 5) }),
		},
		{
			"flat, sliding from a layer on", edit(t, qwen36, map[string]any{"layer_types": nil, "max_window_layers": 4}),
			change(flat, func(s *drafter.Spec) { s.Attention = []drafter.Visibility{{}, {}, {}, {}, moving} }),
		},
		{
			"flat, causal everywhere", edit(t, qwen36, map[string]any{"is_causal": true}),
			change(flat, func(s *drafter.Spec) { s.Attention[4].Causal = true }),
		},
		{
			"flat, causal nowhere", edit(t, qwen36, map[string]any{"dflash_config.causal": false}),
			change(flat, func(s *drafter.Spec) {
				for i := range 4 {
					s.Attention[i].Causal = false
				}
			}),
		},
		{"speculators", []byte(speculators), spec(fixed, 2, 17, 32, 47, 62)},
		{
			"speculators, not causal", edit(t, speculators, map[string]any{"sliding_window_non_causal": true}),
			spec(drafter.Visibility{Window: 2048, Fixed: true}, 2, 17, 32, 47, 62),
		},
		{
			"speculators, defaults", edit(t, speculators, map[string]any{"aux_hidden_state_layer_ids": nil, "block_size": nil}),
			change(spec(fixed, 2, 32, 61), func(s *drafter.Spec) { s.BlockSize = 8 }),
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := drafter.ParseDFlash(tt.raw, 64)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

func TestWrongConfigurationsAreRefusedByField(t *testing.T) {
	for _, tt := range []struct {
		name   string
		config string
		set    map[string]any
		want   string
	}{
		{"no mask token", qwen36, map[string]any{"dflash_config.mask_token_id": nil}, "mask_token_id is missing"},
		{"mask token past the vocabulary", qwen36, map[string]any{"dflash_config.mask_token_id": 248320}, "mask_token_id is 248320"},
		{"two block sizes", qwen36, map[string]any{"dflash_config.block_size": 8}, "block_size is both 16 and 8"},
		{"no block size", qwen36, map[string]any{"block_size": nil}, "block_size is missing"},
		{"a block of one", qwen36, map[string]any{"block_size": 1}, "block_size is 1, want 2"},
		{"a layer that the target lacks", qwen36, map[string]any{"dflash_config.target_layer_ids": []int{1, 64}}, "target_layer_ids names layer 64, the target has layers 0 to 63"},
		{"a layer twice", qwen36, map[string]any{"dflash_config.target_layer_ids": []int{1, 1}}, "state 2 is tapped twice"},
		{"no layers", qwen36, map[string]any{"dflash_config.target_layer_ids": []int{}}, "reads no state"},
		{"a deeper target", qwen36, map[string]any{"num_target_layers": 36}, "num_target_layers is 36, the target has 64"},
		{"an odd layer type", qwen36, map[string]any{"layer_types": []string{"full_attention", "full_attention", "full_attention", "full_attention", "linear_attention"}}, `layer 4 is of type "linear_attention"`},
		{"too few layer types", qwen36, map[string]any{"layer_types": []string{"full_attention"}}, "layer_types lists 1 layers"},
		{"sliding without a window", qwen36, map[string]any{"sliding_window": nil}, "sliding_window is missing"},
		{"uneven heads", qwen36, map[string]any{"num_key_value_heads": 5}, "32 is no multiple"},
		{"no theta", qwen36, map[string]any{"rope_theta": nil}, "rope_theta is missing"},
		{"scaled rope", qwen36, map[string]any{"rope_scaling": map[string]any{"rope_type": "yarn"}}, `rope_type is "yarn"`},
		{"two thetas", qwen36, map[string]any{"rope_parameters": map[string]any{"rope_theta": 1e4}}, "rope_theta is both 1e+07 and 10000"},
		{"another activation", qwen36, map[string]any{"hidden_act": "gelu"}, `hidden_act is "gelu"`},
		{"biases", qwen36, map[string]any{"attention_bias": true}, "attention_bias"},
		{"no width", qwen36, map[string]any{"hidden_size": 0}, "hidden_size is 0"},
		{"a monstrous width", qwen36, map[string]any{"intermediate_size": 1 << 40}, "intermediate_size is"},
		{"more draft tokens than tokens", speculators, map[string]any{"draft_vocab_size": 1 << 30}, "draft_vocab_size is 1073741824, want 1 to"},
		{"slot 0 predicts", speculators, map[string]any{"sample_from_anchor": true}, "sample_from_anchor"},
		{"another target width", speculators, map[string]any{"target_hidden_size": 4096}, "target_hidden_size is 4096"},
		{"a state that the target lacks", speculators, map[string]any{"aux_hidden_state_layer_ids": []int{2, 65}}, "names state 65, the target has states 0 to 64"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := drafter.ParseDFlash(edit(t, tt.config, tt.set), 64)
			if !errors.Is(err, drafter.ErrConfig) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func FuzzParseDFlash(f *testing.F) {
	f.Add([]byte(qwen36), 64)
	f.Add([]byte(speculators), 64)
	f.Add([]byte(`{"hidden_size":1,"transformer_layer_config":{}}`), 1)
	f.Fuzz(func(t *testing.T, raw []byte, layers int) {
		s, err := drafter.ParseDFlash(raw, layers)
		if err != nil {
			if !errors.Is(err, drafter.ErrConfig) {
				t.Errorf("unnamed error %v", err)
			}
			return
		}
		if len(s.Taps) == 0 || len(s.Attention) != s.Layers || s.BlockSize < 2 || s.Heads%s.KVHeads != 0 || s.Rotary > s.HeadDim {
			t.Errorf("accepted %+v", s)
		}
		for _, tap := range s.Taps {
			if tap.State < 0 || tap.State > layers {
				t.Errorf("accepted state %d of %d", tap.State, layers)
			}
		}
	})
}

// changed is a checkpoint with some tensors replaced, added or (nil) removed.
type changed struct {
	drafter.Weights
	set map[string]*tensor
}

func (c changed) Names() []string {
	var names []string
	for _, n := range c.Weights.Names() {
		if _, ok := c.set[n]; !ok {
			names = append(names, n)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(c.set)) {
		if c.set[n] != nil {
			names = append(names, n)
		}
	}
	return names
}

func (c changed) Shape(name string) ([]int, bool) {
	if t, ok := c.set[name]; ok {
		return t.shape, true
	}
	return c.Weights.Shape(name)
}

func (c changed) Ints(name string) ([]int64, error) {
	if t, ok := c.set[name]; ok {
		out := make([]int64, len(t.i))
		for i, v := range t.i {
			out[i] = int64(v)
		}
		return out, nil
	}
	return c.Weights.Ints(name)
}

func (c changed) Float32s(name string) ([]float32, error) {
	if t, ok := c.set[name]; ok {
		return t.f, nil
	}
	return c.Weights.Float32s(name)
}

func filled(v float32, shape ...int) *tensor {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return &tensor{shape: shape, f: slices.Repeat([]float32{v}, n)}
}

func TestWrongCheckpointsAreRefusedByName(t *testing.T) {
	w := newWorld(t)
	config := string(demotest.Read(t, "drafters/good/config.json"))
	nan := filled(1, 256)
	nan.f[7] = float32(math.Inf(1))
	for _, tt := range []struct {
		name string
		set  map[string]any     // of the configuration
		w    map[string]*tensor // of the weights
		is   error
		want string
	}{
		{"a missing tensor", nil, map[string]*tensor{"layers.1.mlp.up_proj.weight": nil}, drafter.ErrWeights, "layers.1.mlp.up_proj.weight is missing"},
		{"no fc", nil, map[string]*tensor{"fc.weight": nil}, drafter.ErrWeights, "fc.weight is missing"},
		{"an unknown tensor", nil, map[string]*tensor{"layers.0.self_attn.gate.weight": filled(0, 1)}, drafter.ErrWeights, "unknown tensors layers.0.self_attn.gate.weight"},
		{"a layer too many", map[string]any{"num_hidden_layers": 1, "layer_types": []string{"full_attention"}}, nil, drafter.ErrWeights, "unknown tensors layers.1.input_layernorm.weight"},
		{"a wrong shape", nil, map[string]*tensor{"layers.0.self_attn.k_proj.weight": filled(0, 256, 256)}, drafter.ErrWeights, "layers.0.self_attn.k_proj.weight has shape [256 256], want [128 256]"},
		{"a vector for a matrix", nil, map[string]*tensor{"norm.weight": filled(0, 1, 256)}, drafter.ErrWeights, "norm.weight has shape [1 256], want [256]"},
		{"Inf in a tensor", nil, map[string]*tensor{"norm.weight": nan}, drafter.ErrWeights, "norm.weight holds +Inf at value 7"},
		{"fc of another number of taps", map[string]any{"dflash_config.target_layer_ids": []int{1, 3, 5}}, nil, drafter.ErrWeights, "fc.weight has 1024 inputs, which is 4 states of 256; the configuration names 3 ([2 4 6])"},
		{"a map of another vocabulary", nil, map[string]*tensor{"d2t": filled(0, 4)}, drafter.ErrWeights, "d2t has shape [4], want [4096]"},
		{"a name twice", nil, map[string]*tensor{"model.norm.weight": filled(1, 256)}, drafter.ErrWeights, "both"},
		{"another vocabulary", map[string]any{"vocab_size": 5000}, nil, drafter.ErrConfig, "vocab_size is 5000, the target's 4096"},
		{"another width", map[string]any{"hidden_size": 512}, nil, drafter.ErrConfig, "hidden_size is 512, the target's 256"},
		{"a layer that the target lacks", map[string]any{"dflash_config.target_layer_ids": []int{1, 3, 5, 8}}, nil, drafter.ErrConfig, "target_layer_ids names layer 8"},
		{"DFlash2", map[string]any{"architectures": []string{"DFlash2DraftModel"}}, nil, drafter.ErrFamily, "DFlash2"},
		{"DSpark", map[string]any{"speculators_model_type": "dspark"}, nil, drafter.ErrFamily, "DSpark"},
		{"EAGLE-3", map[string]any{"architectures": []string{"LlamaForCausalLMEagle3"}}, nil, drafter.ErrFamily, "EAGLE-3"},
		{"MTP", map[string]any{"speculators_model_type": "mtp"}, nil, drafter.ErrFamily, "MTP"},
		{"a plain model", map[string]any{"architectures": []string{"Qwen3ForCausalLM"}}, nil, drafter.ErrFamily, `"Qwen3ForCausalLM"; this program runs DFlash`},
		{"nameless", map[string]any{"architectures": nil, "model_type": nil}, nil, drafter.ErrConfig, "names no architecture"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := drafter.Open("mine", edit(t, config, tt.set), changed{checkpoint(t, "drafters/good"), tt.w}, w.host, w.dev)
			if !errors.Is(err, tt.is) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "opening drafter mine") {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
	if _, err := drafter.Open("mine", []byte("{"), checkpoint(t, "drafters/good"), w.host, w.dev); !errors.Is(err, drafter.ErrConfig) {
		t.Errorf("broken JSON: %v", err)
	}
}
