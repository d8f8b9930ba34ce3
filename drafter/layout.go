package drafter

import (
	"encoding/json"
	"fmt"
	"slices"
)

// Layout is what a checkpoint's configuration alone says of its tensors, and
// where they are not so.
type Layout struct {
	Vocab      int // the target's
	DraftVocab int
	Faults     []Misshapen
}

// Misshapen is a tensor that does not have the shape that the configuration
// says.
type Misshapen struct {
	Tensor string
	Have   []int // nil for one that is missing
	Want   []int // nil for one that the family does not have
}

// String names both shapes.
func (m Misshapen) String() string {
	switch {
	case m.Have == nil:
		return fmt.Sprintf("%s is missing; by config.json it has shape %v", m.Tensor, m.Want)
	case m.Want == nil:
		return fmt.Sprintf("%s, of shape %v, is not part of such a drafter", m.Tensor, m.Have)
	}
	return fmt.Sprintf("%s has shape %v; by config.json it has %v", m.Tensor, m.Have, m.Want)
}

// unknownDepth stands for a target's depth where the file is silent: taps
// read the same for any that is beyond them.
const unknownDepth = maxLayers

// CheckLayout holds a checkpoint's tensors against its configuration, without
// a target. Errors are those of the configuration: they wrap [ErrConfig],
// [ErrFamily] or, where two tensors bear one name, [ErrWeights].
func CheckLayout(config []byte, w Weights) (Layout, error) {
	if _, err := familyOf(config); err != nil {
		return Layout{}, err
	}
	depth := unknownDepth
	var c struct {
		Layers int `json:"num_target_layers"`
	}
	if err := json.Unmarshal(config, &c); err == nil && c.Layers != 0 {
		depth = max(c.Layers, 1)
	}
	spec, err := ParseDFlash(config, depth)
	if err != nil {
		return Layout{}, err
	}
	l, err := newLoader(w, nil)
	if err != nil {
		return Layout{}, err
	}
	out := Layout{Vocab: spec.Vocab, DraftVocab: spec.DraftVocab}
	for _, t := range spec.tensors(l, depth) {
		l.taken[t.Tensor] = true
		have, err := l.shape(t.Tensor)
		if err != nil {
			have = nil
		}
		if !slices.Equal(have, t.Want) {
			t.Have = have
			out.Faults = append(out.Faults, t)
		}
	}
	var left []string
	for name := range l.names {
		if !l.taken[name] {
			left = append(left, name)
		}
	}
	slices.Sort(left)
	for _, name := range left {
		have, _ := l.shape(name)
		out.Faults = append(out.Faults, Misshapen{Tensor: name, Have: append([]int{}, have...)})
	}
	return out, nil
}

// tensors lists what a DFlash checkpoint holds, in the order of its loading.
func (s Spec) tensors(l *loader, depth int) []Misshapen {
	var out []Misshapen
	add := func(name string, shape ...int) { out = append(out, Misshapen{Tensor: name, Want: shape}) }
	optional := func(name string, shape ...int) {
		if l.has(name) {
			add(name, shape...)
		}
	}
	h, taps := s.Hidden, len(s.entering(l, depth))
	add("fc.weight", h, taps*h)
	add("hidden_norm.weight", h)
	add("norm.weight", h)
	optional(embeddingName, s.Vocab, h)
	wide, narrow := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
	for i := range s.Layers {
		in := fmt.Sprintf("layers.%d.", i)
		add(in+"input_layernorm.weight", h)
		add(in+"post_attention_layernorm.weight", h)
		add(in+"self_attn.q_proj.weight", wide, h)
		add(in+"self_attn.k_proj.weight", narrow, h)
		add(in+"self_attn.v_proj.weight", narrow, h)
		add(in+"self_attn.o_proj.weight", h, wide)
		add(in+"self_attn.q_norm.weight", s.HeadDim)
		add(in+"self_attn.k_norm.weight", s.HeadDim)
		add(in+"mlp.gate_proj.weight", s.Inter, h)
		add(in+"mlp.up_proj.weight", s.Inter, h)
		add(in+"mlp.down_proj.weight", h, s.Inter)
	}
	optional(headName, s.DraftVocab, h)
	if s.DraftVocab != s.Vocab {
		add(d2tName, s.DraftVocab)
	} else {
		optional(d2tName, s.DraftVocab)
	}
	if l.has(d2tName) {
		optional(t2dName, s.Vocab)
	}
	return out
}

// entering are the taps that enter fc. The speculators project captures the
// final state beside the others for the target's logits; it does not enter fc.
func (s Spec) entering(l *loader, depth int) []Tap {
	n := len(s.Taps) - 1
	if last := s.Taps[n]; n == 0 || last.Normed || depth != unknownDepth && last.State != depth {
		return s.Taps
	}
	if shape, err := l.shape("fc.weight"); err != nil || !slices.Equal(shape, []int{s.Hidden, n * s.Hidden}) {
		return s.Taps
	}
	return s.Taps[:n]
}

// KindOf says what a config.json is of: the family of a drafter, run here or
// not, or for any other model the architecture that it names.
func KindOf(config []byte) (name string, isDrafter bool, err error) {
	var h header
	if err := json.Unmarshal(config, &h); err != nil {
		return "", false, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	for _, f := range families() {
		if f.claims(h) {
			return f.name, true, nil
		}
	}
	if name := absentFamily(h.kind()); name != "" {
		return name, true, nil
	}
	return h.kind(), false, nil
}
