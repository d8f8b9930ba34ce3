package diagnose

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/drafter"
)

// smallEffect is a twentieth of the hits: what less is lost without a tap is
// called small, which says that the tap is not why a drafter is bad.
const smallEffect = 0.05

// probeTaps says whether the target's final state is among the taps, what it
// is worth, and how much each tap is used. best are the keys of the graph that
// drafts best.
func (s *study) probeTaps(r *Report, trials []trial, best []string) {
	n := s.Host.Layers
	final := -1
	var use []string
	for p, t := range s.spec.Taps {
		if t.State == n {
			final = p
		}
		for _, tr := range trials {
			if tr.key == "tap-use" && tr.graph.Mute == p+1 {
				use = append(use, fmt.Sprintf("without tap %d (state %d) %.3f", p, t.State, tr.hits.b))
			}
		}
	}
	f := Finding{Key: keyFinalTap, Subject: OfDrafter, Hypothesis: "the target's own final state is among the taps", weight: 0.5}
	f.Measure = fmt.Sprintf("taps read the states %v of %d", s.spec.States(), n)
	if len(use) > 0 {
		f.Measure += "; hits: " + strings.Join(use, ", ")
	}
	if final < 0 {
		f.Verdict = RuledOut
		f.Sentence = fmt.Sprintf("The drafter reads states up to %d; the final state %d, which gives the labels, is not among them.", highest(s), n)
		r.Findings = append(r.Findings, f)
		return
	}
	for _, tr := range trials {
		if len(best) > 0 && tr.key == best[0] && tr.key == "state-number" && !slices.ContainsFunc(tr.graph.Taps, func(t drafter.Tap) bool { return t.State == n }) {
			f.Verdict, f.Needs = CannotTell, "target_layer_ids that are those of the training"
			f.Sentence = "The configuration names the final state, but all of its layer ids are off."
			r.Findings = append(r.Findings, f)
			return
		}
	}
	f.Verdict = Confirmed
	effect := "its effect cannot be measured: it is the only tap"
	for _, tr := range trials {
		if tr.key == "tap-use" && tr.graph.Mute == final+1 {
			gain := Interval{-tr.hits.gain.Value, -tr.hits.gain.High, -tr.hits.gain.Low}
			f.Effect = &gain
			size := "its effect on the drafts:"
			if gain.Value < smallEffect*tr.hits.a {
				size = "its effect on the drafts is small:"
			}
			effect = fmt.Sprintf("%s leaving it out costs %.3f of %.3f hits (%s)", size, gain.Value, tr.hits.a, gain.signed())
		}
	}
	f.Measure += "; " + effect
	f.Control = "with the context strictly before the anchor, the final state at a−1 only tells the anchor itself, which slot 0 shows already: it is no leak"
	f.Sentence = fmt.Sprintf("The target's own final state (state %d, layer id %d) is among the taps: it feeds both the drafter and the labels. That is not the reference's choice (at most layer n−3); %s.", n, n-1, effect)
	r.Findings = append(r.Findings, f)
}

func highest(s *study) int {
	top := 0
	for _, t := range s.spec.Taps {
		top = max(top, t.State)
	}
	return top
}

// probeAsCaptured drafts once more on the states as they are stored, which
// shows what a fault of the capture costs this drafter.
func (s *study) probeAsCaptured(ctx context.Context, r *Report, rep *replica, base []count) ([]measured, error) {
	for _, q := range s.seqs {
		if q.clean == nil {
			return nil, nil // the stored states are all that there is
		}
		for _, t := range s.spec.Taps {
			if q.States[t.State] == nil {
				return nil, nil // not recorded: nothing to compare
			}
		}
	}
	ms, err := s.scan(ctx, rep, []Graph{Declared(s.spec)}, variantSlots, true)
	if err != nil {
		return nil, err
	}
	p := compare(base, s.hits(ms[0], s.shift))
	f := Finding{Key: keyAsCaptured, Subject: OfCapture, Hypothesis: "the stored states make the drafter worse", Effect: &p.gain, Note: true}
	f.Measure = fmt.Sprintf("hits of slots 1–%d: %.3f on recomputed states, %.3f on the stored ones (%s)", ms[0][0].slots, p.a, p.b, p.gain.signed())
	switch {
	case p.gain.High < 0:
		f.Verdict = Confirmed
		f.Sentence = fmt.Sprintf("On the states as captured the drafter hits %.3f instead of %.3f.", p.b, p.a)
	case p.gain.Low > -relevance*p.a:
		f.Verdict = RuledOut
		f.Sentence = "The drafter does as well on the stored states as on recomputed ones."
	default:
		f.Verdict = CannotTell
		f.Needs = "more sequences"
		f.Sentence = "The difference is too small for these sequences."
	}
	r.Findings = append(r.Findings, f)
	return ms[0], nil
}
