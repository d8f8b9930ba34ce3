package diagnose

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/draftscope/draftscope/cuda"
)

// How far two logits may move against each other before a token other than the
// likelier is no rounding: this many times what a state that is off by all
// that the capture allows, in any direction, does to them in the mean square.
// Another engine's errors are not of any direction alike.
const (
	ownMargin   = 4
	otherMargin = 8
)

// oftenOther is the share of tokens from which on another engine's text at
// temperature 0 is taken for one that was chosen otherwise, by penalties say.
const oftenOther = 0.05

// odd is a committed token that plain greedy decoding would not have given.
type oddToken struct {
	seq, at       int
	margin, noise float64 // of logits
}

// probeLossless compares the text that the target wrote at temperature 0 with
// its likeliest token behind the same text: verification that is lossless
// commits nothing else, but for near ties.
func probeLossless(_ context.Context, s *study, r *Report) error {
	f := Finding{Key: "lossless", Subject: OfEngine, Hypothesis: "tokens were committed that the target does not give greedily", weight: 3}
	odd, ties, counts, err := s.oddTokens()
	if err != nil {
		return err
	}
	all := total(counts)
	if all.scored == 0 {
		f.Verdict, f.Needs, f.Sentence = CannotTell, "text that the target wrote at temperature 0, and the target", "No text here is said to be the target's greedy one."
		r.Findings = append(r.Findings, f)
		return nil
	}
	rate := rateOf(counts)
	f.Effect = &rate
	f.Measure = fmt.Sprintf("of %.0f tokens at temperature 0, %.0f are not the target's likeliest by more than arithmetic explains, %d by less", all.scored, all.hits, ties)
	f.Control = "a token put in another's place is likelier by far than by arithmetic"
	switch {
	case len(odd) == 0:
		f.Verdict, f.Sentence = RuledOut, "The text is the target's own greedy one: verification lost nothing."
	case !s.Capture.Exact && rate.Value > oftenOther:
		f.Verdict, f.Needs = CannotTell, "the engine's sampling options (penalties, processors, a grammar)"
		f.Sentence = "The text is declared greedy and is not the target's: that many tokens are chosen otherwise, not committed wrongly."
	default:
		f.Verdict = Confirmed
		if !s.Capture.Exact {
			f.Verdict = Supported
		}
		top := slices.MaxFunc(odd, func(a, b oddToken) int { return cmpFloat(a.margin/a.noise, b.margin/b.noise) })
		q := s.seqs[top.seq]
		f.Measure += fmt.Sprintf("; at %s, token %d, %d stands for %d, whose logit is %.3g more (arithmetic moves it by %.2g)", q.ID, top.at, q.ids[top.at], q.labels[top.at], top.margin, top.noise)
		f.Sentence = fmt.Sprintf("%s committed that the target does not give greedily, first in %s at token %d%s: verification is not lossless.", tokenCount(len(odd)), s.seqs[odd[0].seq].ID, odd[0].at, s.seqs[odd[0].seq].committed(odd[0].at))
	}
	r.Findings = append(r.Findings, f)
	return nil
}

func tokenCount(n int) string {
	if n == 1 {
		return "One token was"
	}
	return fmt.Sprintf("%d tokens were", n)
}

// committed says in which stored round a token was committed.
func (q *subject) committed(at int) string {
	for _, r := range q.Rounds {
		switch by := at - int(r.Anchor); {
		case by >= 1 && by <= int(r.Accepted):
			return fmt.Sprintf(", as accepted draft %d of round %d", by, r.Round)
		case by == int(r.AcceptLen):
			return fmt.Sprintf(", as the target's own token of round %d", r.Round)
		}
	}
	return ""
}

// oddTokens are the generated tokens of greedy texts that are not the target's
// likeliest, beyond arithmetic; ties counts those within it.
func (s *study) oddTokens() (odd []oddToken, ties int, counts []count, err error) {
	counts = make([]count, len(s.seqs))
	norm := s.finalNorm()
	h := s.Host
	z := make([]float32, h.Hidden)
	for i, q := range s.seqs {
		if !q.Greedy || q.clean == nil {
			continue
		}
		for t := max(q.PromptLen, 1); t < len(q.ids); t++ {
			if !q.scored(t) {
				continue
			}
			counts[i].scored++
			if q.ids[t] == q.labels[t] {
				continue
			}
			norm(z, q.clean[h.Layers][(t-1)*h.Hidden:t*h.Hidden])
			o := oddToken{seq: i, at: t}
			if o.margin, o.noise, err = s.margin(z, q.labels[t], q.ids[t]); err != nil {
				return nil, 0, nil, err
			}
			if o.margin <= o.noise {
				ties++
				continue
			}
			counts[i].hits++
			odd = append(odd, o)
		}
	}
	return odd, ties, counts, nil
}

// margin is by how much the logit of a is more than that of b for a normed
// state, and what arithmetic may move that by.
func (s *study) margin(z []float32, a, b int32) (margin, noise float64, err error) {
	h := s.Host.Hidden
	if b < 0 || int(b) >= s.Host.Vocab {
		return math.Inf(1), 0, nil
	}
	buf, err := s.Device.New(2 * h)
	if err != nil {
		return 0, 0, err
	}
	defer buf.Close()
	rows, vals := cuda.Matrix(buf, 2, h), make([]float32, 2*h)
	if err := s.Device.GatherRows(rows, s.Host.Head, []int32{a, b}); err != nil {
		return 0, 0, err
	}
	if err := s.Device.Download(vals, rows); err != nil {
		return 0, 0, err
	}
	var length, apart float64
	for i, v := range z {
		d := float64(vals[i]) - float64(vals[h+i])
		margin += d * float64(v)
		length += float64(v) * float64(v)
		apart += d * d
	}
	times := float64(ownMargin)
	if !s.Capture.Exact {
		times = otherMargin
	}
	return margin, times * s.Capture.drift() * math.Sqrt(length*apart/float64(h)), nil
}

// rejection is where a round left drafts that the target refused: rows from
// next on must not know of them.
type rejection struct {
	next    int
	refused []int32
}

// rejections are a sequence's rounds that refused drafts, in order.
func (q *subject) rejections() []rejection {
	var out []rejection
	for _, r := range q.Rounds {
		if r.Truncated || r.Accepted >= r.Proposed {
			continue
		}
		j := rejection{next: int(r.Anchor + r.AcceptLen)}
		if d := q.Drafts[r.Anchor]; int(r.Accepted) < len(d) {
			j.refused = d[r.Accepted:min(len(d), int(r.Proposed))]
		}
		out = append(out, j)
	}
	return out
}

// rarely is how likely it may be that states depart where a round refused
// drafts, by chance, before that is said.
const rarely = 0.01

// probeRollback asks whether recorded states are their own up to a round that
// refused drafts, and not behind it: keys or a recurrent state that still hold
// what was refused. odd are the sequences that depart from recomputed states.
func (s *study) probeRollback(ctx context.Context, r *Report, odd []deviation) error {
	f := Finding{Key: "rollback", Subject: OfEngine, Hypothesis: "states were not restored after a round that refused drafts", weight: 4.5}
	defer func() { r.Findings = append(r.Findings, f) }()
	rounds := 0
	for _, q := range s.seqs {
		rounds += len(q.rejections())
	}
	switch {
	case s.seqs[0].clean == nil || len(s.recordedStates()) == 0 || rounds == 0:
		f.Verdict, f.Needs, f.Sentence = CannotTell, "recorded states, the target, and rounds of this drafter in the dataset", "Where drafts were refused is not known."
		return nil
	case len(odd) == 0:
		f.Verdict, f.Sentence = RuledOut, "The recorded states behind refused drafts are those of the text alone."
		f.Measure = fmt.Sprintf("no state departs behind any of %d rounds that refused drafts", rounds)
		f.Effect = &Interval{}
		return s.rollbackControl(ctx, &f)
	}
	if err := s.rollbackControl(ctx, &f); err != nil {
		return err
	}
	f.Verdict, f.Needs, f.Sentence = CannotTell, "states that depart from recomputed ones at a round's end", "States depart from recomputed ones, and not where drafts were refused."
	here, chance := make([]count, len(s.seqs)), 1.0
	var replayed bool
	for _, d := range odd {
		q := s.seqs[d.seq]
		js := q.rejections()
		i := slices.IndexFunc(js, func(j rejection) bool { return j.next == d.from })
		chance *= float64(len(js)) / float64(max(len(q.ids)-q.PromptLen, 1))
		here[d.seq].add(i >= 0)
		if i < 0 {
			continue
		}
		if replayed || total(here).hits > packedMost || len(js[i].refused) == 0 {
			continue
		}
		if err := s.replayRefused(ctx, &f, d, js[i]); err != nil {
			return err
		}
		replayed = f.Verdict == Confirmed
	}
	share := rateOf(here)
	f.Effect = &share
	f.Measure += fmt.Sprintf("%.0f of %d sequences that depart from recomputed states do so at the first row behind a round that refused drafts", total(here).hits, len(odd))
	if share.Value == 1 && chance < rarely && !replayed {
		f.Verdict, f.Needs = Supported, ""
		f.Measure += fmt.Sprintf(" (by chance %.1g)", chance)
		f.Sentence = fmt.Sprintf("In every sequence that departs, states are right up to a round that refused drafts and wrong behind it (%s, row %d): what was refused is still in the cache, or in a recurrent state.", s.seqs[odd[0].seq].ID, odd[0].from)
	}
	if f.Verdict != CannotTell {
		r.explain(f.Key, append([]string{"packing"}, unexplainedStates...)...)
	}
	return nil
}

// rollbackControl says by how much refused drafts that are left in move the
// rows behind them.
func (s *study) rollbackControl(ctx context.Context, f *Finding) error {
	for _, q := range s.seqs {
		for _, j := range q.rejections() {
			if len(j.refused) == 0 || q.clean == nil || j.next >= len(q.ids) {
				continue
			}
			until := min(len(q.ids), j.next+controlRows)
			states, err := s.after(ctx, slices.Concat(q.ids[:j.next], j.refused), q.ids[j.next:until])
			if err != nil || states == nil {
				return err
			}
			f.Control = fmt.Sprintf("left in, the %d drafts refused before row %d of %s move its final states by %.2g", len(j.refused), j.next, q.ID, s.deviationWithin(s.finalOf(q), j.next, until, states, 0))
			return nil
		}
	}
	return nil
}

// replayRefused recomputes a sequence with the refused drafts left in it.
func (s *study) replayRefused(ctx context.Context, f *Finding, d deviation, j rejection) error {
	q := s.seqs[d.seq]
	states, err := s.after(ctx, slices.Concat(q.ids[:j.next], j.refused), q.ids[j.next:])
	if err != nil || states == nil {
		return err
	}
	// Later rounds leave more behind: the rows up to the next one tell.
	until := len(q.ids)
	for _, other := range q.rejections() {
		if other.next > j.next {
			until = other.next
			break
		}
	}
	own, kept := s.deviationWithin(q, j.next, until, q.clean, j.next), s.deviationWithin(q, j.next, until, states, 0)
	if kept > s.Capture.drift() || kept > own/2 {
		return nil
	}
	f.Verdict, f.Needs = Confirmed, ""
	f.Measure = fmt.Sprintf("rows %d to %d of %s are %.2g from those of the text and %.2g from those of the text with the %d refused drafts left in; ", j.next, until-1, q.ID, own, kept, len(j.refused))
	f.Sentence = fmt.Sprintf("States were not restored after a round: from row %d of %s on they still hold the %d drafts that the target refused before it.", j.next, q.ID, len(j.refused))
	return nil
}

// deviationWithin is [study.deviationOf] of rows lo..hi-1 alone; states begin
// at row lo less skip.
func (s *study) deviationWithin(q *subject, lo, hi int, states [][]float32, skip int) float64 {
	h := s.Host.Hidden
	part := &subject{ids: q.ids[lo:hi], Sequence: Sequence{States: map[int][]float32{}}}
	for c, vals := range q.States {
		if len(vals) == len(q.ids)*h {
			part.States[c] = vals[lo*h : hi*h]
		}
	}
	cut := make([][]float32, len(states))
	for c, vals := range states {
		cut[c] = vals[skip*h : (skip+hi-lo)*h]
	}
	return s.deviationOf(part, 0, cut).worst
}

// explain turns alarms that another finding explains into ones that cannot be
// told before it is put right.
func (r *Report) explain(by string, keys ...string) {
	for i := range r.Findings {
		if e := &r.Findings[i]; slices.Contains(keys, e.Key) && e.alarm() {
			e.Verdict, e.Needs = CannotTell, by+" to be put right first"
		}
	}
}
