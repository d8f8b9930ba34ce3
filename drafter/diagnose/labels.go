package diagnose

import (
	"context"
	"fmt"
	"slices"
)

// probeLabels asks whether the target's answers, as stored and as its stored
// final state gives them, stand where they should.
func probeLabels(_ context.Context, s *study, r *Report) error {
	f, err := s.storedAnswers()
	if err != nil {
		return err
	}
	r.Findings = append(r.Findings, f)
	f, err = s.normForm()
	if err != nil {
		return err
	}
	r.Findings = append(r.Findings, f)
	r.Findings = append(r.Findings, s.vocabulary())
	return nil
}

// storedAnswers scans the offsets of the recorded answers against the text.
func (s *study) storedAnswers() (Finding, error) {
	f := Finding{Key: "capture-labels", Subject: OfCapture, Hypothesis: "the recorded answers of the target are shifted, or another target's", weight: 2}
	f.Control = "on greedy text the answers of the right target at the right place are the text itself"
	answers := make([][]int32, len(s.seqs))
	what := "the recorded target_argmax"
	for i, q := range s.seqs {
		answers[i] = make([]int32, len(q.ids))
		for t, tok := range q.Tokens {
			answers[i][t] = -1
			if tok.TargetArgmax != nil {
				answers[i][t] = *tok.TargetArgmax
			}
		}
		final := q.States[s.Host.Layers]
		if len(final) == len(q.ids)*s.Host.Hidden && answers[i][0] < 0 {
			what = "the head on the recorded final state"
			got, _, err := s.answers(final, nil)
			if err != nil {
				return f, err
			}
			answers[i] = got
		}
	}
	at := func(shift int) (own, other []count) {
		own, other = make([]count, len(s.seqs)), make([]count, len(s.seqs))
		for i, q := range s.seqs {
			for t := range q.ids {
				// The answer at t is for position t+1; q.labels hold the truth.
				if !q.scored(t+1) || !q.scored(t+1+shift) || answers[i][t] < 0 || shift != 0 && q.labels[t+1] == q.labels[t+1+shift] {
					continue
				}
				own[i].scored++
				other[i].scored++
				if answers[i][t] == q.labels[t+1] {
					own[i].hits++
				}
				if answers[i][t] == q.labels[t+1+shift] {
					other[i].hits++
				}
			}
		}
		return own, other
	}
	own, _ := at(0)
	rate := rateOf(own)
	f.Effect = &rate
	if total(own).scored == 0 {
		f.Verdict, f.Needs = CannotTell, "target_argmax or the final state in the capture"
		f.Sentence = "The capture records no answers of the target."
		return f, nil
	}
	f.Measure = fmt.Sprintf("%s equals the target's answer at its place: %s", what, rate.plain())
	best, top := 0, paired{}
	for shift := -maxShift; shift <= maxShift; shift++ {
		if shift == 0 {
			continue
		}
		a, b := at(shift)
		if p := compare(a, b); p.p < familyError/(2*maxShift) && p.gain.Value > top.gain.Value {
			best, top = shift, p
		}
	}
	if best != 0 {
		f.Verdict = Confirmed
		f.Measure += fmt.Sprintf("; where they differ %.3f at 0, %.3f at %+d (%s)", top.a, top.b, best, top.gain.signed())
		f.Sentence = fmt.Sprintf("The recorded answers are shifted by %s: the one at position t is for the token at t%+d, not t+1.", tokens(best), 1+best)
		return f, nil
	}
	wrong, by := wrongSequences(own, at)
	switch {
	case s.seqs[0].clean == nil:
		f.Verdict, f.Sentence = RuledOut, "The recorded answers peak at their own place."
	case wrong > 0 && by != 0:
		f.Verdict = Confirmed
		f.Sentence = fmt.Sprintf("In %d of %d sequences the recorded answers are shifted by %s: the one at position t is for the token at t%+d, not t+1.", wrong, len(s.seqs), tokens(by), 1+by)
	case wrong > 0:
		f.Verdict = Supported
		f.Sentence = fmt.Sprintf("In %d of %d sequences the recorded answers are not this target's: fewer than half of them equal its argmax.", wrong, len(s.seqs))
	case rate.High < s.Capture.sameAnswers():
		f.Verdict = Supported
		f.Sentence = fmt.Sprintf("The recorded answers are not this target's: only %.1f %% equal its argmax. Check the weights that were captured, or the numerics.", 100*rate.Value)
	default:
		f.Verdict, f.Sentence = RuledOut, "The recorded answers are the target's, at their place."
	}
	return f, nil
}

// fewAnswers is from how many answers on a sequence is judged by itself.
const fewAnswers = 20

// wrongSequences counts sequences most of whose answers are not the target's,
// which no rounding does, and says by how many tokens they are shifted; 0 is by
// none that fits them all.
func wrongSequences(own []count, at func(shift int) (own, other []count)) (n, by int) {
	var wrong []int
	for i, c := range own {
		if c.scored >= fewAnswers && c.rate() < 0.5 {
			wrong = append(wrong, i)
		}
	}
	for shift := -maxShift; shift <= maxShift && len(wrong) > 0; shift++ {
		_, other := at(shift)
		if shift != 0 && !slices.ContainsFunc(wrong, func(i int) bool { return !(other[i].rate() >= nearMatch) }) {
			by = shift
		}
	}
	return len(wrong), by
}

// sameAnswers is the share of answers that the same target gives at least:
// low precision turns a near tie here and there.
func (c Capture) sameAnswers() float64 {
	if c.Exact {
		return exactMatch
	}
	return nearMatch
}

// vocabulary checks that tokens and answers are of the head's vocabulary, and
// whether the drafter brings an embedding or head of its own.
func (s *study) vocabulary() Finding {
	f := Finding{Key: "vocabulary", Subject: OfCapture, Hypothesis: "tokens, answers or drafts are of another vocabulary", weight: 2}
	outside, seen := 0, 0
	masked := 0
	for _, q := range s.seqs {
		for _, t := range q.Tokens {
			seen++
			if t.TokenID < 0 || int(t.TokenID) >= s.Host.Vocab || t.TargetArgmax != nil && (*t.TargetArgmax < 0 || int(*t.TargetArgmax) >= s.Host.Vocab) {
				outside++
			}
			if t.TokenID == s.spec.MaskToken {
				masked++
			}
		}
	}
	f.Measure = fmt.Sprintf("%d of %d tokens or answers outside the vocabulary of %d; %d are the mask token %d", outside, seen, s.Host.Vocab, masked, s.spec.MaskToken)
	switch {
	case outside > 0:
		f.Verdict, f.Sentence = Confirmed, "The capture has tokens that the target's head does not have: tokenizer and weights do not belong together."
	case masked > 0:
		// Trainers without a mask token of their own take the stop or padding
		// token, so that this alone is no fault.
		f.Verdict, f.Needs = CannotTell, "the mask token of the training; see the finding mask-token"
		f.Sentence = fmt.Sprintf("The drafter's mask token %d occurs in ordinary text: it is the stop or padding token, or another id was meant.", s.spec.MaskToken)
	default:
		f.Verdict, f.Sentence = RuledOut, "All tokens are of the target's vocabulary, and none is the drafter's mask token."
	}
	return f
}
