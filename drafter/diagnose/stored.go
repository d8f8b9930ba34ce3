package diagnose

import "fmt"

// exactMatch is the share of equal drafts from which two engines count as
// one: other numerics flip a near tie here and there, another graph much more.
const exactMatch = 0.99

// nearMatch is the share that an engine of low precision keeps at least.
const nearMatch = 0.9

// agreement counts, by sequence, how many stored drafts a graph reproduces.
func (s *study) agreement(ms []measured) []count {
	out := make([]count, len(ms))
	for i, m := range ms {
		q := s.seqs[i]
		for j, a := range m.anchors {
			stored := q.Drafts[a]
			for k := range min(m.slots, len(stored)) {
				out[i].scored++
				if stored[k] == m.tokens[j*m.slots+k] {
					out[i].hits++
				}
			}
		}
	}
	return out
}

// probeStored matches the stored drafts, which some engine made, with the
// declared graph and every variant: the inference graph against the training
// graph. captured are the declared graph's drafts on the stored states, where
// these are known beside the recomputed ones.
func (s *study) probeStored(r *Report, declared, captured []measured, trials []trial) {
	f := Finding{Key: keyStored, Subject: OfEngine, Hypothesis: "the engine that made the stored drafts computes another graph", weight: 3}
	own := s.agreement(declared)
	if captured != nil {
		if other := s.agreement(captured); total(other).hits > total(own).hits {
			own = other
		}
	}
	rate := rateOf(own)
	f.Effect = &rate
	if total(own).scored == 0 {
		f.Verdict, f.Needs, f.Sentence = CannotTell, "drafts of this drafter in the dataset", "No drafts of it are stored here."
		r.Findings = append(r.Findings, f)
		return
	}
	f.Measure = "stored drafts that its weights reproduce at the same anchors: " + rate.plain()
	if rate.Value >= exactMatch {
		f.Verdict, f.Sentence = RuledOut, "The stored drafts are what the weights give: training graph and engine agree."
		r.Findings = append(r.Findings, f)
		return
	}
	best, top := trial{}, paired{}
	for _, t := range trials {
		if p := compare(own, s.agreement(t.measured)); p.b > top.b {
			best, top = t, p
		}
	}
	switch {
	case top.b >= exactMatch:
		f.Verdict = Confirmed
		f.Measure += fmt.Sprintf("; %.3f with %s", top.b, best.words)
		f.Sentence = fmt.Sprintf("The engine does not compute the drafter's graph: its drafts are those with %s (%s).", best.words, best.key)
	case top.b > top.a && top.p < level(len(trials)):
		f.Verdict = Supported
		f.Measure += fmt.Sprintf("; %.3f with %s", top.b, best.words)
		f.Sentence = fmt.Sprintf("The stored drafts are not what the weights give; nearest to them is the drafter with %s (%s).", best.words, best.key)
	case rate.Value >= nearMatch:
		f.Verdict = CannotTell
		f.Needs = "drafts made in the same precision"
		f.Sentence = "The stored drafts differ here and there, as another precision makes them; no graph that was tried explains them better."
	default:
		f.Verdict = Supported
		f.Sentence = "The stored drafts are not what these weights give, under no graph that was tried: they are of other weights, other states, or another engine."
	}
	r.Findings = append(r.Findings, f)
}
