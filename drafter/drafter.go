package drafter

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
)

// Host is what the target lends to its drafters, which own neither embedding
// nor head. The target keeps the memory.
type Host struct {
	Embedding cuda.Tensor // [Vocab, Hidden]
	Head      cuda.Tensor // [Vocab, Hidden]
	FinalNorm cuda.Tensor // [1, Hidden]
	Eps       float32     // of the final norm
	Gain      float32     // added to FinalNorm: 0, or 1 for Qwen3.5's (1+w)
	Vocab     int
	Hidden    int
	Layers    int // n
}

// Validate reports tensors that do not have the stated shape.
func (h Host) Validate() error {
	for _, t := range []struct {
		name       string
		t          cuda.Tensor
		rows, cols int
	}{{"embedding", h.Embedding, h.Vocab, h.Hidden}, {"head", h.Head, h.Vocab, h.Hidden}, {"final norm", h.FinalNorm, 1, h.Hidden}} {
		if t.t.Rows != t.rows || t.t.Cols != t.cols || t.rows < 1 || t.cols < 1 || t.t.Valid() != nil {
			return fmt.Errorf("%w: the target's %s is %d x %d, want %d x %d", ErrConfig, t.name, t.t.Rows, t.t.Cols, t.rows, t.cols)
		}
	}
	if h.Layers < 1 {
		return fmt.Errorf("%w: a target of %d layers", ErrConfig, h.Layers)
	}
	return nil
}

// Drafter is a named drafter, ready to draft for one target. It is used from
// one goroutine at a time.
type Drafter struct {
	Name string
	Model
	head    cuda.Tensor // one row a draft token
	vocab   vocabulary
	ownHead bool // head differs from the target's
	load    *loader
}

// Open loads a drafter for the target behind host. The checkpoint's own
// embedding and head are used where it has them, the target's otherwise. The
// family is chosen by the configuration. Errors name the drafter and wrap
// [ErrFamily], [ErrConfig] or [ErrWeights]. The caller closes the drafter,
// before dev and before the target gives its tensors back.
func Open(name string, configJSON []byte, w Weights, host Host, dev cuda.Device) (*Drafter, error) {
	d, err := open(name, configJSON, w, host, dev)
	if err != nil {
		return nil, fmt.Errorf("opening drafter %s: %w", name, err)
	}
	return d, nil
}

func open(name string, configJSON []byte, w Weights, host Host, dev cuda.Device) (*Drafter, error) {
	if err := host.Validate(); err != nil {
		return nil, err
	}
	f, err := familyOf(configJSON)
	if err != nil {
		return nil, err
	}
	load, err := newLoader(w, dev)
	if err != nil {
		return nil, err
	}
	d := &Drafter{Name: name, head: host.Head, load: load}
	if d.Model, err = f.open(opening{config: configJSON, load: load, host: host, dev: dev}); err == nil {
		err = d.loadHead(host)
	}
	if err == nil {
		err = load.unknown()
	}
	if err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

const (
	headName      = "lm_head.weight"
	embeddingName = "embed_tokens.weight"
)

// loadHead takes the checkpoint's own head if it has one and it is not merely
// a copy of the target's, and the map of a reduced draft vocabulary.
func (d *Drafter) loadHead(host Host) error {
	var err error
	if d.vocab, err = d.load.vocabulary(d.DraftVocab(), host.Vocab); err != nil {
		return err
	}
	if d.vocab.reduced() {
		d.ownHead = true
		d.head, err = d.vocab.headOf(d.load, host)
		return err
	}
	if !d.load.has(headName) {
		return nil
	}
	same, err := d.load.copyOf(headName, host.Head)
	if err != nil || same {
		return err
	}
	d.ownHead = true
	d.head, err = d.load.matrix(headName, host.Vocab, host.Hidden)
	return err
}

// OwnHead says that the drafter has a vocabulary head other than the
// target's, or one over fewer tokens. Divergences from the target's
// distribution are then not computed.
func (d *Drafter) OwnHead() bool { return d.ownHead }

// Close gives the drafter's memory back.
func (d *Drafter) Close() {
	if d.Model != nil {
		d.Model.Close()
	}
	d.load.close()
}
