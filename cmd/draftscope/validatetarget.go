package main

import (
	"context"
	"fmt"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter/diagnose"
	"github.com/draftscope/draftscope/extract/verify"
	"github.com/draftscope/draftscope/schemas"
	"github.com/draftscope/draftscope/schemas/sound"
)

// profiled is how many sequences of a run the target runs again to know the
// RMS of its states.
const profiled = 8

// truth checks sequences of one run against the target: K5 and K7.
type truth struct {
	*job
	runs  int
	sizes map[int]*sound.Sizes // of rows that the target computed, by state
}

func newTruth(j *job) *truth {
	return &truth{job: j, sizes: map[int]*sound.Sizes{}}
}

// check gives the faults of one sequence, none of whose tokens may be outside
// the vocabulary.
func (t *truth) check(ctx context.Context, q verify.Sequence) ([]verify.Fault, error) {
	faults, err := q.HeadProbe(t.score)
	if err != nil {
		return nil, err
	}
	if t.runs < profiled && len(q.Tokens) > 0 {
		ids := make([]int32, len(q.Tokens))
		for i, tok := range q.Tokens {
			ids[i] = tok.TokenID
		}
		states, err := t.recompute(ctx, ids)
		if err != nil {
			return nil, err
		}
		t.runs++
		for state, vals := range states {
			if t.sizes[state] == nil {
				t.sizes[state] = new(sound.Sizes)
			}
			t.sizes[state].Add(verify.RowRMS(vals, q.Hidden))
		}
		return append(faults, q.Beside(states)...), nil
	}
	return append(faults, q.Band(t.profile())...), nil
}

// misplaced warns of a loss mask that is off where turns begin or end.
func (t *truth) misplaced(tokens []schemas.Token) (faults []verify.Fault) {
	if len(tokens) == 0 {
		return nil
	}
	text := func(id int32) string { return t.tok.Decode([]int32{id}) }
	for _, m := range diagnose.MisplacedMask(tokens, text, t.tok.Encode) {
		where := "outside"
		if tokens[m.Token].LossMask {
			where = "inside"
		}
		faults = append(faults, verify.Fault{
			Sample: tokens[0].SeqID, Row: m.Token, State: -1, Rule: "K9", Warning: true,
			Value: fmt.Sprintf("token %q %s is %s the loss mask", text(tokens[m.Token].TokenID), m.What, where),
		})
	}
	return faults
}

// profile is the size of each state of the target, on what it ran so far.
func (t *truth) profile() sound.Profile {
	out := sound.Profile{}
	for state, sizes := range t.sizes {
		if size, ok := sizes.Size(); ok {
			out[state] = size
		}
	}
	return out
}

// score is a [verify.Scorer] of the open target.
func (t *truth) score(rows []float32, normed bool, next []int32) (hits int, logprob float64, err error) {
	h := hostOf(t.model)
	buf, err := t.dev.New(len(rows))
	if err != nil {
		return 0, 0, err
	}
	defer buf.Close()
	x := cuda.Matrix(buf, len(next), h.Hidden)
	if err := t.dev.Upload(x, rows); err != nil {
		return 0, 0, err
	}
	if normed {
		if err := t.dev.RMSNorm(x, x, h.FinalNorm, h.Eps, h.Gain); err != nil {
			return 0, 0, err
		}
	}
	res, err := t.dev.Head(cuda.HeadArgs{Hidden: x, Weight: h.Head, K: 1, Labels: next})
	if err != nil {
		return 0, 0, fmt.Errorf("applying the target's head: %w", err)
	}
	for i, id := range next {
		if res.TopIDs[i] == id {
			hits++
		}
		logprob += float64(res.LabelLogit[i]-res.LSE[i]) / float64(len(next))
	}
	return hits, logprob, nil
}
