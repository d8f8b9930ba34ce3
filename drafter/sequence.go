package drafter

import (
	"fmt"
	"slices"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/schemas"
	"github.com/draftscope/draftscope/schemas/sound"
)

// The checks by which a sequence is set aside for a drafter.
const (
	checkFinite   = "K1" // no NaN, no Inf
	checkRows     = "K3" // tokens, positions and counts fit together
	checkManifest = "K6" // the recorded states are those that the drafter reads
	checkVocab    = "K11"
	checkHead     = "K5" // the recorded answers are the target's
)

// sequence is what a stage holds of one sequence until its end.
type sequence struct {
	id, run string
	tokens  []int32
	mask    []bool
	labels  []int32 // the target's argmax at each position, -1 if unknown
	spec    *schemas.CaptureSpec
	lanes   []*lane
	sound   *sound.Checker
	// row is the sequence's own record, nil before it came.
	row *schemas.Sequence
	// recorded says that every label came with the capture.
	recorded bool
	// setAside says that somebody before us found the sequence faulty.
	setAside bool

	// final holds the normed final states of all positions, if they are
	// recorded; nil otherwise.
	final      cuda.Buffer
	finalWidth int
}

// lane is one drafter's work on a sequence.
type lane struct {
	drafter  *Drafter
	context  Context
	methods  []Method
	fault    *schemas.Fault
	next     int     // first position not yet considered as an anchor
	pending  []int32 // anchors that wait for a full tile
	drafts   []schemas.Draft
	slots    []schemas.Slot
	outcomes map[int32][]cuda.Outcome // by anchor, then by method
}

// fail sets the sequence aside for this drafter; the first reason stands.
func (l *lane) fail(check, detail string) {
	if l.fault == nil {
		l.fault = &schemas.Fault{Check: check, Detail: detail}
		l.pending, l.drafts, l.slots, l.outcomes = nil, nil, nil, nil
	}
}

// failAll sets the sequence aside for every drafter.
func (q *sequence) failAll(check, format string, args ...any) {
	for _, l := range q.lanes {
		l.fail(check, fmt.Sprintf(format, args...))
	}
}

// live says whether any drafter still works on the sequence.
func (q *sequence) live() bool {
	return !q.setAside && slices.ContainsFunc(q.lanes, func(l *lane) bool { return l.fault == nil })
}

// close gives the sequence's device memory back.
func (q *sequence) close() {
	for _, l := range q.lanes {
		l.context.Close()
	}
	if q.final != nil {
		q.final.Close()
		q.final = nil
	}
}

// finalRows views the normed final states of all positions.
func (q *sequence) finalRows() cuda.Tensor {
	return cuda.Matrix(q.final, len(q.tokens), q.finalWidth)
}

// keepFinal appends normed final states, whose first row is that of position
// at.
func (q *sequence) keepFinal(dev cuda.Device, at int, normed cuda.Tensor) error {
	grown, err := dev.Grow(q.final, (at+normed.Rows)*normed.Cols)
	if err != nil {
		return fmt.Errorf("keeping final states: %w", err)
	}
	q.final, q.finalWidth = grown, normed.Cols
	rows := make([]int32, normed.Rows)
	for i := range rows {
		rows[i] = int32(i)
	}
	dst := cuda.Matrix(q.final, at+normed.Rows, normed.Cols).RowRange(at, at+normed.Rows)
	return dev.GatherRows(dst, normed, rows)
}

// check finds what is wrong with a batch before anything is computed with it,
// and sets the sequence aside where it is.
func (q *sequence) check(c schemas.Capture, host Host) {
	switch {
	case c.Spec.Hidden != host.Hidden:
		q.failAll(checkManifest, "states have %d values, the target's %d", c.Spec.Hidden, host.Hidden)
		return
	case c.Spec.Layers != host.Layers:
		q.failAll(checkManifest, "states of a target of %d layers, this one has %d", c.Spec.Layers, host.Layers)
		return
	case q.spec != nil && !slices.Equal(q.spec.States, c.Spec.States):
		q.failAll(checkManifest, "states %v after states %v", c.Spec.States, q.spec.States)
		return
	}
	for i, t := range c.Tokens {
		want := int32(len(q.tokens) + i)
		switch {
		case t.SeqID != q.id:
			q.failAll(checkRows, "row of position %d belongs to sequence %s", t.Pos, t.SeqID)
			return
		case t.Pos != want:
			q.failAll(checkRows, "position %d where %d was due", t.Pos, want)
			return
		case t.TokenID < 0 || int(t.TokenID) >= host.Vocab:
			q.failAll(checkVocab, "token %d at position %d, the vocabulary has %d", t.TokenID, t.Pos, host.Vocab)
			return
		case t.TargetArgmax != nil && (*t.TargetArgmax < 0 || int(*t.TargetArgmax) >= host.Vocab):
			q.failAll(checkVocab, "target_argmax %d at position %d, the vocabulary has %d", *t.TargetArgmax, t.Pos, host.Vocab)
			return
		}
	}
	for _, l := range q.lanes {
		for _, tap := range l.drafter.Taps() {
			if !slices.Contains(c.Spec.States, tap.State) {
				l.fail(checkManifest, fmt.Sprintf("state %d is not recorded (recorded: %v)", tap.State, c.Spec.States))
			}
		}
	}
	q.sound.Add(c, nil)
	q.unsound(q.sound.Found())
}

// unsound sets the sequence aside for what is wrong with its states, whether a
// drafter reads them or not: the store does so too.
func (q *sequence) unsound(faults []sound.Fault) {
	for _, f := range faults {
		q.failAll(f.Check, "%s", f)
	}
}
