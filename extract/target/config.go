package target

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// Family names the code that runs a target.
type Family string

// The families.
const (
	Qwen3  Family = "qwen3"   // dense, grouped queries, q/k norm
	Qwen35 Family = "qwen3_5" // gated DeltaNet and gated attention, hybrid
)

// Config is what config.json says about a target.
type Config struct {
	Family       Family
	Hidden       int // width H of a state
	Intermediate int
	Layers       int // n; states are numbered 0..n
	Vocab        int
	MaxPositions int
	QHeads       int
	KVHeads      int
	HeadDim      int
	Rotary       int // dims of a head that are rotated
	Theta        float64
	Eps          float32
	Tied         bool    // the head is the embedding
	EOS          []int32 // ids that end a reply
	// Attends[i] says whether layer i has attention; Qwen35's others have the
	// delta rule. Window[i] is how many positions layer i sees, itself
	// included; 0 means all.
	Attends []bool
	Window  []int
	Linear  LinearConfig
}

// LinearConfig describes the gated DeltaNet layers of [Qwen35].
type LinearConfig struct {
	KeyHeads, ValHeads int
	KeyDim, ValDim     int
	Taps               int // of the convolution
}

// channels is the width of the convolution: all q, k and v heads.
func (l LinearConfig) channels() int { return 2*l.KeyHeads*l.KeyDim + l.ValHeads*l.ValDim }

// gain is what is added to the weights of the model's norms.
func (c Config) gain() float32 {
	if c.Family == Qwen35 {
		return 1
	}
	return 0
}

// rope is rope_parameters, or rope_scaling of older files.
type rope struct {
	Theta   *float64 `json:"rope_theta"`
	Type    string   `json:"rope_type"`
	OldType string   `json:"type"`
	Partial *float64 `json:"partial_rotary_factor"`
}

// document is config.json, or its text_config.
type document struct {
	Architectures []string        `json:"architectures"`
	ModelType     string          `json:"model_type"`
	Text          *document       `json:"text_config"`
	Quantization  json.RawMessage `json:"quantization_config"`

	Hidden        int      `json:"hidden_size"`
	Intermediate  int      `json:"intermediate_size"`
	Layers        int      `json:"num_hidden_layers"`
	Vocab         int      `json:"vocab_size"`
	MaxPositions  int      `json:"max_position_embeddings"`
	QHeads        int      `json:"num_attention_heads"`
	KVHeads       int      `json:"num_key_value_heads"`
	HeadDim       int      `json:"head_dim"`
	Act           string   `json:"hidden_act"`
	Eps           *float32 `json:"rms_norm_eps"`
	Tied          *bool    `json:"tie_word_embeddings"`
	AttentionBias bool     `json:"attention_bias"`
	Rope          *rope    `json:"rope_parameters"`
	RopeScaling   *rope    `json:"rope_scaling"`
	Theta         *float64 `json:"rope_theta"`
	Partial       *float64 `json:"partial_rotary_factor"`
	EOS           idList   `json:"eos_token_id"`

	LayerTypes   []string `json:"layer_types"`
	UseSliding   bool     `json:"use_sliding_window"`
	Sliding      *int     `json:"sliding_window"`
	WindowLayers *int     `json:"max_window_layers"`
	FullInterval *int     `json:"full_attention_interval"`

	GateType   string `json:"output_gate_type"`
	OutputGate *bool  `json:"attn_output_gate"`
	KeyHeads   int    `json:"linear_num_key_heads"`
	ValHeads   int    `json:"linear_num_value_heads"`
	KeyDim     int    `json:"linear_key_head_dim"`
	ValDim     int    `json:"linear_value_head_dim"`
	Taps       int    `json:"linear_conv_kernel_dim"`
}

// idList is null, one id, or a list of them.
type idList []int32

// UnmarshalJSON implements [json.Unmarshaler].
func (l *idList) UnmarshalJSON(data []byte) error {
	if bytes.Equal(data, []byte("null")) {
		return nil
	}
	if data[0] == '[' {
		return json.Unmarshal(data, (*[]int32)(l))
	}
	var id int32
	if err := json.Unmarshal(data, &id); err != nil {
		return err
	}
	*l = idList{id}
	return nil
}

const (
	configName     = "config.json"
	generationName = "generation_config.json"
)

// readConfig reads config.json and the ids that end a reply; raw is the
// file, for the fingerprint.
func readConfig(fsys fs.FS, dir string) (cfg Config, raw []byte, err error) {
	name := path.Join(dir, configName)
	raw, err = fs.ReadFile(fsys, name)
	if errors.Is(err, fs.ErrNotExist) {
		return cfg, nil, fmt.Errorf("%w: %s does not exist; give the directory of a downloaded model: %w", ErrModel, name, err)
	}
	if err != nil {
		return cfg, nil, fmt.Errorf("reading %s: %w", name, err)
	}
	var doc document
	if err := json.Unmarshal(raw, &doc); err != nil {
		return cfg, nil, fmt.Errorf("reading %s: %w: %w", name, ErrModel, err)
	}
	if cfg, err = doc.config(); err != nil {
		return cfg, nil, fmt.Errorf("reading %s: %w", name, err)
	}
	name = path.Join(dir, generationName)
	more, err := fs.ReadFile(fsys, name)
	if errors.Is(err, fs.ErrNotExist) {
		return cfg, raw, nil
	}
	var generation struct {
		EOS idList `json:"eos_token_id"`
	}
	if err == nil {
		err = json.Unmarshal(more, &generation)
	}
	if err != nil {
		return cfg, nil, fmt.Errorf("reading %s: %w: %w", name, ErrModel, err)
	}
	cfg.EOS = append(cfg.EOS, generation.EOS...)
	slices.Sort(cfg.EOS)
	cfg.EOS = slices.Compact(cfg.EOS)
	return cfg, raw, nil
}

var architectures = map[string]Family{
	"Qwen3ForCausalLM":                Qwen3,
	"Qwen3_5ForCausalLM":              Qwen35,
	"Qwen3_5ForConditionalGeneration": Qwen35,
	"Qwen3_5TextForCausalLM":          Qwen35,
	"qwen3":                           Qwen3, // model types, where no architecture is named
	"qwen3_5":                         Qwen35,
	"qwen3_5_text":                    Qwen35,
}

func unsupported(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsupported, fmt.Sprintf(format, args...))
}

func (d *document) family() (Family, error) {
	name := d.ModelType
	if len(d.Architectures) > 0 {
		name = d.Architectures[0]
	}
	if f, ok := architectures[name]; ok {
		return f, nil
	}
	if strings.Contains(strings.ToLower(name), "qwen3next") || name == "qwen3_next" {
		return "", unsupported("%s: its layers fuse and interleave their projections, unlike Qwen3.5's; use a Qwen3 or Qwen3.5 target", name)
	}
	return "", unsupported("architecture %q; draftscope runs Qwen3ForCausalLM and Qwen3_5ForCausalLM, other targets are captured from a running engine", name)
}

// config checks the document and fills in what it leaves out.
func (d *document) config() (Config, error) {
	family, err := d.family()
	if err != nil {
		return Config{}, err
	}
	eos, tied := d.EOS, d.Tied
	if d.Text != nil {
		d.Text.Quantization = append(d.Text.Quantization, d.Quantization...)
		if d.Text.EOS != nil {
			eos = d.Text.EOS
		}
		if d.Text.Tied != nil {
			tied = d.Text.Tied
		}
		d = d.Text
	}
	if err := d.refuse(); err != nil {
		return Config{}, err
	}
	c := Config{
		Family: family, Hidden: d.Hidden, Intermediate: d.Intermediate, Layers: d.Layers, Vocab: d.Vocab,
		MaxPositions: d.MaxPositions, QHeads: d.QHeads, KVHeads: d.KVHeads, HeadDim: d.HeadDim,
		Eps: 1e-6, Tied: tied != nil && *tied, EOS: slices.Clone(eos),
		Linear: LinearConfig{d.KeyHeads, d.ValHeads, d.KeyDim, d.ValDim, d.Taps},
	}
	if d.Eps != nil {
		c.Eps = *d.Eps
	}
	c.Theta, c.Rotary = d.rotation(family)
	if err := d.layers(&c); err != nil {
		return Config{}, err
	}
	return c, c.check()
}

// refuse names what this package would get wrong.
func (d *document) refuse() error {
	if q := bytes.TrimSpace(d.Quantization); len(q) > 0 && !bytes.HasPrefix(q, []byte("null")) {
		return unsupported("quantization_config; use the unquantised checkpoint")
	}
	if d.AttentionBias {
		return unsupported("attention_bias true; Qwen3 and Qwen3.5 have none")
	}
	if d.Act != "" && d.Act != "silu" {
		return unsupported("hidden_act %q; only silu is known", d.Act)
	}
	if d.OutputGate != nil && !*d.OutputGate {
		return unsupported("attn_output_gate false; Qwen3.5 has the gate")
	}
	if g := d.GateType; g != "" && g != "swish" && g != "silu" {
		return unsupported("output_gate_type %q; only swish is known", g)
	}
	for _, r := range []*rope{d.Rope, d.RopeScaling} {
		if r == nil {
			continue
		}
		for _, t := range []string{r.Type, r.OldType} {
			if t != "" && t != "default" {
				return unsupported("rope_type %q; only the default one is known: remove the scaling from config.json to run within the trained length", t)
			}
		}
	}
	return nil
}

func (d *document) rotation(family Family) (theta float64, rotary int) {
	theta, partial := 1e4, 1.0
	if family == Qwen35 {
		partial = 0.25
	}
	if d.Partial != nil {
		partial = *d.Partial
	}
	if d.Theta != nil {
		theta = *d.Theta
	}
	if d.Rope != nil {
		if d.Rope.Theta != nil {
			theta = *d.Rope.Theta
		}
		if d.Rope.Partial != nil {
			partial = *d.Rope.Partial
		}
	}
	return theta, int(float64(d.HeadDim) * partial)
}

// layers fills Attends and Window, from layer_types or, where a file has
// none, from the numbers that older files give instead.
func (d *document) layers(c *Config) error {
	const most = 4096
	if c.Layers < 1 || c.Layers > most {
		return fmt.Errorf("%w: num_hidden_layers is %d, want 1 to %d", ErrModel, c.Layers, most)
	}
	types := d.LayerTypes
	if types == nil {
		types = d.defaultLayers(c)
	}
	if len(types) != c.Layers {
		return fmt.Errorf("%w: layer_types has %d entries for %d layers", ErrModel, len(types), c.Layers)
	}
	c.Attends, c.Window = make([]bool, c.Layers), make([]int, c.Layers)
	for i, t := range types {
		switch {
		case t == "full_attention":
			c.Attends[i] = true
		case t == "sliding_attention" && c.Family == Qwen3:
			if d.Sliding == nil || *d.Sliding < 1 {
				return fmt.Errorf("%w: layer %d is sliding_attention and sliding_window is missing", ErrModel, i)
			}
			c.Attends[i], c.Window[i] = true, *d.Sliding
		case t == "linear_attention" && c.Family == Qwen35:
		default:
			return unsupported("layer_types[%d] %q in a %s model", i, t, c.Family)
		}
	}
	return nil
}

func (d *document) defaultLayers(c *Config) []string {
	types := make([]string, c.Layers)
	for i := range types {
		types[i] = "full_attention"
		switch c.Family {
		case Qwen3:
			if d.UseSliding && d.WindowLayers != nil && i >= *d.WindowLayers {
				types[i] = "sliding_attention"
			}
		case Qwen35:
			every := 4
			if d.FullInterval != nil && *d.FullInterval > 0 {
				every = *d.FullInterval
			}
			if (i+1)%every != 0 {
				types[i] = "linear_attention"
			}
		}
	}
	return types
}

func (c Config) check() error {
	type size struct {
		name  string
		value int
	}
	sizes := []size{
		{"hidden_size", c.Hidden},
		{"intermediate_size", c.Intermediate},
		{"vocab_size", c.Vocab},
		{"max_position_embeddings", c.MaxPositions},
		{"num_attention_heads", c.QHeads},
		{"num_key_value_heads", c.KVHeads},
		{"head_dim", c.HeadDim},
	}
	if slices.Contains(c.Attends, false) {
		sizes = append(sizes, size{"linear_num_key_heads", c.Linear.KeyHeads}, size{"linear_num_value_heads", c.Linear.ValHeads},
			size{"linear_key_head_dim", c.Linear.KeyDim}, size{"linear_value_head_dim", c.Linear.ValDim}, size{"linear_conv_kernel_dim", c.Linear.Taps})
	}
	const most = 1 << 24 // keeps every product of two sizes within an int
	for _, s := range sizes {
		if s.value < 1 || s.value > most {
			return fmt.Errorf("%w: %s is %d, want 1 to %d", ErrModel, s.name, s.value, most)
		}
	}
	if c.QHeads%c.KVHeads != 0 {
		return fmt.Errorf("%w: %d query heads do not share %d key heads evenly", ErrModel, c.QHeads, c.KVHeads)
	}
	if slices.Contains(c.Attends, false) && c.Linear.ValHeads%c.Linear.KeyHeads != 0 {
		return fmt.Errorf("%w: %d value heads do not share %d key heads evenly", ErrModel, c.Linear.ValHeads, c.Linear.KeyHeads)
	}
	if c.Rotary < 2 || c.Rotary%2 != 0 || c.Rotary > c.HeadDim {
		return fmt.Errorf("%w: %d of %d head dims are rotated, want an even number", ErrModel, c.Rotary, c.HeadDim)
	}
	if !(c.Theta > 0) || !(c.Eps > 0) {
		return fmt.Errorf("%w: rope_theta is %v and rms_norm_eps %v, both must be positive", ErrModel, c.Theta, c.Eps)
	}
	for _, id := range c.EOS {
		if id < 0 || int(id) >= c.Vocab {
			return fmt.Errorf("%w: eos_token_id %d is outside the vocabulary of %d", ErrModel, id, c.Vocab)
		}
	}
	return nil
}
