package main

import (
	"slices"

	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/schemas"
)

// sameInputs refuses an input whose id is stored with other tokens: skipping
// it as done would answer for a text that was never run.
func (j *job) sameInputs(inputs []target.Input, stored map[string]string) error {
	byID := map[string]target.Input{}
	for _, in := range inputs {
		if _, ok := stored[in.ID]; ok {
			byID[in.ID] = in
		}
	}
	if len(byID) == 0 {
		return nil
	}
	return dataError(j.ds.EachSequence(j.run, func(s schemas.Sequence, tokens []schemas.Token) error {
		in, ok := byID[s.SeqID]
		if !ok {
			return nil
		}
		ids, err := j.promptIDs(in)
		if err != nil {
			return badInput(err)
		}
		have := make([]int32, len(tokens))
		for i, t := range tokens {
			have[i] = t.TokenID
		}
		if len(ids) > len(have) || !slices.Equal(ids, have[:len(ids)]) || in.IDs != nil && len(ids) != len(have) {
			return badUsage("sequence %s is stored in run %s of %s with other tokens; give it another id, or choose another --run or --out", s.SeqID, j.run, j.ds.Dir())
		}
		return nil
	}))
}

// promptIDs are the ids that an input begins with.
func (j *job) promptIDs(in target.Input) ([]int32, error) {
	if in.IDs != nil {
		return in.IDs, nil
	}
	c, err := j.tok.Chat(in.Messages)
	return c.IDs, err
}
