// Package target runs a target model natively, from safetensors, on any
// [cuda.Device], and yields what it computed as Arrow records.
//
// State c of a token is the residual stream after c layers, before the final
// norm: 0 is the embedding, n (the number of layers) what the final norm and
// the head read.
//
// # The same bits, however the rows were cut
//
// A row's states depend on the tokens before it and on nothing else: not on
// the other sequences of a batch, not on the pieces in which a prompt was
// prefilled, not on whether a token was generated or given. Attention always
// reads keys from one arena, for prefill and decoding alike, and the delta
// rule goes row by row ([Model.Chunk] = 1). So a capture from prompts and a
// teacher-forced capture of the same ids are bit-equal on one device.
package target

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/extract/safetensors"
)

// Model is a target on a device. It serves one goroutine at a time.
type Model struct {
	// Chunk is how many rows of one call the delta rule solves at once. 1, as
	// Open sets it, makes states independent of how rows were cut into calls.
	// 64 is some 17 times faster for prompts on a Hopper GPU in bf16. States
	// then differ in the last bits; those of given rows are still the same
	// however a [Source] cuts them, but a row that was generated, one at a
	// time, is no longer bit-equal to the same row given. Models without
	// linear layers ignore it.
	Chunk int

	cfg     Config
	dev     cuda.Device
	loaded  *loader
	embed   cuda.Tensor // [V, H]
	head    cuda.Tensor // [V, H]
	norm    cuda.Tensor // [1, H]
	layers  []layer
	arena   *arena
	scratch map[string]cuda.Buffer
	print   string
}

// layer is one decoder layer: x += mixer(norm(x)), x += mlp(norm(x)).
type layer struct {
	mixer  mixer
	before cuda.Tensor // input_layernorm [1, H]
	after  cuda.Tensor // post_attention_layernorm [1, H]
	gateUp cuda.Tensor // [2I, H]: gates, then what they are multiplied with
	down   cuda.Tensor // [H, I]
}

// named is a directory in a message. "." says nothing to who does not know what
// it is the root of.
func named(dir string) string {
	if dir == "." {
		return ""
	}
	return " " + dir
}

// Open loads the model in directory dir of fsys to dev: config.json, the
// optional generation_config.json, and the weights (see
// [safetensors.Open]). Errors wrap [ErrUnsupported], [ErrModel] or those of
// safetensors. The caller closes the model before the device.
func Open(fsys fs.FS, dir string, dev cuda.Device) (*Model, error) {
	cfg, raw, err := readConfig(fsys, dir)
	if err != nil {
		return nil, fmt.Errorf("opening target%s: %w", named(dir), err)
	}
	ckpt, err := safetensors.Open(fsys, dir)
	if err != nil {
		return nil, fmt.Errorf("opening target%s: %w", named(dir), err)
	}
	m, err := openWeights(cfg, raw, ckpt, dev)
	if err != nil {
		return nil, fmt.Errorf("opening target%s: %w", named(dir), err)
	}
	return m, nil
}

// openWeights loads a model of any weights, and closes them.
func openWeights(cfg Config, raw []byte, ckpt checkpoint, dev cuda.Device) (*Model, error) {
	sum := sha256.Sum256(append([]byte(ckpt.Fingerprint()), raw...))
	m := &Model{
		Chunk: 1, cfg: cfg, dev: dev, loaded: newLoader(dev, ckpt),
		scratch: map[string]cuda.Buffer{}, print: hex.EncodeToString(sum[:]),
	}
	if err := errors.Join(m.load(), ckpt.Close()); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	m.loaded.ckpt = nil
	return m, nil
}

func (m *Model) load() error {
	c, l := m.cfg, m.loaded
	m.arena = &arena{dev: m.dev, cols: c.KVHeads * c.HeadDim}
	m.embed = l.vocabulary(l.prefix+"embed_tokens.weight", c.Vocab, c.Hidden)
	m.head = m.embed
	if c.Tied {
		l.skip("lm_head.weight")
	} else {
		m.head = l.vocabulary("lm_head.weight", c.Vocab, c.Hidden)
	}
	m.norm = l.vector("norm.weight", c.Hidden)
	for i := range c.Layers {
		p := fmt.Sprintf("layers.%d.", i)
		out := layer{
			before: l.vector(p+"input_layernorm.weight", c.Hidden),
			after:  l.vector(p+"post_attention_layernorm.weight", c.Hidden),
			gateUp: l.stack(c.Hidden, part{name: p + "mlp.gate_proj.weight", rows: c.Intermediate}, part{name: p + "mlp.up_proj.weight", rows: c.Intermediate}),
			down:   l.matrix(p+"mlp.down_proj.weight", c.Hidden, c.Intermediate),
		}
		switch {
		case c.Family == Qwen3:
			out.mixer = loadAttention(l, c, m.arena, p, c.Window[i])
		case c.Attends[i]:
			out.mixer = loadGatedAttention(l, c, m.arena, p)
		default:
			out.mixer = loadDeltaNet(l, c, p)
		}
		m.layers = append(m.layers, out)
		if l.err != nil {
			break
		}
	}
	return l.finish()
}

// Config is what the model's config.json says.
func (m *Model) Config() Config { return m.cfg }

// Device is where the model runs.
func (m *Model) Device() cuda.Device { return m.dev }

// Embedding is the token embedding [V, H], owned by the model.
func (m *Model) Embedding() cuda.Tensor { return m.embed }

// Head is the vocabulary head [V, H], owned by the model; the embedding where
// the two are tied.
func (m *Model) Head() cuda.Tensor { return m.head }

// FinalNorm is the norm between state n and the head: its weights [1, H],
// owned by the model, and the eps and gain of [cuda.Device.RMSNorm].
func (m *Model) FinalNorm() (w cuda.Tensor, eps, gain float32) {
	return m.norm, m.cfg.Eps, m.cfg.gain()
}

// Fingerprint is a hash of config.json and of the weights' fingerprint.
func (m *Model) Fingerprint() string { return m.print }

// Close gives the model's device memory back. Sequences are closed apart.
func (m *Model) Close() error {
	m.loaded.close()
	if m.arena != nil {
		m.arena.close()
	}
	for _, b := range m.scratch {
		b.Close()
	}
	m.scratch, m.layers = nil, nil
	return nil
}

var _ io.Closer = (*Model)(nil)

// work is scratch memory of a call: rows x cols, dense, its content undefined.
// It grows with the largest call and is reused by name.
func (m *Model) work(name string, rows, cols int) (cuda.Tensor, error) {
	if m.scratch == nil {
		return cuda.Tensor{}, errClosed
	}
	buf := m.scratch[name]
	if buf == nil || buf.Len() < rows*cols {
		if buf != nil {
			buf.Close()
			delete(m.scratch, name)
		}
		fresh, err := m.dev.New(rows * cols)
		if err != nil {
			return cuda.Tensor{}, fmt.Errorf("allocating %s for %d rows: %w", name, rows, err)
		}
		m.scratch[name], buf = fresh, fresh
	}
	return cuda.Matrix(buf, rows, cols), nil
}
