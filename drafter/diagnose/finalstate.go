package diagnose

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
)

// probeFinal asks whether what is recorded as the final state is another
// state's copy or worse than another at giving the text, and whether it is the
// same when the same text is recorded again. Neither needs the target's layers.
func probeFinal(_ context.Context, s *study, r *Report) error {
	f, err := s.targetSource()
	if err != nil {
		return err
	}
	r.Findings = append(r.Findings, f, s.recordedAgain())
	words, err := s.tapWeights()
	if err != nil {
		return err
	}
	if i := slices.IndexFunc(r.Findings, func(f Finding) bool { return f.Key == keyFinalTap }); i >= 0 {
		r.Findings[i].Measure += words
	}
	return nil
}

// rowsOf are at most normRows supervised tokens of a sequence, and the rows of
// a recorded state before them.
func (s *study) rowsOf(q *subject, state int) (rows []float32, next []int32) {
	h := s.Host.Hidden
	for t := 1; t < len(q.ids) && len(next) < normRows; t++ {
		if q.mask[t] {
			rows, next = append(rows, q.States[state][(t-1)*h:t*h]...), append(next, q.ids[t])
		}
	}
	return rows, next
}

// targetSource compares the recorded final state with the recorded taps: which
// of them are one state bit by bit, and which gives the text through the head.
func (s *study) targetSource() (Finding, error) {
	n := s.Host.Layers
	f := Finding{Key: "target-source", Subject: OfCapture, Hypothesis: "the state that gives the targets' logits is one of the taps", weight: 1.9}
	f.Control = "of a target's states the final one gives the text most often"
	taps := slices.DeleteFunc(s.recordedStates(), func(c int) bool {
		return c == n || !slices.ContainsFunc(s.spec.Taps, func(t drafter.Tap) bool { return t.State == c })
	})
	if len(taps) == 0 || s.seqs[0].States[n] == nil {
		f.Verdict, f.Needs, f.Sentence = CannotTell, fmt.Sprintf("state %d and taps among the recorded states", n), "The state that gives the targets is not recorded beside the taps."
		return f, nil
	}
	own, _, err := s.textBy(n)
	if err != nil {
		return f, err
	}
	f.Measure = fmt.Sprintf("through the head the final state %d gives %.3f of the text", n, total(own).rate())
	f.Verdict, f.Sentence = RuledOut, "No tap is the recorded final state, and none gives the text more often."
	for _, c := range taps {
		hits, kl, err := s.textBy(c)
		if err != nil {
			return f, err
		}
		p, same := compare(own, hits), s.sameRows(c, n)
		f.Measure += fmt.Sprintf("; tap %d %.3f, KL %.2f nats, %.0f %% of its rows the same bit by bit", c, p.b, kl, 100*same.Value)
		switch {
		case same.Value >= exactMatch:
			f.Verdict, f.Effect = Confirmed, &same
			f.Sentence = fmt.Sprintf("State %d is recorded as the final state %d too: one layer feeds the drafter and its targets. Record the final state of the last layer.", c, n)
		case p.p < familyError/float64(len(taps)) && p.gain.Value > relevance*p.a && f.Verdict != Confirmed:
			f.Verdict, f.Effect = Confirmed, &p.gain
			f.Sentence = fmt.Sprintf("What is recorded as state %d gives the text more often (%.3f) than what is recorded as the final one (%.3f): the targets come from the wrong layer.", c, p.b, p.a)
		}
	}
	return f, nil
}

// textBy counts by sequence how often a recorded state gives the text through
// norm and head, with the mean KL of the final state's answers from its own.
func (s *study) textBy(state int) (hits []count, kl float64, err error) {
	hits = make([]count, len(s.seqs))
	n, h := s.Host.Layers, s.Host
	var seen float64
	for i, q := range s.seqs {
		if len(q.States[state]) != len(q.ids)*h.Hidden || len(q.States[n]) != len(q.ids)*h.Hidden {
			continue
		}
		rows, next := s.rowsOf(q, state)
		if len(next) == 0 {
			continue
		}
		final, _ := s.rowsOf(q, n)
		buf, err := s.Device.New(2 * len(rows))
		if err != nil {
			return nil, 0, err
		}
		both := cuda.Matrix(buf, 2*len(next), h.Hidden)
		own, target := both.RowRange(0, len(next)), both.RowRange(len(next), 2*len(next))
		at := make([]int32, len(next))
		for j := range at {
			at[j] = int32(j)
		}
		err = s.Device.Upload(both, slices.Concat(rows, final))
		if err == nil {
			err = s.Device.RMSNorm(both, both, h.FinalNorm, h.Eps, h.Gain)
		}
		var res cuda.HeadResult
		if err == nil {
			res, err = s.Device.Head(cuda.HeadArgs{Hidden: own, Weight: h.Head, K: 1, Target: target, TargetRow: at, Losses: cuda.KL})
		}
		buf.Close()
		if err != nil {
			return nil, 0, err
		}
		for j, id := range res.TopIDs {
			hits[i].add(id == next[j])
			kl += float64(res.KL[j])
			seen++
		}
	}
	return hits, kl / max(seen, 1), nil
}

// sameRows is the share of rows in which two recorded states are one bit by
// bit.
func (s *study) sameRows(a, b int) Interval {
	h := s.Host.Hidden
	same := make([]count, len(s.seqs))
	for i, q := range s.seqs {
		x, y := q.States[a], q.States[b]
		for lo := 0; lo+h <= min(len(x), len(y)); lo += h {
			same[i].add(slices.Equal(x[lo:lo+h], y[lo:lo+h]))
		}
	}
	return rateOf(same)
}

// again is what two recordings of one text have in common, by state.
type again struct {
	rows  count // that are the same bit by bit
	apart count // sum of relative distances, rows
	delta residual
}

// recordedAgain compares recordings of the same text: noise that is drawn
// anew each time shows, whoever drew it.
func (s *study) recordedAgain() Finding {
	n := s.Host.Layers
	f := Finding{Key: "recorded-again", Subject: OfCapture, Hypothesis: "the state that gives the targets is another each time that a text is recorded", weight: 3.5}
	f.Control = "the file's own rows are the same each time that they are read; noise that is drawn anew is not"
	final, taps := &again{}, &again{}
	pairs := 0
	for i, q := range s.seqs {
		others := slices.Clone(s.Again)
		for _, other := range s.seqs[:i] {
			others = append(others, other.Sequence)
		}
		for _, other := range others {
			if !slices.EqualFunc(q.Tokens, other.Tokens, sameToken) || len(other.States[n]) == 0 || len(q.States[n]) != len(other.States[n]) {
				continue
			}
			pairs++
			for c, vals := range q.States {
				if len(other.States[c]) != len(vals) {
					continue
				}
				to := taps
				if c == n {
					to = final
				}
				to.compare(vals, other.States[c], s.Host.Hidden)
			}
		}
	}
	if pairs == 0 {
		f.Verdict, f.Needs = CannotTell, fmt.Sprintf("the same text recorded twice with state %d: another run of the same settings in the dataset", n)
		f.Sentence = "No text is recorded twice."
		return f
	}
	same := Interval{final.rows.rate(), final.rows.rate(), final.rows.rate()}
	f.Effect = &same
	f.Measure = fmt.Sprintf("of %d texts that are recorded twice, %.3f of the rows of state %d are the same bit by bit, %.2g apart on average", pairs, final.rows.rate(), n, final.apart.rate())
	if taps.rows.scored > 0 {
		f.Measure += fmt.Sprintf("; of the other states %.3f, %.2g apart", taps.rows.rate(), taps.apart.rate())
	}
	switch {
	case final.apart.rate() > s.Capture.drift() || final.delta.bounded() && !s.Capture.Rounded:
		f.Verdict = Confirmed
		f.Sentence = fmt.Sprintf("State %d is another each time that the same text is recorded, by noise %s: the targets' logits come from it. Noise belongs on the taps alone.", n, final.delta.shape())
	case final.rows.rate() < 1:
		f.Verdict, f.Sentence = RuledOut, "Two recordings of a text differ by no more than arithmetic does."
	default:
		f.Verdict, f.Sentence = RuledOut, "The state that gives the targets is the same bit by bit each time that a text is recorded."
	}
	return f
}

func sameToken(a, b schemas.Token) bool { return a.TokenID == b.TokenID }

func (a *again) compare(x, y []float32, h int) {
	for lo := 0; lo+h <= len(x); lo += h {
		p, q := x[lo:lo+h], y[lo:lo+h]
		same := slices.Equal(p, q)
		a.rows.add(same)
		var diff, ref float64
		for i, v := range p {
			d := float64(v) - float64(q[i])
			diff += d * d
			ref += float64(v) * float64(v)
		}
		a.apart.hits += math.Sqrt(diff / max(ref, 1e-300))
		a.apart.scored++
	}
	a.delta.add(x, y, h)
}

// usedRows bounds the rows of a sequence over which a tap's size is taken.
const usedRows = 64

// tapWeights says what share of fc's input each tap makes up, |W_p|·rms of its
// state, of the drafter and of the reference.
func (s *study) tapWeights() (string, error) {
	var out string
	for _, c := range []*Checkpoint{&s.Drafter, s.Reference} {
		if c == nil {
			continue
		}
		spec, err := drafter.ParseDFlash(c.Config, s.Host.Layers)
		if err != nil {
			return "", fmt.Errorf("reading drafter %s: %w", c.Name, err)
		}
		use, err := s.tapUse(spec, *c)
		if err != nil || use == nil {
			return out, err
		}
		words := make([]string, len(use))
		for p, u := range use {
			words[p] = fmt.Sprintf("%.2f", u)
		}
		out += fmt.Sprintf("; |W|·rms of the taps of %s as shares: %s", c.Name, strings.Join(words, " "))
	}
	return out, nil
}

// tapUse is |W_p|·rms of each tap, of their sum; nil where a state is not
// known.
func (s *study) tapUse(spec drafter.Spec, c Checkpoint) ([]float64, error) {
	t := tensorsOf(c.Weights)
	h, taps := spec.Hidden, len(spec.Taps)
	fc := t.floats("fc.weight", h*taps*h)
	if t.err != nil {
		return nil, fmt.Errorf("reading fc of drafter %s: %w", c.Name, t.err)
	}
	norm := s.finalNorm()
	row := make([]float32, h)
	use := make([]float64, taps)
	var sum float64
	for p, tap := range spec.Taps {
		var square, n, weights float64
		for _, q := range s.seqs {
			vals := s.states(q, false)[tap.State]
			if vals == nil {
				return nil, nil
			}
			for t := range min(usedRows, len(q.ids)) {
				copy(row, vals[t*h:(t+1)*h])
				if tap.Normed {
					norm(row, row)
				}
				for _, v := range row {
					square += float64(v) * float64(v)
					n++
				}
			}
		}
		for r := range h {
			for _, v := range fc[r*taps*h+p*h : r*taps*h+(p+1)*h] {
				weights += float64(v) * float64(v)
			}
		}
		use[p] = math.Sqrt(weights * square / n)
		sum += use[p]
	}
	for p := range use {
		use[p] /= sum
	}
	return use, nil
}
