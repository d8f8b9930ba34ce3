package diagnose

import (
	"context"
	"fmt"
	"slices"
)

// How many sequences whose states are not their own are looked at, and behind
// how many others each is put.
const (
	packedMost   = 2
	packedBehind = 24
)

// deviation is how far a sequence's recorded states are from recomputed ones.
type deviation struct {
	seq   int
	worst float64 // of the states, the largest mean relative distance of rows
	from  int     // the first row that is farther than the capture allows
}

// deviationOf compares the recorded states of a sequence from row lo on with
// states of the same tokens, by state, [rows*H] each.
func (s *study) deviationOf(q *subject, lo int, states [][]float32) deviation {
	h, limit := s.Host.Hidden, s.Capture.drift()
	d := deviation{from: len(q.ids)}
	for c, stored := range q.States {
		if c >= len(states) || len(stored) != len(q.ids)*h {
			continue
		}
		tail := &subject{Sequence: q.Sequence, ids: q.ids[lo:], clean: states}
		var sum count
		for t := range tail.ids {
			var row count
			one := &subject{ids: tail.ids[t : t+1], clean: make([][]float32, len(states))}
			one.clean[c] = states[c][t*h : (t+1)*h]
			s.distance(&row, one, stored[(lo+t)*h:(lo+t+1)*h], source{state: c}, nil)
			sum.hits, sum.scored = sum.hits+row.hits, sum.scored+row.scored
			if row.hits > limit && lo+t < d.from {
				d.from = lo + t
			}
		}
		if sum.scored > 0 {
			d.worst = max(d.worst, sum.rate())
		}
	}
	return d
}

// departures are the sequences whose recorded states are farther from
// recomputed ones than the capture allows, from some row on.
func (s *study) departures() []deviation {
	var odd []deviation
	for i, q := range s.seqs {
		if q.clean == nil {
			continue
		}
		d := s.deviationOf(q, 0, q.clean)
		if d.from == len(q.ids) {
			continue
		}
		if d.worst = s.deviationWithin(q, d.from, len(q.ids), q.clean, d.from); d.worst > s.Capture.drift() {
			d.seq = i
			odd = append(odd, d)
		}
	}
	return odd
}

// probePacking asks whether recorded states are those of a text behind another
// one, or of one that was cut off from its own begin: packed sequences, chunks
// and caches whose attention or recurrence was not kept apart, or not kept.
// odd are the sequences that depart from recomputed states.
func (s *study) probePacking(ctx context.Context, r *Report, odd []deviation) error {
	f := Finding{Key: "packing", Subject: OfCapture, Hypothesis: "recorded states depend on another sequence, or lack their own begin", weight: 4}
	defer func() { r.Findings = append(r.Findings, f) }()
	if s.Recompute == nil || len(s.recordedStates()) == 0 || s.seqs[0].clean == nil {
		f.Verdict, f.Needs, f.Sentence = CannotTell, "recorded states, and the target to recompute them", "The recorded states cannot be compared with recomputed ones."
		return nil
	}
	limit := s.Capture.drift()
	far := make([]count, len(s.seqs))
	for i := range s.seqs {
		far[i].add(slices.ContainsFunc(odd, func(d deviation) bool { return d.seq == i }))
	}
	share := rateOf(far)
	f.Effect = &share
	f.Measure = fmt.Sprintf("sequences whose states are farther from recomputed ones than %.2g: %.0f of %.0f", limit, total(far).hits, total(far).scored)
	if err := s.packingControl(ctx, &f); err != nil {
		return err
	}
	f.Verdict, f.Sentence = RuledOut, "The recorded states of every sequence are those of its own text alone."
	if len(odd) == 0 {
		return nil
	}
	f.Verdict, f.Needs = CannotTell, "the text that stood before it, if one did: more sequences (--limit)"
	f.Sentence = "States differ from recomputed ones, and are not those behind another of these sequences."
	farthest := slices.SortedStableFunc(slices.Values(odd), func(a, b deviation) int { return -cmpFloat(a.worst, b.worst) })
	for _, d := range farthest[:min(len(odd), packedMost)] {
		best, words, err := s.behind(ctx, d)
		if err != nil {
			return err
		}
		if best > d.worst/2 {
			continue
		}
		f.Verdict, f.Needs = Supported, ""
		if best <= limit {
			f.Verdict = Confirmed
		}
		f.Measure += fmt.Sprintf("; those of %s are %.2g from its own and %.2g from those %s", s.seqs[d.seq].ID, d.worst, best, words)
		f.Sentence = fmt.Sprintf("The recorded states of %s from row %d on are those %s: attention, or a recurrent state, was not kept to its own text. Reset both at every sequence's begin, and only there.", s.seqs[d.seq].ID, d.from, words)
		if f.Verdict == Supported {
			f.Sentence = fmt.Sprintf("The recorded states of %s from row %d on are not those of its text alone; nearest are those %s. Text was before it that is not in the sequence: others of a packed row, or a prompt that was not recorded.", s.seqs[d.seq].ID, d.from, words)
		}
		r.explain(f.Key, unexplainedStates...)
		return nil
	}
	return nil
}

// packingControl says by how much another text before a sequence moves its
// states.
func (s *study) packingControl(ctx context.Context, f *Finding) error {
	if len(s.seqs) < 2 {
		return nil
	}
	q, before := s.seqs[1], s.seqs[0]
	rows := min(len(q.ids), controlRows)
	states, err := s.after(ctx, before.ids[:min(len(before.ids), controlRows)], q.ids[:rows])
	if err != nil || states == nil {
		return err
	}
	f.Control = fmt.Sprintf("behind the text of %s, the final states of %s move by %.2g", before.ID, q.ID, s.deviationWithin(s.finalOf(q), 0, rows, states, 0))
	return nil
}

// controlRows bounds the texts that a control is run on.
const controlRows = 256

// finalOf is a sequence whose recorded states are the recomputed final one.
func (s *study) finalOf(q *subject) *subject {
	own := *q
	own.States = map[int][]float32{s.Host.Layers: q.clean[s.Host.Layers]}
	return &own
}

// after recomputes the states of ids behind others; nil where the target takes
// no text of that length.
func (s *study) after(ctx context.Context, before, ids []int32) ([][]float32, error) {
	states, err := s.Recompute(ctx, slices.Concat(before, ids))
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil || states == nil {
		return nil, nil //nolint:nilerr // a text that is too long for the target explains nothing
	}
	out := make([][]float32, len(states))
	for c := range states {
		out[c] = states[c][len(before)*s.Host.Hidden:]
	}
	return out, nil
}

// behind finds what a sequence that is not its own's was behind: nothing, from
// the row on at which it departs, a token that a tokenizer may have added, or
// another sequence.
//
// best is its states' distance from those.
func (s *study) behind(ctx context.Context, d deviation) (best float64, words string, err error) {
	q := s.seqs[d.seq]
	best = d.worst
	try := func(before []int32, what string) error {
		states, err := s.after(ctx, before, q.ids[d.from:])
		if err != nil || states == nil {
			return err
		}
		if got := s.deviationOf(q, d.from, states).worst; got < best {
			best, words = got, what
		}
		return nil
	}
	if d.from > 0 {
		if err := try(nil, "of the text from there on alone"); err != nil || best <= s.Capture.drift() {
			return best, words, err
		}
	}
	for _, id := range s.specials() {
		if err := try([]int32{id}, fmt.Sprintf("of its text behind the token %d", id)); err != nil || best <= s.Capture.drift() {
			return best, words, err
		}
	}
	// The nearest in the order of the dataset first, the one before it before all.
	for step := 1; step <= packedBehind; step++ {
		i := d.seq + step/2
		if step%2 == 1 {
			i = d.seq - (step+1)/2
		}
		if i < 0 || i >= len(s.seqs) {
			continue
		}
		s.tell("putting a sequence behind others", step, packedBehind)
		if err := try(s.seqs[i].ids, "of its text behind that of "+s.seqs[i].ID); err != nil || best <= s.Capture.drift() {
			return best, words, err
		}
	}
	return best, words, nil
}
