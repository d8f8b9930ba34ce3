package main

import (
	"fmt"
	"slices"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/extract/tokenizer"
	"github.com/draftscope/draftscope/extract/verify"
	"github.com/draftscope/draftscope/schemas/sound"
)

// The texts that a profile is made of: so many tokens of each, and in all.
// More would cost more than they tell.
const (
	profileText = 32
	profileRows = 64
)

// profile runs the target on the beginnings of texts, and measures its states.
// A run that has a profile keeps it, and so does another run of the same
// weights.
func (j *job) profile(r data.Run, texts [][]int32) (sound.Profile, error) {
	if p := j.knownProfile(r); p != nil || j.model == nil {
		return p, nil
	}
	sizes := make([]sound.Sizes, len(r.States))
	rows := 0
	// One here and one there: what stands side by side may be alike.
	step := max(1, len(texts)*profileText/(2*profileRows))
	for i := 0; i < len(texts) && rows < profileRows; i += step {
		ids := texts[i][:min(len(texts[i]), profileText)]
		if len(ids) == 0 || slices.ContainsFunc(ids, func(id int32) bool { return id < 0 || int(id) >= j.model.Config().Vocab }) {
			continue
		}
		rows += len(ids)
		seq, err := j.model.NewSequence()
		if err != nil {
			return nil, fmt.Errorf("measuring the target's states: %w", err)
		}
		out, err := j.model.Forward([]*target.Sequence{seq}, [][]int32{ids}, r.States)
		seq.Close()
		if err != nil {
			return nil, fmt.Errorf("measuring the target's states: %w", err)
		}
		for i, vals := range out.States {
			sizes[i].Add(verify.RowRMS(vals, r.Hidden))
		}
	}
	p := sound.Profile{}
	for i, state := range r.States {
		if size, ok := sizes[i].Size(); ok {
			p[state] = size
		}
	}
	return p, nil
}

// knownProfile is that of the run, or of another run of its weights that
// measured all of its states; nil where there is none.
func (j *job) knownProfile(r data.Run) sound.Profile {
	runs := []data.Run{j.remote}
	if j.ds != nil {
		runs = j.ds.Runs()
	}
	covers := func(p sound.Profile) bool {
		for _, state := range r.States {
			if _, ok := p[state]; !ok {
				return false
			}
		}
		return true
	}
	for _, have := range runs {
		if have.Name == r.Name && have.Profile != nil {
			return have.Profile
		}
	}
	for _, have := range runs {
		if w := r.Fingerprints.Weights; w != "" && have.Fingerprints.Weights == w && covers(have.Profile) {
			return have.Profile
		}
	}
	return nil
}

// beginnings are the first tokens of what a source is to run.
func beginnings(source *target.Source) [][]int32 {
	var texts [][]int32
	for _, b := range source.Beginnings() {
		texts = append(texts, b.IDs)
	}
	return texts
}

// someText is what a target is measured on whose inputs nobody knows yet.
const someText = `Read the function and say in a few words what it returns when the list is empty.

// Sum adds the lengths of all names, and counts those that begin with a capital letter.
func Sum(names []string) (total, capitals int) {
	for _, name := range names {
		total += len(name)
		if name != "" && name[0] >= 'A' && name[0] <= 'Z' {
			capitals++
		}
	}
	return total, capitals
}
`

// someTexts are pieces of someText, in a conversation.
func someTexts(tok *tokenizer.Tokenizer) [][]int32 {
	if tok == nil {
		return nil
	}
	chat, err := tok.Chat([]tokenizer.Message{{Role: "user", Content: someText}})
	if err != nil {
		return nil // its template knows no such conversation
	}
	return piecesOf(chat.IDs)
}

// piecesOf cuts a text where one is all there is.
func piecesOf(ids []int32) [][]int32 { return slices.Collect(slices.Chunk(ids, profileText)) }
