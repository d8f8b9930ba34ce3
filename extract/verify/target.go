package verify

import (
	"fmt"
	"math"
	"slices"

	"github.com/draftscope/draftscope/schemas/sound"
)

// RowRMS is the root of the mean square of each row; a row that is not finite
// has none.
func RowRMS(vals []float32, width int) []float64 {
	var out []float64
	for at := 0; width > 0 && at+width <= len(vals); at += width {
		sum := 0.0
		for _, v := range vals[at : at+width] {
			sum += float64(v) * float64(v)
		}
		if rms := math.Sqrt(sum / float64(width)); !math.IsNaN(rms) && !math.IsInf(rms, 0) {
			out = append(out, rms)
		}
	}
	return out
}

// Band is K7: the size of each state's rows beside that of the target.
func (q Sequence) Band(profile sound.Profile) []Fault {
	c := &checker{Sequence: q}
	for _, state := range q.Recorded {
		if detail := profile.Check(state, RowRMS(q.States[state], q.Hidden)); detail != "" {
			c.add(-1, state, "K7", "%s", detail)
		}
	}
	return c.faults
}

// Beside is K7 of a sequence that the target ran again, all of its states, row
// by row: it judges sequences that are too short for [Sequence.Band].
func (q Sequence) Beside(own [][]float32) []Fault {
	c := &checker{Sequence: q}
	for _, state := range q.Recorded {
		if state < 0 || state >= len(own) {
			continue // K6's
		}
		have, want := RowRMS(q.States[state], q.Hidden), RowRMS(own[state], q.Hidden)
		if len(have) != len(want) || len(have) == 0 {
			continue // K1's or K3's
		}
		ratios := make([]float64, len(have))
		for i := range ratios {
			ratios[i] = have[i] / max(want[i], math.SmallestNonzeroFloat32)
		}
		if ratio := middle(ratios); ratio > rescaled || ratio*rescaled < 1 {
			c.add(-1, state, "K7", "rows of RMS %.4g where the target gives them %.4g: a ratio of %.3g; its values may be of another dtype, state or scale", middle(have), middle(want), ratio)
		}
	}
	return c.faults
}

// rescaled is by which factor the middle row may differ from the target's own.
const rescaled = 1.5

func middle(vals []float64) float64 { return slices.Sorted(slices.Values(vals))[len(vals)/2] }

// Scorer applies a target's head to rows of a state, through the final norm
// or not: how many of the tokens next it answers, and their mean
// log-probability.
type Scorer func(rows []float32, normed bool, next []int32) (hits int, logprob float64, err error)

// probed is how one way to read the final state did.
type probed struct {
	words   string
	hits    int
	logprob float64
}

// answersKept is the share of recorded answers that the head on the recorded
// final state gives at least: storage in 16 bits turns a near tie here and
// there.
const answersKept = 0.9

// HeadProbe is K5: the head on the recorded final state at p must give the
// recorded answer at p or, where none is recorded, no worse a guess of token
// p+1 than the neighbouring rows, the state before, or no norm do.
func (q Sequence) HeadProbe(score Scorer) ([]Fault, error) {
	n := q.Layers
	final, width := q.States[n], q.Hidden
	if len(final) != len(q.Tokens)*width || width < 1 {
		return nil, nil // not recorded, or K3's
	}
	var at []int
	var next []int32
	recorded := true
	for t := 1; t+1 < len(q.Tokens); t++ { // the last row has no row after it
		if !q.Tokens[t].LossMask {
			continue
		}
		at = append(at, t-1)
		if a := q.Tokens[t-1].TargetArgmax; a != nil {
			next = append(next, *a)
		} else {
			recorded = false
			next = append(next, q.Tokens[t].TokenID)
		}
	}
	if len(at) == 0 {
		return nil, nil
	}
	probe := func(words string, vals []float32, by int, normed bool) (probed, error) {
		rows := make([]float32, 0, len(at)*width)
		for _, p := range at {
			p = max(p+by, 0)
			rows = append(rows, vals[p*width:(p+1)*width]...)
		}
		hits, logprob, err := score(rows, normed, next)
		return probed{words, hits, logprob}, err
	}
	own, err := probe(fmt.Sprintf("state %d", n), final, 0, true)
	if err != nil || own.hits == len(at) {
		return nil, err
	}
	best := own
	for _, v := range []struct {
		words  string
		vals   []float32
		by     int
		normed bool
	}{
		{"the row after", final, 1, true},
		{"the row before", final, -1, true},
		{"it without the final norm", final, 0, false},
		{fmt.Sprintf("state %d", n-1), q.States[n-1], 0, true},
	} {
		if len(v.vals) != len(final) {
			continue
		}
		p, err := probe(v.words, v.vals, v.by, v.normed)
		if err != nil {
			return nil, err
		}
		if p.hits > best.hits && p.logprob > best.logprob {
			best = p
		}
	}
	c := &checker{Sequence: q}
	words := fmt.Sprintf("the head on state %d gives %d of %d answers (mean log-probability %.3f)", n, own.hits, len(at), own.logprob)
	switch {
	case best.hits-own.hits > max(2, len(at)/50) && 2*best.hits > len(at):
		c.add(-1, n, "K5", "%s; on %s %d (%.3f)", words, best.words, best.hits, best.logprob)
	case recorded && float64(own.hits) < answersKept*float64(len(at)):
		c.add(-1, n, "K5", "%s, and no other row, state or norm gives more: the answers are another target's, or the state is damaged", words)
	}
	return c.faults, nil
}
