package diagnose

import "fmt"

// nearPrompt is within how many tokens of a reply's begin an anchor is near
// it: a block, so that a border of the mask that is off by less shows.
const nearPrompt = 16

// nearAndFar counts the engine's hits at anchors near a reply's begin and at
// the others.
func (s *study) nearAndFar(runs []engineRun) (near, far []count) {
	near, far = make([]count, len(runs)), make([]count, len(runs))
	for i, e := range runs {
		q := s.seqs[i]
		for _, sl := range e.slots {
			if sl.Hit == nil || int(sl.Slot) > variantSlots {
				continue
			}
			begin := int(sl.Anchor)
			for begin > 0 && q.mask[begin-1] {
				begin--
			}
			to := &far[i]
			if int(sl.Anchor)-begin < nearPrompt {
				to = &near[i]
			}
			to.scored++
			if *sl.Hit {
				to.hits++
			}
		}
	}
	return near, far
}

// probeDistance compares hits near the prompt and far from it with the
// reference's. A drafter whose masks began at the wrong token in training
// differs there from one whose did not; so does a drafter that merely learnt
// less, so that a difference decides nothing, and only its absence does.
func (s *study) probeDistance(r *Report, runs, reference []engineRun) {
	f := Finding{Key: "distance", Subject: OfTraining, Hypothesis: "hits depend on the distance from the prompt as the reference's do not", Note: true, weight: 0.1}
	near, far := s.nearAndFar(runs)
	f.Measure = fmt.Sprintf("hits of slots 1–%d within %d tokens of a reply's begin %.3f, later %.3f", variantSlots, nearPrompt, total(near).rate(), total(far).rate())
	if reference == nil {
		f.Verdict, f.Needs, f.Sentence = CannotTell, "--reference", "Without a reference no difference is expected or odd."
		r.Findings = append(r.Findings, f)
		return
	}
	refNear, refFar := s.nearAndFar(reference)
	gain := bootstrap(len(runs), func(c []float64) float64 {
		rate := func(cs []count) float64 {
			var t count
			for i, k := range c {
				t.hits += k * cs[i].hits
				t.scored += k * cs[i].scored
			}
			return t.rate()
		}
		return (rate(near) - rate(far)) - (rate(refNear) - rate(refFar))
	})
	f.Effect = &gain
	f.Measure += fmt.Sprintf("; of %s %.3f and %.3f; difference of the differences %s", s.Reference.Name, total(refNear).rate(), total(refFar).rate(), gain.signed())
	switch {
	case gain.Low > 0 || gain.High < 0:
		f.Verdict, f.Needs = CannotTell, "a reference that was trained as far, or the masks of both trainings"
		f.Sentence = "Near the prompt it differs from its reference otherwise than later on. Masks that begin at another token do that; so does less training."
	default:
		f.Verdict, f.Sentence = RuledOut, "Near the prompt and far from it, it differs from its reference alike: nothing speaks for a mask that began at another token in training."
	}
	r.Findings = append(r.Findings, f)
}
