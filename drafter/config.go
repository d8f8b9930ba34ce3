package drafter

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
)

// Tap is a state that a drafter reads: state c of a token is its residual
// stream after c layers of the target. Normed asks for the target's final norm
// on top, which is what Hugging Face stores for the last state.
type Tap struct {
	State  int
	Normed bool
}

// Spec is what a DFlash checkpoint's configuration says, with every flavour's
// conventions converted to this package's.
type Spec struct {
	Hidden  int // H, the target's width
	Inter   int // width of the MLP
	Layers  int
	Heads   int
	KVHeads int
	HeadDim int
	Vocab   int
	// DraftVocab is how many of the Vocab tokens can be drafted.
	DraftVocab int

	Eps       float32
	Theta     float64
	Rotary    int // leading dims of a head that are rotated
	BlockSize int // B, the anchor's slot included
	MaskToken int32
	Taps      []Tap
	Attention []Visibility // one a layer
}

// States lists the states of the taps, in the order of the weights.
func (s Spec) States() []int {
	states := make([]int, len(s.Taps))
	for i, tap := range s.Taps {
		states[i] = tap.State
	}
	return states
}

// dims are the fields of a Transformers configuration.
type dims struct {
	VocabSize     *int            `json:"vocab_size"`
	Hidden        *int            `json:"hidden_size"`
	Inter         *int            `json:"intermediate_size"`
	Layers        *int            `json:"num_hidden_layers"`
	Heads         *int            `json:"num_attention_heads"`
	KVHeads       *int            `json:"num_key_value_heads"`
	HeadDim       *int            `json:"head_dim"`
	Eps           *float64        `json:"rms_norm_eps"`
	Theta         *float64        `json:"rope_theta"`
	Partial       *float64        `json:"partial_rotary_factor"`
	Rope          *ropeParameters `json:"rope_parameters"`
	RopeScaling   *ropeParameters `json:"rope_scaling"`
	Act           *string         `json:"hidden_act"`
	AttentionBias *bool           `json:"attention_bias"`
	LayerTypes    []string        `json:"layer_types"`
	UseSliding    *bool           `json:"use_sliding_window"`
	Sliding       *int            `json:"sliding_window"`
	MaxWindow     *int            `json:"max_window_layers"`
}

type ropeParameters struct {
	Theta   *float64 `json:"rope_theta"`
	Type    *string  `json:"rope_type"`
	Partial *float64 `json:"partial_rotary_factor"`
}

// dflashJSON is a DFlash config.json of any flavour: flat as z-lab and
// SpecForge write it, with the block size at the top or in dflash_config, or
// nested as speculators does.
type dflashJSON struct {
	dims
	BlockSize       *int  `json:"block_size"`
	NumTargetLayers *int  `json:"num_target_layers"`
	IsCausal        *bool `json:"is_causal"`
	DFlash          *struct {
		BlockSize *int   `json:"block_size"`
		MaskToken *int   `json:"mask_token_id"`
		LayerIDs  *[]int `json:"target_layer_ids"`
		Causal    *bool  `json:"causal"`
	} `json:"dflash_config"`

	Transformer       *dims  `json:"transformer_layer_config"`
	MaskToken         *int   `json:"mask_token_id"`
	AuxIDs            *[]int `json:"aux_hidden_state_layer_ids"`
	DraftVocab        *int   `json:"draft_vocab_size"`
	TargetHidden      *int   `json:"target_hidden_size"`
	SlidingNonCausal  bool   `json:"sliding_window_non_causal"`
	SampleFromAnchor  bool   `json:"sample_from_anchor"`
	SpeculatorsFamily string `json:"speculators_model_type"`
}

// The blocks of the speculators class when its file does not say.
const defaultSpeculatorsBlock = 8

// Dimensions beyond these are mistakes or attacks, not drafters.
const (
	maxDim    = 1 << 24
	maxLayers = 1 << 10
	maxBlock  = 1 << 10
)

// ParseDFlash reads the config.json of a DFlash drafter for a target of the
// given number of layers. Errors wrap [ErrConfig].
func ParseDFlash(raw []byte, targetLayers int) (Spec, error) {
	var c dflashJSON
	if err := json.Unmarshal(raw, &c); err != nil {
		return Spec{}, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	p := &configParser{}
	if c.Transformer != nil {
		return p.speculators(c, targetLayers)
	}
	return p.flat(c, targetLayers)
}

// configParser keeps the first complaint, so that fields can be read in a row.
type configParser struct{ err error }

func (p *configParser) failf(format string, args ...any) {
	if p.err == nil {
		p.err = fmt.Errorf("%w: "+format, append([]any{ErrConfig}, args...)...)
	}
}

// int reads a required whole number of lo..hi.
func (p *configParser) int(name string, v *int, lo, hi int) int {
	switch {
	case v == nil:
		p.failf("%s is missing", name)
		return lo
	case *v < lo || *v > hi:
		p.failf("%s is %d, want %d to %d", name, *v, lo, hi)
		return lo
	}
	return *v
}

// agree is the value that a and b name, which must not differ.
func (p *configParser) agree(name string, a, b *int) *int {
	if a != nil && b != nil && *a != *b {
		p.failf("%s is both %d and %d", name, *a, *b)
	}
	return first(a, b)
}

func first[T any](vs ...*T) *T {
	for _, v := range vs {
		if v != nil {
			return v
		}
	}
	return nil
}

func (p *configParser) flat(c dflashJSON, n int) (Spec, error) {
	s := p.dims(c.dims)
	block, mask, ids, causal := c.BlockSize, c.MaskToken, (*[]int)(nil), c.IsCausal
	if d := c.DFlash; d != nil {
		block = p.agree("block_size", block, d.BlockSize)
		mask = p.agree("mask_token_id", d.MaskToken, mask)
		ids = d.LayerIDs
		causal = first(causal, d.Causal)
	}
	s.BlockSize = p.int("block_size", block, 2, maxBlock)
	s.MaskToken = int32(p.int("dflash_config.mask_token_id", mask, 0, s.Vocab-1))
	if c.NumTargetLayers != nil && *c.NumTargetLayers != n {
		p.failf("num_target_layers is %d, the target has %d layers", *c.NumTargetLayers, n)
	}
	layers := defaultLayerIDs(n, s.Layers)
	if ids != nil {
		layers = *ids
	}
	for _, v := range layers {
		if v < 0 || v >= n {
			p.failf("target_layer_ids names layer %d, the target has layers 0 to %d", v, n-1)
		}
		// Layer v's output is hidden_states[v+1]; the last of those is stored
		// after the final norm.
		s.Taps = append(s.Taps, Tap{State: v + 1, Normed: v+1 == n})
	}
	p.taps(s.Taps)
	s.Attention = p.attention(c.dims, s.Layers, Visibility{Causal: true}, causal)
	s.DraftVocab = s.Vocab
	return s, p.err
}

func (p *configParser) speculators(c dflashJSON, n int) (Spec, error) {
	s := p.dims(*c.Transformer)
	block := defaultSpeculatorsBlock
	s.BlockSize = p.int("block_size", first(c.BlockSize, &block), 2, maxBlock)
	s.MaskToken = int32(p.int("mask_token_id", c.MaskToken, 0, s.Vocab-1))
	s.DraftVocab = p.int("draft_vocab_size", first(c.DraftVocab, &s.Vocab), 1, s.Vocab)
	if c.TargetHidden != nil && *c.TargetHidden != s.Hidden {
		p.failf("target_hidden_size is %d, the drafter's hidden_size %d", *c.TargetHidden, s.Hidden)
	}
	if c.SampleFromAnchor {
		p.failf("sample_from_anchor is set: slot 0 would predict too, which is not DFlash")
	}
	ids := []int{2, n / 2, n - 3}
	if c.AuxIDs != nil {
		ids = *c.AuxIDs
	}
	for _, v := range ids {
		if v < 0 || v > n {
			p.failf("aux_hidden_state_layer_ids names state %d, the target has states 0 to %d", v, n)
		}
		s.Taps = append(s.Taps, Tap{State: v})
	}
	p.taps(s.Taps)
	sliding := Visibility{Fixed: true, Causal: !c.SlidingNonCausal}
	s.Attention = p.attention(*c.Transformer, s.Layers, sliding, c.IsCausal)
	return s, p.err
}

// dims reads what every Qwen3-like configuration has.
func (p *configParser) dims(d dims) Spec {
	s := Spec{
		Hidden:  p.int("hidden_size", d.Hidden, 1, maxDim),
		Inter:   p.int("intermediate_size", d.Inter, 1, maxDim),
		Layers:  p.int("num_hidden_layers", d.Layers, 1, maxLayers),
		Heads:   p.int("num_attention_heads", d.Heads, 1, maxDim),
		Vocab:   p.int("vocab_size", d.VocabSize, 1, math.MaxInt32),
		Eps:     1e-6,
		KVHeads: p.int("num_key_value_heads", first(d.KVHeads, d.Heads), 1, maxDim),
	}
	perHead := s.Hidden / s.Heads
	s.HeadDim = p.int("head_dim", first(d.HeadDim, &perHead), 1, maxDim)
	if s.Heads%s.KVHeads != 0 {
		p.failf("num_attention_heads %d is no multiple of num_key_value_heads %d", s.Heads, s.KVHeads)
	}
	if d.Eps != nil {
		s.Eps = float32(*d.Eps)
		if !(s.Eps > 0) {
			p.failf("rms_norm_eps is %v, want above 0", *d.Eps)
		}
	}
	if d.Act != nil && *d.Act != "silu" {
		p.failf("hidden_act is %q, want silu", *d.Act)
	}
	if d.AttentionBias != nil && *d.AttentionBias {
		p.failf("attention_bias is set, which DFlash does not have")
	}
	p.rope(d, &s)
	return s
}

func (p *configParser) rope(d dims, s *Spec) {
	theta, partial := d.Theta, d.Partial
	for _, r := range []*ropeParameters{d.Rope, d.RopeScaling} {
		if r == nil {
			continue
		}
		if r.Type != nil && *r.Type != "default" {
			p.failf("rope_type is %q, want default", *r.Type)
		}
		if theta != nil && r.Theta != nil && *theta != *r.Theta {
			p.failf("rope_theta is both %v and %v", *theta, *r.Theta)
		}
		theta, partial = first(theta, r.Theta), first(partial, r.Partial)
	}
	s.Rotary = s.HeadDim
	if partial != nil {
		s.Rotary = int(float64(s.HeadDim) * *partial)
	}
	switch {
	case theta == nil:
		p.failf("rope_theta is missing")
	case !(*theta > 0) || math.IsInf(*theta, 0):
		p.failf("rope_theta is %v, want above 0", *theta)
	default:
		s.Theta = *theta
	}
	if s.Rotary < 2 || s.Rotary%2 != 0 || s.Rotary > s.HeadDim {
		p.failf("%d of the %d dims of a head are to be rotated, want an even number", s.Rotary, s.HeadDim)
	}
}

func (p *configParser) taps(taps []Tap) {
	if len(taps) == 0 {
		p.failf("the drafter reads no state of the target")
	}
	for i, tap := range taps {
		if slices.Contains(taps[:i], tap) {
			p.failf("state %d is tapped twice", tap.State)
		}
	}
}

const (
	fullAttention    = "full_attention"
	slidingAttention = "sliding_attention"
)

// attention reads each layer's rule. sliding is the flavour's rule for sliding
// layers, without its window; causal overrides causality in every layer.
func (p *configParser) attention(d dims, layers int, sliding Visibility, causal *bool) []Visibility {
	types := d.LayerTypes
	if types == nil {
		from := layers // Transformers: sliding from max_window_layers on, if at all
		if d.UseSliding != nil && *d.UseSliding && d.Sliding != nil {
			from = *first(d.MaxWindow, new(int))
		}
		for i := range layers {
			types = append(types, fullAttention)
			if i >= from {
				types[i] = slidingAttention
			}
		}
	}
	if len(types) != layers {
		p.failf("layer_types lists %d layers, num_hidden_layers is %d", len(types), layers)
		return nil
	}
	out := make([]Visibility, layers)
	for i, kind := range types {
		switch kind {
		case fullAttention:
		case slidingAttention:
			out[i] = sliding
			out[i].Window = p.int("sliding_window", d.Sliding, 1, math.MaxInt32)
		default:
			p.failf("layer %d is of type %q, want %s or %s", i, kind, fullAttention, slidingAttention)
		}
		if causal != nil {
			out[i].Causal = *causal
		}
	}
	return out
}

// defaultLayerIDs are the layers that a z-lab drafter of k layers reads when
// its file does not say: k of them from layer 1 to layer n-3, evenly spread
// and rounded half to even.
func defaultLayerIDs(n, k int) []int {
	if k == 1 {
		return []int{n / 2}
	}
	ids := make([]int, k)
	for i := range ids {
		ids[i] = int(math.RoundToEven(1 + float64(i*(n-4))/float64(k-1)))
	}
	return ids
}
