package diagnose

import "fmt"

// How many times as often as the target's answers a drafter must hit another
// source's to have learnt these, and how often beside its hits in general.
const (
	learntSource = 3
	asElsewhere  = 1
)

// labelSource is a wrong way to make labels: the head on another state than
// the final one.
type labelSource struct {
	state int
	words string
}

// sources are those that are tried: the layers before the last, whose states
// a capture may hold in the last one's place.
func (s *study) sources() []labelSource {
	n := s.Host.Layers
	var out []labelSource
	for state := n - 1; state >= max(1, n-3); state-- {
		out = append(out, labelSource{state, fmt.Sprintf("the head on state %d", state)})
	}
	return out
}

// probeSource asks whether the drafter hits the answers that another state of
// the target gives more often than the target's own, where the two differ.
func (s *study) probeSource(r *Report, declared []measured) error {
	f := Finding{Key: keySource, Subject: OfDrafter, Hypothesis: "the labels came from another state than the target's final one", weight: 1}
	f.Control = "a drafter of the right labels hits the target's own answers more, wherever the two differ"
	best, top, tried := labelSource{}, paired{}, 0
	for _, src := range s.sources() {
		own, other, err := s.sourcePair(declared, src)
		if err != nil {
			return err
		}
		if total(own).scored == 0 {
			continue
		}
		tried++
		p := compare(own, other)
		if tried == 1 || p.gain.Value > top.gain.Value {
			best, top = src, p
		}
	}
	if tried == 0 {
		f.Verdict, f.Needs, f.Sentence = CannotTell, "the states before the final one", "The states that could have given the labels are not known."
		r.Findings = append(r.Findings, f)
		return nil
	}
	f.Effect = &top.gain
	f.Measure = fmt.Sprintf("where the target's answer and that of %s differ, the drafter hits %.3f and %.3f (%s)", best.words, top.a, top.b, top.gain.signed())
	switch {
	// Where the two differ the target's answer is hard and the other one easy: a
	// drafter that learnt little hits the easy one more. One that learnt it hits
	// it much more, and there about as often as elsewhere.
	case top.p < level(tried) && top.gain.Low > 0 && top.b > learntSource*top.a &&
		top.b > asElsewhere*rateOf(s.hits(declared, s.shift)).Value && s.skilled(declared, s.shift):
		f.Verdict = Confirmed
		f.Sentence = fmt.Sprintf("The drafter learnt the answers of %s, not the target's own: the labels must come from state %d through the final norm.", best.words, s.Host.Layers)
	case top.gain.High < 0:
		f.Verdict, f.Sentence = RuledOut, "The drafter hits the target's own answers more than those of the states before."
	default:
		f.Verdict, f.Needs, f.Sentence = CannotTell, "more sequences, or a drafter that hits more", "Where the two answers differ it hits too little to tell."
	}
	r.Findings = append(r.Findings, f)
	return nil
}

// sourcePair counts hits of the labels and of another source's answers, on
// the slots where these differ.
func (s *study) sourcePair(ms []measured, src labelSource) (own, other []count, err error) {
	own, other = make([]count, len(ms)), make([]count, len(ms))
	for i, m := range ms {
		q := s.seqs[i]
		state := s.states(q, false)[src.state]
		if state == nil || len(m.anchors) == 0 {
			continue
		}
		answers, _, err := s.answers(state, nil)
		if err != nil {
			return nil, nil, err
		}
		for j, a := range m.anchors {
			for k := 1; k <= m.slots; k++ {
				t := int(a) + k
				if !q.scored(t) || !q.scored(t+s.shift) || t+s.shift < 1 {
					continue
				}
				label, wrong := q.labels[t+s.shift], answers[t+s.shift-1]
				if label == wrong {
					continue
				}
				own[i].scored++
				other[i].scored++
				switch m.tokens[j*m.slots+k-1] {
				case label:
					own[i].hits++
				case wrong:
					other[i].hits++
				}
			}
		}
	}
	return own, other, nil
}
