package diagnose

import (
	"fmt"
	"slices"
)

// matters is the share of the mean 1/rank that hiding something must cost at
// least before a drafter is said to read it. What surely costs less than half
// of that is not read.
const matters = 0.05

// unread is something that the declared graph gives a drafter and that it never
// had in training: hiding it costs nothing, though it costs every drafter that
// had it a good part of its hits. A drafter that reads nothing yet must not
// look so, therefore it must read other things.
type unread struct {
	key      string
	trial    trial
	sentence string
}

// hides says that a family's variants keep from the drafter what it should
// have read in training.
func hides(key string) bool { return key == "slot-0" || key == "context-end" || key == "tap-late" }

// unread finds the anchor's token (slot 0 held the mask in training) or the
// last state before the anchor (taps were late, or the context ended early)
// among the trials; nil is neither.
func (s *study) unread(trials []trial, best []string) *unread {
	of := func(key string, index int) *trial {
		for i := range trials {
			if trials[i].key == key {
				if index == 0 {
					return &trials[i]
				}
				index--
			}
		}
		return nil
	}
	free := func(t *trial) bool { return t != nil && t.a > 0 && t.gain.Low > -matters/2*t.a }
	costs := func(t *trial) bool { return t != nil && t.gain.High < -matters*t.a }
	token, early, late, end := of("slot-0", 0), of("tap-late", 0), of("tap-late", 1), of("context-end", 0)
	if token == nil || early == nil || late == nil || end == nil || !token.skilled || !end.skilled || !s.readsFar(trials) {
		return nil
	}
	for _, t := range trials { // a mismatch that large explains anything
		if slices.Contains(best, t.key) && !hides(t.key) && t.wide != nil && t.gain.Value > matters*t.a {
			return nil
		}
	}
	switch {
	case free(end) && costs(token):
		if late.gain.Value >= end.gain.Value {
			return &unread{"tap-late", *late, "In training the taps were a token late: the state right before the anchor, the most telling there is, never reached the drafter, and it does as well with every tap late by a token. Row t must hold the state of token t."}
		}
		return &unread{"context-end", *end, "In training the context ended a token early: the state right before the anchor, the most telling there is, never reached the drafter, and it does as well without. The context is t < a, a−1 included."}
	case free(token) && costs(late) && (len(best) == 0 || best[0] == "slot-0"):
		return &unread{"slot-0", *token, "The drafter never learnt to read the anchor's token: with the mask token in slot 0 it drafts as well. Slot 0 must carry the anchor's token in training, as it does in an engine."}
	}
	return nil
}

// readsFar says that the drafter reads the context beyond its last rows.
func (s *study) readsFar(trials []trial) bool {
	for _, t := range trials {
		if t.key == "window" && t.a > 0 && t.gain.High < -matters*t.a {
			return true
		}
	}
	return false
}

// finding turns it into a verdict.
func (u *unread) finding(s *study, f *Finding) {
	f.describe(s, u.trial)
	f.Verdict, f.Sentence, f.weight = Confirmed, u.sentence, 1
	f.Control = fmt.Sprintf("a drafter that had it in training loses more than %.0f %% of the mean 1/rank without; this one at most %.1f %%", 100*matters, -100*min(u.trial.gain.Low, 0)/u.trial.a)
}
