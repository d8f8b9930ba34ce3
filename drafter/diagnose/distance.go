package diagnose

import (
	"fmt"
	"slices"
	"strings"
)

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
			to := &far[i]
			if int(sl.Anchor)-q.replyBegin(int(sl.Anchor)) < nearPrompt {
				to = &near[i]
			}
			to.add(*sl.Hit)
		}
	}
	return near, far
}

// reaches are the ends of the buckets of an anchor's distance from its
// reply's begin.
var reaches = []int{nearPrompt, 64, 256}

// byReach says the engine's hits by bucket of the distance.
func (s *study) byReach(runs []engineRun) string {
	buckets := make([]count, len(reaches)+1)
	for i, e := range runs {
		q := s.seqs[i]
		for _, sl := range e.slots {
			if sl.Hit == nil || int(sl.Slot) > variantSlots {
				continue
			}
			b, _ := slices.BinarySearch(reaches, int(sl.Anchor)-q.replyBegin(int(sl.Anchor))+1)
			buckets[b].add(*sl.Hit)
		}
	}
	var words []string
	for b, c := range buckets {
		if c.scored > 0 {
			words = append(words, fmt.Sprintf("%.3f from %d", c.rate(), append([]int{0}, reaches...)[b]))
		}
	}
	return strings.Join(words, ", ")
}

func (c *count) add(hit bool) {
	c.scored++
	if hit {
		c.hits++
	}
}

// replyBegin is where the supervised run of an anchor begins.
func (q *subject) replyBegin(anchor int) int {
	for anchor > 0 && q.mask[anchor-1] {
		anchor--
	}
	return anchor
}

// probeThoughts compares the hits within thoughts with those behind them. Both
// are other text, so that a difference is no fault.
func (s *study) probeThoughts(r *Report, runs []engineRun) {
	f := Finding{Key: "thinking-hits", Subject: OfDrafter, Hypothesis: "it drafts otherwise within thoughts than behind them", weight: 0.1}
	f.Control = "hits that are planted behind thoughts alone are told from those within"
	in, behind := make([]count, len(runs)), make([]count, len(runs))
	for i, e := range runs {
		q := s.seqs[i]
		where := s.thoughtPlaces(q)
		for _, sl := range e.slots {
			if sl.Hit == nil || int(sl.Slot) > variantSlots {
				continue
			}
			switch where[sl.Anchor+sl.Slot] {
			case inThought:
				in[i].add(*sl.Hit)
			case behindThought:
				behind[i].add(*sl.Hit)
			}
		}
	}
	a, b := total(in), total(behind)
	if a.scored == 0 || b.scored == 0 {
		f.Verdict, f.Needs, f.Sentence = CannotTell, "replies with a thought, <think> to </think>, and text behind it", "No reply holds both."
		r.Findings = append(r.Findings, f)
		return
	}
	f.Note = true
	gain := bootstrap(len(runs), func(c []float64) float64 {
		var a, b count
		for i, k := range c {
			a.hits, a.scored = a.hits+k*in[i].hits, a.scored+k*in[i].scored
			b.hits, b.scored = b.hits+k*behind[i].hits, b.scored+k*behind[i].scored
		}
		return a.rate() - b.rate()
	})
	f.Effect = &gain
	f.Measure = fmt.Sprintf("hits of slots 1–%d: %.3f of %.0f within thoughts, %.3f of %.0f behind them (%s)", variantSlots, a.rate(), a.scored, b.rate(), b.scored, gain.signed())
	switch {
	case gain.High < 0:
		f.Verdict, f.Sentence = Confirmed, fmt.Sprintf("It hits less within thoughts (%.3f) than behind them (%.3f): thoughts are harder, or were not in its training.", a.rate(), b.rate())
	case gain.Low > 0:
		f.Verdict, f.Sentence = Confirmed, fmt.Sprintf("It hits more within thoughts (%.3f) than behind them (%.3f).", a.rate(), b.rate())
	default:
		f.Verdict, f.Needs, f.Sentence = CannotTell, "more sequences", "Within thoughts and behind them it hits about alike."
	}
	r.Findings = append(r.Findings, f)
}

// The places of a token in a reply that holds a thought.
const (
	inThought = iota + 1
	behindThought
)

// thoughtPlaces marks the tokens of a sequence that are within a thought or
// behind one.
func (s *study) thoughtPlaces(q *subject) []int {
	out := make([]int, len(q.ids))
	if s.Text == nil {
		return out
	}
	q.turnsOf(func(lo, hi int) {
		begin, _ := s.headerEnd(q, lo, hi)
		th, ok := s.thoughtOf(q, begin, hi)
		if q.Tokens[lo].Role != roleAssistant || !ok || th.kind == 0 {
			return
		}
		for t := th.open; t < hi; t++ {
			out[t] = inThought
			if t > th.shut {
				out[t] = behindThought
			}
		}
	})
	return out
}

// probeDistance compares hits near the prompt and far from it with the
// reference's. A drafter whose masks began at the wrong token in training
// differs there from one whose did not; so does a drafter that merely learnt
// less, so that a difference decides nothing, and only its absence does.
func (s *study) probeDistance(r *Report, runs, reference []engineRun) {
	f := Finding{Key: "distance", Subject: OfTraining, Hypothesis: "hits depend on the distance from the prompt as the reference's do not", Note: true, weight: 0.1}
	near, far := s.nearAndFar(runs)
	f.Measure = fmt.Sprintf("hits of slots 1–%d within %d tokens of a reply's begin %.3f, later %.3f; by distance %s", variantSlots, nearPrompt, total(near).rate(), total(far).rate(), s.byReach(runs))
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
