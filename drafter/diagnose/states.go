package diagnose

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
)

// How far a recomputed state may be from a recorded one, as a share of its
// length, before the difference wants a reason. bf16 rounds each value by at
// most 2^-9, 2^-9/√3 in the mean square, and twice that is allowed. Another
// engine that computes in bf16 drifts by a few per cent over its layers.
const (
	exactDrift  = 1e-3
	bf16Drift   = 2 * 0.001953125 / 1.7320508
	otherDrift  = 5e-2
	codesDrift  = 5e-2
	mistakeRows = 2 // by how many tokens rows may be found shifted
)

// drift is the tolerance for this capture.
func (c Capture) drift() float64 {
	switch {
	case c.Rounded:
		return codesDrift
	case !c.Exact:
		return otherDrift
	case c.DType == "bf16":
		return bf16Drift + exactDrift
	}
	return exactDrift
}

// identity is one recorded state against what it may hold.
type identity struct {
	state  int
	own    count          // sum of relative distances and rows, of all sequences
	causes map[cause]span // of the sequences in which it is not the recomputed one
	delta  residual       // of the sequences whose cause is unknown
	noise  bool           // the unknown ones are noise, not another computation
	later  bool           // a later state is as computed where this one is not
}

// span is how much a cause explains.
type span struct {
	seqs   int
	own    count // distances from the recomputed state
	left   count // distances from what the cause makes of it
	detail string
	rows   int // that it concerns
}

// add is s with a sequence more.
func (s span) add(v verdictOf) span {
	s.seqs++
	s.own.hits, s.own.scored = s.own.hits+v.own.hits, s.own.scored+v.own.scored
	s.left.hits, s.left.scored = s.left.hits+v.left.hits, s.left.scored+v.left.scored
	s.rows += v.rows
	if s.detail == "" {
		s.detail = v.detail
	}
	return s
}

// stateKeys are the findings about recorded states.
var stateKeys = []struct{ key, hypothesis string }{
	{"capture-layer", "a recorded state is another layer's"},
	{"capture-row", "recorded rows belong to other tokens"},
	{"capture-norm", "a recorded state is on the other side of the final norm, or another norm was applied"},
	{"capture-empty", "recorded rows are zero, or repeat the row before"},
	{"capture-dtype", "16-bit floats of one kind were read as the other"},
	{"capture-values", "recorded values were changed after the target computed them"},
	{"capture-target", "the recorded states are of another computation: other weights, or other text before"},
	{"target-noise", "the source of the target's logits carries noise"},
	{"tap-noise", "the taps carry noise"},
}

// unexplainedStates are the findings about states that nothing recorded in
// their place explains: what is known of the text before them may.
var unexplainedStates = []string{"target-noise", "tap-noise", "capture-target", "capture-values"}

// probeStates compares every recorded state with the recomputed ones.
func probeStates(ctx context.Context, s *study, r *Report) error {
	var ids []identity
	found := map[int][]verdictOf{}
	for _, c := range s.recordedStates() {
		if err := ctx.Err(); err != nil {
			return err
		}
		if id, of, ok := s.identify(c); ok {
			ids = append(ids, id)
			found[c] = of
		}
	}
	s.tellNoise(ids, found)
	for _, k := range stateKeys {
		f := Finding{Key: k.key, Subject: OfCapture, Hypothesis: k.hypothesis}
		switch {
		case len(ids) == 0:
			f.Verdict, f.Needs = CannotTell, "recorded states, and the target to recompute them"
			f.Sentence = "The recorded states cannot be compared with recomputed ones."
		case k.key == "target-noise" && !slices.ContainsFunc(ids, func(i identity) bool { return i.state == s.Host.Layers }):
			f.Verdict, f.Needs = CannotTell, fmt.Sprintf("state %d among the recorded ones", s.Host.Layers)
			f.Sentence = "The final state is not recorded."
		default:
			s.judgeStates(&f, ids)
		}
		r.Findings = append(r.Findings, f)
	}
	for _, key := range []string{"capture-layer", "capture-row", "capture-norm", "capture-empty", "capture-dtype"} {
		if slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Key == key && f.alarm() }) {
			return nil // other states are recorded: what they depend on does not show
		}
	}
	odd := s.departures()
	return errors.Join(s.probePacking(ctx, r, odd), s.probeRollback(ctx, r, odd))
}

func (s *study) recordedStates() []int {
	var out []int
	for _, q := range s.seqs {
		for c := range q.States {
			out = append(out, c)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// identify finds what the recorded state c holds, sequence by sequence: a
// fault need not be in all of them.
func (s *study) identify(c int) (identity, []verdictOf, bool) {
	id := identity{state: c, causes: map[cause]span{}}
	norms := s.finalNorms()
	var all residual
	out := make([]verdictOf, len(s.seqs))
	coded, some := false, false
	for i, q := range s.seqs {
		stored := q.States[c]
		if q.clean == nil || len(stored) != len(q.ids)*s.Host.Hidden {
			continue // nothing to compare
		}
		some = true
		out[i] = s.explain(q, c, norms)
		id.own.hits += out[i].own.hits
		id.own.scored += out[i].own.scored
		coded = coded || out[i].coded
		if out[i].kind == asRecomputed {
			all.add(stored, q.clean[c], s.Host.Hidden)
		}
	}
	if all.bounded() && !s.Capture.Rounded && !coded { // noise below what arithmetic may do
		for i := range out {
			if out[i].kind == asRecomputed && out[i].own.scored > 0 {
				out[i].cause = cause{kind: unexplained}
			}
		}
	}
	for i, q := range s.seqs {
		switch out[i].kind {
		case asRecomputed:
			continue
		case unexplained:
			id.delta.add(q.States[c], q.clean[c], s.Host.Hidden)
		}
		id.causes[out[i].cause] = id.causes[out[i].cause].add(out[i])
	}
	return id, out, some
}

// tellNoise tells noise from another computation, for the states that nothing
// else explains. Noise is drawn anew for every value: its mean over rows is
// near zero in each channel, and it differs from state to state, unless it was
// drawn once for all of them; then, and where one state alone is recorded, it
// must be of one size in all rows and channels. What another computation leaves
// is carried on from layer to layer, in part.
func (s *study) tellNoise(ids []identity, found map[int][]verdictOf) {
	for i := range ids {
		id := &ids[i]
		if id.delta.n == 0 {
			continue
		}
		alone, likest := true, 0.0
		for _, other := range ids {
			if other.state != id.state && other.delta.n > 0 {
				alone = false
				likest = math.Max(likest, s.likeness(id.state, other.state, found))
			}
			if other.state > id.state && other.delta.n == 0 && len(other.causes) == 0 {
				id.later = true
			}
		}
		id.noise = id.delta.drawn() && (alone && id.delta.even() || !alone && (likest < alike || likest > same && id.delta.even()))
	}
}

// judgeStates fills in a finding about recorded states.
func (s *study) judgeStates(f *Finding, ids []identity) {
	limit := s.Capture.drift()
	worst := 0.0
	for _, id := range ids {
		worst = math.Max(worst, id.own.rate())
	}
	f.Measure = fmt.Sprintf("distance of recorded and recomputed states, relative: at most %.2g of the states %v (%.2g allowed)", worst, s.recordedStates(), limit)
	f.Control = "neighbouring states are " + s.neighbours() + " apart"
	f.Verdict, f.Sentence = RuledOut, "The recorded states are those that the target computes."
	if (f.Key == "target-noise" || f.Key == "tap-noise") && (!s.Capture.Exact || s.Capture.Rounded) && worst > exactDrift {
		f.Verdict, f.Needs = CannotTell, "a capture in arithmetic that the target repeats exactly"
		f.Sentence = fmt.Sprintf("Noise below the %.0f %% by which arithmetic may differ cannot be seen.", 100*limit)
	}
	rows := 0
	for _, id := range ids {
		for why, of := range id.causes {
			if s.keyOf(id, why) != f.Key || of.rows <= rows && rows > 0 {
				continue
			}
			rows = of.rows
			f.weight = 2 + of.own.rate()
			s.describeState(f, id, why, of)
			f.Measure += fmt.Sprintf("; in %d of %d sequences", of.seqs, len(s.seqs))
		}
		if rows > 0 && f.Key != "capture-target" {
			return // the first state tells
		}
	}
}

// keyOf is the finding that a cause belongs to.
func (s *study) keyOf(id identity, why cause) string {
	isFinal := id.state == s.Host.Layers
	switch why.kind {
	case elsewhere:
		switch {
		case why.from.by != 0:
			return "capture-row"
		case why.from.norm != asComputed && (why.from.state == id.state):
			return "capture-norm"
		}
		return "capture-layer"
	case empty:
		return "capture-empty"
	case halfAsBF16, bf16AsHalf:
		return "capture-dtype"
	case scaled:
		return "capture-values"
	}
	switch {
	case id.noise && isFinal:
		return "target-noise"
	case id.noise:
		return "tap-noise"
	case id.later:
		return "capture-values"
	}
	return "capture-target"
}

// describeState says what a cause is.
func (s *study) describeState(f *Finding, id identity, why cause, of span) {
	limit := s.Capture.drift()
	f.Verdict = Supported
	if of.left.rate() <= limit {
		f.Verdict = Confirmed
	}
	f.Measure = fmt.Sprintf("recorded state %d is %.2g from recomputed state %d (%.2g allowed)", id.state, of.own.rate(), id.state, limit)
	switch why.kind {
	case elsewhere:
		f.Measure = fmt.Sprintf("recorded state %d is %.2g from recomputed state %d and %.2g from %s (%.2g allowed)", id.state, of.own.rate(), id.state, of.left.rate(), why.from, limit)
		f.Sentence = fmt.Sprintf("What is recorded as state %d is %s.", id.state, why.from)
		if why.from.by > 0 {
			f.Sentence += " Rows at a−1 then hold what only exists after the anchor: a leak."
		}
	case empty:
		f.Measure += fmt.Sprintf("; %d rows are zero or repeat the row before, and the others are %.2g from it", of.rows, of.left.rate())
		f.Sentence = fmt.Sprintf("State %d lacks rows: %d are zero or repeat the row before, as where a prefix cache or a lost chunk left a gap (%s).", id.state, of.rows, of.detail)
	case halfAsBF16:
		f.Measure += fmt.Sprintf("; its bits read as half floats are %.2g from it", of.left.rate())
		f.Sentence = fmt.Sprintf("State %d was stored as half floats, and its bits were read as bf16.", id.state)
	case bf16AsHalf:
		f.Measure += fmt.Sprintf("; its bits read as bf16 are %.2g from it", of.left.rate())
		f.Sentence = fmt.Sprintf("State %d was stored as bf16, and its bits were read as half floats.", id.state)
	case scaled:
		f.Measure += fmt.Sprintf("; %s, and then it is %.2g from it", of.detail, of.left.rate())
		f.Sentence = fmt.Sprintf("State %d is the target's but for a factor: %s.", id.state, of.detail)
	case unexplained, asRecomputed:
		d := id.delta
		f.Measure = fmt.Sprintf("recorded minus recomputed state %d: rms %.3g, %.3g of the state's own, at most %.3g, kurtosis %.2f over %.0f values (%.2g of the length is allowed)",
			id.state, d.rms(), math.Sqrt(d.sum2/d.ref2), d.most, d.kurtosis(), d.n, limit)
		s.describeUnexplained(f, id, of)
	}
}

// describeUnexplained says what is known of a deviation that no single change
// explains.
func (s *study) describeUnexplained(f *Finding, id identity, of span) {
	f.Verdict = Supported
	switch f.Key {
	case "capture-values":
		f.weight++ // it is the more definite of the two
		f.Sentence = fmt.Sprintf("State %d is not what the target computes, though a later state is, which comes from it: its values were changed after they were computed (clipped, permuted, overwritten).", id.state)
	case "capture-target":
		f.Measure += fmt.Sprintf("; %.2g of it is alike in all rows", id.delta.systematic())
		f.Needs = "the weights and the whole text that the engine ran"
		f.Sentence = "The recorded states are not what this target computes of these tokens: " + of.detail + "."
	default:
		f.Verdict = Confirmed
		f.Sentence = fmt.Sprintf("State %d carries noise %s that the target did not compute.", id.state, id.delta.shape())
		if f.Key == "target-noise" {
			f.weight++
			f.Sentence += " The target's logits come from this state: noise belongs on the taps alone."
		}
	}
}

// neighbours is how far adjacent states are apart, as a control.
func (s *study) neighbours() string {
	least := math.Inf(1)
	q := s.seqs[0]
	for c := 1; c <= s.Host.Layers; c++ {
		var d count
		s.distance(&d, q, q.clean[c-1], source{state: c}, nil)
		least = math.Min(least, d.rate())
	}
	return fmt.Sprintf("%.2g or more", least)
}
