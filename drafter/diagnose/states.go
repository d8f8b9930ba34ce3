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

// source is what a stored state is compared with: a state, normed or not, of
// the token that stands by rows further on.
type source struct {
	state  int
	normed bool
	by     int
}

func (s source) String() string {
	words := fmt.Sprintf("state %d", s.state)
	if s.normed {
		words += " after the final norm"
	}
	switch {
	case s.by == 1:
		words += " of the next token"
	case s.by == -1:
		words += " of the token before"
	case s.by != 0:
		words += fmt.Sprintf(" of the token %+d", s.by)
	}
	return words
}

// identity is one recorded state against what it may hold.
type identity struct {
	state    int
	own      count // sum of relative distances, rows
	best     source
	distance float64
	delta    residual
}

// residual describes stored minus recomputed.
type residual struct{ sum2, sum4, n, most, ref2 float64 }

func (r residual) rms() float64      { return math.Sqrt(r.sum2 / math.Max(r.n, 1)) }
func (r residual) kurtosis() float64 { return r.sum4 * r.n / math.Max(r.sum2*r.sum2, 1e-300) }

// bounded recognises uniform noise, which no arithmetic makes: no value is
// beyond √3 of the mean square, and the kurtosis is that of a box.
func (r residual) bounded() bool {
	return r.sum2 > 0 && r.most < 1.8*r.rms() && math.Abs(r.kurtosis()-1.8) < 0.15
}

// shape names the noise by its kurtosis: 1.8 uniform, 3 Gaussian.
func (r residual) shape() string {
	switch k := r.kurtosis(); {
	case math.Abs(k-1.8) < 0.15:
		return fmt.Sprintf("uniform in ±%.3g", r.rms()*math.Sqrt(3))
	case math.Abs(k-3) < 0.3:
		return fmt.Sprintf("Gaussian of %.3g", r.rms())
	}
	return fmt.Sprintf("of rms %.3g (kurtosis %.1f)", r.rms(), r.kurtosis())
}

// probeStates compares every recorded state with the recomputed ones.
func probeStates(ctx context.Context, s *study, r *Report) error {
	keys := []struct{ key, hypothesis string }{
		{"capture-layer", "a recorded state is another layer's"},
		{"capture-row", "recorded rows belong to other tokens"},
		{"capture-norm", "a recorded state is on the other side of the final norm"},
		{"target-noise", "the source of the target's logits carries noise"},
		{"tap-noise", "the taps carry noise"},
	}
	var ids []identity
	for _, c := range s.recordedStates() {
		if err := ctx.Err(); err != nil {
			return err
		}
		id, ok := s.identify(c)
		if !ok {
			continue
		}
		ids = append(ids, id)
	}
	for _, k := range keys {
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
	for _, key := range []string{"capture-layer", "capture-row", "capture-norm"} {
		if slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Key == key && f.alarm() }) {
			return nil // other states are recorded: what they depend on does not show
		}
	}
	odd := s.departures()
	return errors.Join(s.probePacking(ctx, r, odd), s.probeRollback(ctx, r, odd))
}

func (s *study) recordedStates() []int {
	var out []int
	for c := range s.seqs[0].States {
		out = append(out, c)
	}
	slices.Sort(out)
	return out
}

// identify finds which recomputed state the recorded state c is nearest to.
func (s *study) identify(c int) (identity, bool) {
	n := s.Host.Layers
	sources := []source{{state: c}}
	for u := range n + 1 {
		if u != c {
			sources = append(sources, source{state: u})
		}
	}
	sources = append(sources, source{state: n, normed: true})
	for by := -mistakeRows; by <= mistakeRows; by++ {
		if by != 0 {
			sources = append(sources, source{state: c, by: by})
		}
	}
	sums := make([]count, len(sources))
	id := identity{state: c}
	norm := s.finalNorm()
	for _, q := range s.seqs {
		stored := q.States[c]
		if q.clean == nil || len(stored) != len(q.ids)*s.Host.Hidden {
			return id, false
		}
		for i, src := range sources {
			s.distance(&sums[i], q, stored, src, norm)
		}
		id.delta.add(stored, q.clean[c])
	}
	id.own = sums[0]
	best := 0
	for i := range sources {
		if sums[i].rate() < sums[best].rate() {
			best = i
		}
	}
	id.best, id.distance = sources[best], sums[best].rate()
	return id, true
}

// distance adds the relative distances of rows of stored to a source's.
func (s *study) distance(to *count, q *subject, stored []float32, src source, norm func(dst, row []float32)) {
	h := s.Host.Hidden
	row := make([]float32, h)
	for t := range q.ids {
		from := t + src.by
		if from < 0 || from >= len(q.ids) {
			continue
		}
		copy(row, q.clean[src.state][from*h:(from+1)*h])
		if src.normed {
			norm(row, row)
		}
		var diff, ref float64
		for i, v := range stored[t*h : (t+1)*h] {
			d := float64(v) - float64(row[i])
			diff += d * d
			ref += float64(row[i]) * float64(row[i])
		}
		if ref > 0 {
			to.hits += math.Sqrt(diff / ref)
			to.scored++
		}
	}
}

// finalNorm is the target's final norm on the host.
func (s *study) finalNorm() func(dst, row []float32) {
	h := s.Host
	w := make([]float32, h.Hidden)
	if err := s.Device.Download(w, h.FinalNorm); err != nil {
		return func(_, _ []float32) {}
	}
	return func(dst, row []float32) {
		var sum float64
		for _, v := range row {
			sum += float64(v) * float64(v)
		}
		scale := 1 / math.Sqrt(sum/float64(len(row))+float64(h.Eps))
		for i, v := range row {
			dst[i] = float32(float64(v) * scale * float64(h.Gain+w[i]))
		}
	}
}

func (r *residual) add(stored, clean []float32) {
	for i, v := range stored {
		d := float64(v) - float64(clean[i])
		r.sum2 += d * d
		r.sum4 += d * d * d * d
		r.most = math.Max(r.most, math.Abs(d))
		r.ref2 += float64(clean[i]) * float64(clean[i])
		r.n++
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
	if (f.Key == "target-noise" || f.Key == "tap-noise") && !s.Capture.Exact && worst > exactDrift {
		f.Verdict, f.Needs = CannotTell, "a capture in arithmetic that the target repeats exactly"
		f.Sentence = fmt.Sprintf("Noise below the %.0f %% by which arithmetic may differ cannot be seen.", 100*limit)
	}
	for _, id := range ids {
		if id.own.rate() <= limit && (s.Capture.Rounded || !id.delta.bounded()) {
			continue
		}
		// Another source explains it when it is much nearer than the own one.
		other := id.best != (source{state: id.state}) && id.distance < id.own.rate()/2 && id.own.rate() > limit
		isFinal := id.state == s.Host.Layers
		var hit bool
		switch f.Key {
		case "capture-row":
			hit = other && id.best.by != 0
		case "capture-norm":
			hit = other && id.best.normed && isFinal
		case "capture-layer":
			hit = other && id.best.by == 0 && (!id.best.normed || !isFinal)
		case "target-noise":
			hit = !other && isFinal
		case "tap-noise":
			hit = !other && !isFinal
		}
		if !hit {
			continue
		}
		f.Verdict, f.weight = Supported, 2+id.own.rate()
		switch {
		case !other:
			f.Verdict = Confirmed
			f.Measure = fmt.Sprintf("recorded minus recomputed state %d: rms %.3g, %.3g of the state's own, at most %.3g, kurtosis %.2f over %.0f values (%.2g of the length is allowed)",
				id.state, id.delta.rms(), math.Sqrt(id.delta.sum2/id.delta.ref2), id.delta.most, id.delta.kurtosis(), id.delta.n, limit)
			f.Sentence = fmt.Sprintf("State %d carries noise %s that the target did not compute.", id.state, id.delta.shape())
			if isFinal {
				f.weight++
				f.Sentence += " The target's logits come from this state: noise belongs on the taps alone."
			}
		default:
			if id.distance <= limit {
				f.Verdict = Confirmed
			}
			f.Measure = fmt.Sprintf("recorded state %d is %.2g from recomputed state %d and %.2g from %s (%.2g allowed)", id.state, id.own.rate(), id.state, id.distance, id.best, limit)
			f.Sentence = fmt.Sprintf("What is recorded as state %d is %s.", id.state, id.best)
			if id.best.by > 0 {
				f.Sentence += " Rows at a−1 then hold what only exists after the anchor: a leak."
			}
		}
		return
	}
}

// neighbours is how far adjacent states are apart, as a control.
func (s *study) neighbours() string {
	least := math.Inf(1)
	q := s.seqs[0]
	for c := 1; c <= s.Host.Layers; c++ {
		var d count
		s.distance(&d, &subject{Sequence: q.Sequence, ids: q.ids, clean: q.clean}, q.clean[c-1], source{state: c}, nil)
		least = math.Min(least, d.rate())
	}
	return fmt.Sprintf("%.2g or more", least)
}
