package drafter

import (
	"fmt"
	"slices"

	"github.com/draftscope/draftscope/cuda"
)

// The tensors of a reduced draft vocabulary: d2t holds for each draft token
// the target's token less the draft's, an offset; t2d marks the target's
// tokens that have one.
const (
	d2tName = "d2t"
	t2dName = "t2d"
)

// vocabulary maps a drafter's tokens to the target's. The zero value is the
// target's own vocabulary.
type vocabulary struct {
	target []int32 // by draft token, nil for the identity
	draft  []int32 // by target token, -1 for one that cannot be drafted
}

// reduced says that some tokens of the target cannot be drafted.
func (v vocabulary) reduced() bool { return v.target != nil }

// labels are the draft tokens of the target's, -1 for none.
func (v vocabulary) labels(of []int32) []int32 {
	if !v.reduced() {
		return of
	}
	out := make([]int32, len(of))
	for i, id := range of {
		out[i] = -1
		if id >= 0 {
			out[i] = v.draft[id]
		}
	}
	return out
}

// toTarget replaces draft tokens by the target's, in place.
func (v vocabulary) toTarget(ids []int32) {
	if !v.reduced() {
		return
	}
	for i, id := range ids {
		ids[i] = v.target[id]
	}
}

// ReadVocabulary gives the target's token for each of draft tokens of a
// checkpoint, nil where the two vocabularies are one. A map that is not whole
// or not one to one is an error that wraps [ErrWeights].
func ReadVocabulary(w Weights, draft, target int) ([]int32, error) {
	l, err := newLoader(w, nil)
	if err != nil {
		return nil, err
	}
	v, err := l.vocabulary(draft, target)
	return v.target, err
}

// vocabulary reads d2t and t2d, where they are there.
func (l *loader) vocabulary(draft, target int) (vocabulary, error) {
	if !l.has(d2tName) {
		if draft != target {
			return vocabulary{}, fmt.Errorf("%w: draft_vocab_size is %d of %d, and %s is missing", ErrWeights, draft, target, d2tName)
		}
		if l.has(t2dName) {
			return vocabulary{}, fmt.Errorf("%w: %s is there without %s", ErrWeights, t2dName, d2tName)
		}
		return vocabulary{}, nil
	}
	offsets, err := l.ints(d2tName, draft)
	if err != nil {
		return vocabulary{}, err
	}
	v := vocabulary{target: make([]int32, draft), draft: slices.Repeat([]int32{-1}, target)}
	identity := draft == target
	for d, off := range offsets {
		t := int64(d) + off
		if t < 0 || t >= int64(target) {
			return vocabulary{}, fmt.Errorf("%w: %s maps draft token %d to %d, outside the target's vocabulary of %d; it must hold offsets", ErrWeights, d2tName, d, t, target)
		}
		if v.draft[t] >= 0 {
			return vocabulary{}, fmt.Errorf("%w: %s maps draft tokens %d and %d to the same token %d", ErrWeights, d2tName, v.draft[t], d, t)
		}
		v.target[d], v.draft[t] = int32(t), int32(d)
		identity = identity && off == 0
	}
	if l.has(t2dName) {
		marks, err := l.ints(t2dName, target)
		if err != nil {
			return vocabulary{}, err
		}
		for t, mark := range marks {
			if (mark != 0) != (v.draft[t] >= 0) {
				return vocabulary{}, fmt.Errorf("%w: %s and %s disagree on token %d", ErrWeights, t2dName, d2tName, t)
			}
		}
	}
	if identity {
		return vocabulary{}, nil
	}
	return v, nil
}

// ints reads a tensor of n whole numbers.
func (l *loader) ints(name string, n int) ([]int64, error) {
	got, err := l.shape(name)
	if err != nil {
		return nil, err
	}
	if !slices.Equal(got, []int{n}) {
		return nil, fmt.Errorf("%w: %s has shape %v, want [%d]", ErrWeights, name, got, n)
	}
	l.taken[name] = true
	vals, err := l.weights.Ints(l.names[name])
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", name, err)
	}
	if len(vals) != n {
		return nil, fmt.Errorf("%w: %s has %d values, want %d", ErrWeights, name, len(vals), n)
	}
	return vals, nil
}

// headOf is the head over a reduced vocabulary: the checkpoint's own, or the
// rows of the target's that stand for its tokens.
func (v vocabulary) headOf(l *loader, host Host) (cuda.Tensor, error) {
	if l.has(headName) {
		return l.matrix(headName, len(v.target), host.Hidden)
	}
	head, err := l.room(len(v.target), host.Hidden)
	if err != nil {
		return cuda.Tensor{}, fmt.Errorf("placing the draft head: %w", err)
	}
	if err := l.dev.GatherRows(head, host.Head, v.target); err != nil {
		return cuda.Tensor{}, fmt.Errorf("gathering the draft head: %w", err)
	}
	return head, nil
}
