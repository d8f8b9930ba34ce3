package main

import (
	"slices"

	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/schemas"
)

// sameInputs refuses an input whose id is stored with other tokens: skipping
// it as done would answer for a text that was never run.
func (j *job) sameInputs(inputs []target.Beginning, stored map[string]string) error {
	byID := map[string]target.Beginning{}
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
		have := make([]int32, len(tokens))
		for i, t := range tokens {
			have[i] = t.TokenID
		}
		if len(in.IDs) > len(have) || !slices.Equal(in.IDs, have[:len(in.IDs)]) || in.Whole && len(in.IDs) != len(have) {
			return badUsage("sequence %s is stored in run %s of %s with other tokens; give it another id, or choose another --run or --out", s.SeqID, j.run, j.ds.Dir())
		}
		return nil
	}))
}
