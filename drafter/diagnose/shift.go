package diagnose

import (
	"fmt"
	"math"
	"strings"
)

// The offsets that a shift scan tries.
const maxShift = 2

// shiftPair counts, on the slots whose labels from and to tokens further on
// differ, hits of the two: repetitions would blur them.
func (s *study) shiftPair(ms []measured, from, to int) (own, other []count) {
	own, other = make([]count, len(ms)), make([]count, len(ms))
	for i, m := range ms {
		q := s.seqs[i]
		for j, a := range m.anchors {
			for k := 1; k <= m.slots; k++ {
				t := int(a) + k
				if !q.scored(t) || !q.scored(t+from) || !q.scored(t+to) || q.labels[t+from] == q.labels[t+to] {
					continue
				}
				own[i].scored++
				other[i].scored++
				switch m.tokens[j*m.slots+k-1] {
				case q.labels[t+from]:
					own[i].hits++
				case q.labels[t+to]:
					other[i].hits++
				}
			}
		}
	}
	return own, other
}

// bySlot is the accuracy of each slot against labels shift tokens further on.
func (s *study) bySlot(ms []measured, shift int) []float64 {
	if len(ms) == 0 {
		return nil
	}
	counts := make([]count, ms[0].slots)
	for i, m := range ms {
		q := s.seqs[i]
		for j, a := range m.anchors {
			for k := 1; k <= m.slots; k++ {
				t := int(a) + k
				if !q.scored(t) || !q.scored(t+shift) {
					continue
				}
				counts[k-1].scored++
				if m.tokens[j*m.slots+k-1] == q.labels[t+shift] {
					counts[k-1].hits++
				}
			}
		}
	}
	out := make([]float64, len(counts))
	for k, c := range counts {
		if c.scored > 0 {
			out[k] = c.hits / c.scored
		}
	}
	return out
}

// copied is how often a drafter whose labels are tokens that it is given must
// hit them.
const copied = 0.9

// copies says that the first n slots give the anchor and the tokens before it,
// which are the labels of a drafter whose labels were shifted by −n: it learns
// at once to repeat them.
func (s *study) copies(ms []measured, n int) bool {
	for _, hits := range s.bySlot(ms, -n)[:n] {
		if hits < copied {
			return false
		}
	}
	return true
}

// peaks says that a drafter hits the labels at an offset more often than those
// at any other. One that hardly reads its context drafts frequent tokens, and
// hits whatever offset has more of them, which is no offset that it learnt.
// All comparisons must hold, so that none needs a share of the error.
func (s *study) peaks(ms []measured, shift int) bool {
	for other := -maxShift; other <= maxShift; other++ {
		if other == shift {
			continue
		}
		if p := compare(s.shiftPair(ms, other, shift)); p.p >= familyError || p.gain.Value <= 0 {
			return false
		}
	}
	return true
}

// lags says that drafts are those of tokens before, as the declared graph's
// are: labels that were shifted back do that under any graph, so that one which
// leaves it so has not put right what is wrong. One that repeats the anchor
// hits more of the labels that count when the anchor is hidden from it, or when
// other anchors are shown: such a variant must do more than that.
func (s *study) lags(v variant, ms []measured) bool {
	switch {
	case s.lag == 0:
		return false
	case s.lagHits > 0 && (v.key == "slot-0" || v.key == "across-blocks"):
		return rateOf(s.hits(ms, 0)).Value < putRight*s.lagHits
	}
	own, other := s.shiftPair(ms, 0, s.lag)
	return total(other).hits >= total(own).hits
}

// How often slot 1 of a drafter that learnt little of labels from before must
// give the anchor, and how many times as often as its own label.
const (
	copiedLittle = 0.25
	copiedTimes  = 4
	putRight     = 2 // times the hits at the offset that it learnt
)

// copiesLittle says so of a drafter whose drafts are of one token before.
func (s *study) copiesLittle(declared []measured) bool {
	own, back := s.bySlot(declared, 0), s.bySlot(declared, -1)
	return back[0] >= copiedLittle && back[0] >= copiedTimes*own[0] && s.skilled(declared, -1)
}

// lagStays turns the finding about shifted labels into an alarm where drafts
// are of tokens before, slot 1 is the anchor more than anything else, and no
// graph, early taps and the anchor's states among them, changes that.
func (s *study) lagStays(r *Report, declared []measured) {
	if s.lagHits == 0 {
		return
	}
	own, back := s.bySlot(declared, 0), s.bySlot(declared, s.lag)
	for i := range r.Findings {
		if f := &r.Findings[i]; f.Key == keyShift {
			f.Verdict, f.Needs = Supported, ""
			f.Measure += fmt.Sprintf("; slot 1 is the anchor in %.3f and its own label in %.3f, and is so under every graph that was tried", back[0], own[0])
			f.Sentence = "The drafter learnt labels shifted by one token: slot k drafts the token at a+k-1, the anchor first, which it is given. The target's logits at position a+k−1, which are those for the token at a+k, are slot k's label."
		}
	}
}

// probeShift scans the offsets −2..+2 and notes the drafter's own.
func (s *study) probeShift(r *Report, declared []measured) {
	best, bestPair := 0, paired{}
	undecided := false
	for shift := -maxShift; shift <= maxShift; shift++ {
		r.Offsets = append(r.Offsets, Offsets{shift, s.bySlot(declared, shift), rateOf(s.hits(declared, shift))})
		if shift == 0 {
			continue
		}
		own, other := s.shiftPair(declared, 0, shift)
		p := compare(own, other)
		if p.p < familyError/(2*maxShift) && p.gain.Value > 0 {
			if best == 0 || p.gain.Value > bestPair.gain.Value {
				best, bestPair = shift, p
			}
		} else if p.gain.High > 0 {
			undecided = true
		}
		if best == 0 && (bestPair.a == 0 || p.gain.Value > bestPair.gain.Value) {
			bestPair = p
		}
	}
	if best != 0 && !s.peaks(declared, best) {
		best, undecided = 0, true
	}
	lag := best < 0 && !s.copies(declared, -best)
	if lag {
		if best == -1 && s.copiesLittle(declared) {
			s.lagHits = rateOf(s.hits(declared, best)).Value
		}
		s.lag, best = best, 0
	}
	s.shift = best
	f := Finding{Key: keyShift, Subject: OfDrafter, Hypothesis: "the drafter learnt shifted labels", Effect: &bestPair.gain, weight: 1 + math.Abs(bestPair.gain.Value)}
	f.Measure = fmt.Sprintf("hits of slots 1–%d by offset: %s", declared[0].slots, offsetWords(r.Offsets))
	f.Control = "a drafter of unshifted labels peaks at 0; one trained with labels a token late peaks at +1 in every slot"
	switch {
	case best != 0:
		f.Verdict = Confirmed
		f.Measure += fmt.Sprintf("; where the two labels differ, %.3f at 0 and %.3f at %+d (%s)", bestPair.a, bestPair.b, best, bestPair.gain.signed())
		f.Sentence = fmt.Sprintf("The drafter learnt labels shifted by %s: slot k drafts the token at a+k%+d. Its slots hit %.0f %% of those and %.0f %% of the ones that count. The target's logits at position a+k−1, not a+k, are slot k's label.",
			tokens(best), best, 100*s.pooled(r, best), 100*s.pooled(r, 0))
	case lag:
		f.Verdict = CannotTell
		f.Needs = "the findings about its graph"
		f.Sentence = "Its drafts lag behind, but not as labels that were shifted make them: a drafter of labels from before would repeat the anchor, which it is given. It misses something that it had in training."
	case undecided:
		f.Verdict = CannotTell
		f.Needs = "more sequences, or a drafter that hits more"
		f.Sentence = "The drafter hits too little to tell which offset it learnt."
	default:
		f.Verdict = RuledOut
		f.Sentence = "Every slot hits its own label most: the labels were not shifted."
	}
	r.Findings = append(r.Findings, f)
}

func (s *study) pooled(r *Report, shift int) float64 {
	for _, o := range r.Offsets {
		if o.Shift == shift {
			return o.Pooled.Value
		}
	}
	return math.NaN()
}

func tokens(n int) string {
	n = max(n, -n)
	return map[int]string{1: "one token", 2: "two tokens"}[n]
}

func offsetWords(os []Offsets) string {
	words := make([]string, len(os))
	for i, o := range os {
		words[i] = fmt.Sprintf("%+d: %.3f", o.Shift, o.Pooled.Value)
	}
	return strings.Join(words, ", ")
}

// The keys of findings that do not belong to a family of variants.
const (
	keyShift      = "label-shift"
	keyFinalTap   = "final-state-tap"
	keySource     = "label-source"
	keyTraining   = "training"
	keyParity     = "parity"
	keyStored     = "stored-drafts"
	keyObjective  = "objective"
	keyAsCaptured = "as-captured"
)
