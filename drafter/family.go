package drafter

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/draftscope/draftscope/cuda"
)

// Model is a loaded drafter of some family. It and its contexts share scratch
// memory: all of their calls come from one goroutine.
type Model interface {
	// BlockSize is B: slot 0 carries the anchor, slots 1..B-1 are drafted.
	BlockSize() int
	// DraftVocab is how many tokens the drafter drafts among: the target's, or
	// fewer.
	DraftVocab() int
	// Taps lists the states that the drafter reads, in the order in which
	// [Context.Extend] takes them.
	Taps() []Tap
	// NewContext starts an empty sequence.
	NewContext() (Context, error)
	// ContextWork is what [Context.Extend] cannot do without for so many
	// positions, DraftWork what [Context.Draft] cannot at these anchors.
	ContextWork(rows int) cuda.Work
	DraftWork(anchors []int32) cuda.Work
	// Close gives the weights' memory back, after all contexts'.
	Close()
}

// Context is what a drafter keeps of one sequence. It grows with the sequence
// and never depends on how the rows came in batches.
type Context interface {
	// Len is the number of positions given so far.
	Len() int
	// Extend appends positions: taps[p] holds tap p, one row a position.
	Extend(taps []cuda.Tensor) error
	// Draft drafts one block at each anchor, in one pass; tokens[i] is the
	// token at anchors[i]. Block i reads positions below anchors[i] and
	// itself, nothing else. Row i*(B-1)+k-1 of the result is slot k's vector,
	// ready for the vocabulary head. It is valid until the model's next call.
	Draft(anchors, tokens []int32) (cuda.Tensor, error)
	// Close gives the memory back.
	Close()
}

// family is one kind of drafter. A new one joins by a file of its own and an
// entry in families.
type family struct {
	name string
	// claims tells the family's own checkpoints by their config.json.
	claims func(header) bool
	open   func(opening) (Model, error)
}

// header is what every drafter's config.json has in some form.
type header struct {
	Architectures []string `json:"architectures"`
	ModelType     string   `json:"model_type"`
	Speculators   string   `json:"speculators_model_type"`
}

// kind is the name by which the checkpoint calls itself.
func (h header) kind() string {
	switch {
	case h.Speculators != "":
		return h.Speculators
	case len(h.Architectures) > 0:
		return h.Architectures[0]
	}
	return h.ModelType
}

// opening is what a family gets to open a checkpoint.
type opening struct {
	config []byte
	load   *loader
	host   Host
	dev    cuda.Device
}

func families() []family {
	return []family{
		{name: "DFlash", claims: claimsDFlash, open: openDFlash},
	}
}

// absent are families that are known and not run, by a mark of their name.
var absent = []struct{ mark, name string }{
	{"dflash2", "DFlash2"},
	{"dspark", "DSpark"},
	{"eagle", "EAGLE-3"},
	{"mtp", "MTP"},
	{"nextn", "MTP"},
	{"domino", "Domino"},
	{"medusa", "Medusa"},
}

// absentFamily is the family of absent that a checkpoint's name marks, or
// empty.
func absentFamily(kind string) string {
	for _, a := range absent {
		if strings.Contains(strings.ToLower(kind), a.mark) {
			return a.name
		}
	}
	return ""
}

// familyOf finds who runs a checkpoint. Errors wrap [ErrConfig] or
// [ErrFamily].
func familyOf(config []byte) (family, error) {
	var h header
	if err := json.Unmarshal(config, &h); err != nil {
		return family{}, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	kind := h.kind()
	if kind == "" {
		return family{}, fmt.Errorf("%w: it names no architecture", ErrConfig)
	}
	var known []string
	for _, f := range families() {
		if f.claims(h) {
			return f, nil
		}
		known = append(known, f.name)
	}
	if name := absentFamily(kind); name != "" {
		return family{}, fmt.Errorf("%w: %s (%q); this program runs %s", ErrFamily, name, kind, strings.Join(known, ", "))
	}
	return family{}, fmt.Errorf("%w: %q; this program runs %s", ErrFamily, kind, strings.Join(known, ", "))
}
