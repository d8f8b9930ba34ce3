package diagnose

import (
	"context"
	"fmt"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
)

// probeHealth runs the engine on every anchor: the published numbers, parity
// with the replica, and whether the drafter is merely less trained.
func probeHealth(ctx context.Context, s *study, r *Report) error {
	if len(s.missingTaps()) > 0 {
		r.Findings = append(r.Findings, Finding{Key: keyTraining, Subject: OfTraining, Hypothesis: "the drafter is undertrained", Verdict: CannotTell, Needs: "the states that it reads", Sentence: "It cannot draft on this capture."})
		return nil
	}
	runs, err := s.runEngine(ctx, s.Drafter, s.wantedLosses(), 0)
	if err != nil {
		return err
	}
	s.hit = slotHits(runs, s.spec.BlockSize)
	r.Numbers = numbers(runs, s.hit, s.spec.BlockSize)
	s.probeParity(r, runs)
	shifted := runs
	if s.shift != 0 {
		if shifted, err = s.runEngine(ctx, s.Drafter, s.wantedLosses(), s.shift); err != nil {
			return err
		}
	}
	s.trained = shifted
	return s.probeTraining(ctx, r, runs)
}

// wantedLosses are what the log needs to be compared with.
func (s *study) wantedLosses() cuda.Losses {
	if s.Log == nil {
		return 0
	}
	return cuda.KL | cuda.RKL | cuda.JSD | cuda.TV
}

// probeParity compares the engine with the replica: both on the declared
// graph, the same anchors and states. They are written apart, so a difference
// is a fault of this program.
func (s *study) probeParity(r *Report, runs []engineRun) {
	cs := make([]count, len(runs))
	for i, m := range s.declared {
		at := map[int32]int{}
		for j, a := range m.anchors {
			at[a] = j
		}
		for _, sl := range runs[i].slots {
			if j, ok := at[sl.Anchor]; ok && int(sl.Slot) <= m.slots {
				cs[i].scored++
				if m.tokens[j*m.slots+int(sl.Slot)-1] == sl.DraftToken {
					cs[i].hits++
				}
			}
		}
	}
	t := total(cs)
	f := Finding{Key: keyParity, Subject: OfEngine, Hypothesis: "a dense pass over all anchors and the incremental engine differ", weight: 3}
	f.Measure = fmt.Sprintf("%.0f of %.0f drafts equal", t.hits, t.scored)
	f.Verdict, f.Sentence = RuledOut, "The graph of training (all anchors at once) and that of drafting (a growing context) give the same drafts."
	if t.rate() < exactMatch {
		f.Verdict, f.Sentence = Confirmed, "This program's two engines disagree on the declared graph; please report it."
	}
	r.Findings = append(r.Findings, f)
}

// probeTraining compares with the reference, and with the log's curve.
func (s *study) probeTraining(ctx context.Context, r *Report, runs []engineRun) error {
	f := Finding{Key: keyTraining, Subject: OfTraining, Hypothesis: "the drafter is undertrained", Note: true, weight: 4}
	chain := make([]count, len(runs))
	for i, e := range runs {
		chain[i] = roundsOf(e, schemas.MethodChain)
	}
	tau := rateOf(chain)
	f.Measure = fmt.Sprintf("%.3f tokens a round (micro, bonus counted), slot 1 hits %.3f", tau.Value, rates(s.hit)[0])
	behind, compared := false, false
	var reference []engineRun
	if s.Reference != nil {
		var gain Interval
		var first float64
		var err error
		if reference, gain, first, err = s.againstReference(ctx, chain); err != nil {
			return err
		}
		compared, behind = true, gain.High < 0
		f.Effect = &gain
		f.Measure += fmt.Sprintf("; against %s %s tokens a round, %+.3f at slot 1", s.Reference.Name, gain.signed(), first)
	}
	s.probeDistance(r, runs, reference)
	s.probeThoughts(r, runs)
	curve := s.matchCurve()
	if curve.run != "" {
		f.Measure += "; " + curve.words
	}
	switch {
	case s.shift != 0:
		f.Verdict = CannotTell
		f.Needs = "labels that are not shifted"
		f.Sentence = "Its labels were shifted; how far it was trained shows only against those."
		if curve.run != "" {
			f.Sentence += " Against those, " + curve.words + "."
		}
	case curve.early():
		f.Verdict = Supported
		f.Sentence = fmt.Sprintf("It is healthy but undertrained: it hits as run %s did by step %d of %d.", curve.run, curve.step, curve.last)
		if r.alarmed() {
			f.Sentence = fmt.Sprintf("It hits as run %s did by step %d of %d; what of that is the fault's cannot be told before it is put right.", curve.run, curve.step, curve.last)
		} else if behind {
			f.Sentence += fmt.Sprintf(" It is %.2f tokens a round behind %s, and no fault that was tried explains that.", -f.Effect.Value, s.Reference.Name)
		}
	case behind && curve.run == "" && r.alarmed():
		f.Verdict = CannotTell
		f.Needs = "the fault above to be put right first"
		f.Sentence = fmt.Sprintf("It is %.2f tokens a round behind %s; what of that is the fault's cannot be told before it is put right.", -f.Effect.Value, s.Reference.Name)
	case behind && curve.run == "":
		f.Verdict = Supported
		f.Sentence = fmt.Sprintf("It is %.2f tokens a round behind %s, and no fault explains it: less training, less data, or a smaller drafter.", -f.Effect.Value, s.Reference.Name)
	case behind:
		f.Verdict = RuledOut
		f.Sentence = fmt.Sprintf("It was trained to its end: %s. It is %.2f tokens a round behind %s all the same.", curve.words, -f.Effect.Value, s.Reference.Name)
	case curve.run != "" || compared:
		f.Verdict = RuledOut
		f.Sentence = fmt.Sprintf("It is not behind %s.", nameOf(s.Reference))
		if curve.run != "" {
			f.Sentence = capital(curve.words) + "."
		}
	default:
		f.Verdict = CannotTell
		f.Needs = "--reference with a drafter to compare with, or --train-log"
		f.Sentence = fmt.Sprintf("It drafts %.2f tokens a round; whether more training would help cannot be told from it alone.", tau.Value)
	}
	r.Findings = append(r.Findings, f)
	return nil
}

func nameOf(c *Checkpoint) string {
	if c == nil {
		return ""
	}
	return c.Name
}

// againstReference is the difference to the reference in tokens a round, and
// in hits of slot 1, with the reference's runs.
func (s *study) againstReference(ctx context.Context, chain []count) (runs []engineRun, gain Interval, first float64, err error) {
	spec, err := drafter.ParseDFlash(s.Reference.Config, s.Host.Layers)
	if err != nil {
		return nil, gain, 0, fmt.Errorf("reading reference %s: %w", s.Reference.Name, err)
	}
	if runs, err = s.runEngine(ctx, *s.Reference, 0, 0); err != nil {
		return nil, gain, 0, err
	}
	other := make([]count, len(runs))
	for i, e := range runs {
		other[i] = roundsOf(e, schemas.MethodChain)
	}
	gain = bootstrap(len(chain), func(c []float64) float64 {
		var a, b count
		for i, k := range c {
			a.hits, a.scored = a.hits+k*chain[i].hits, a.scored+k*chain[i].scored
			b.hits, b.scored = b.hits+k*other[i].hits, b.scored+k*other[i].scored
		}
		return a.rate() - b.rate()
	})
	return runs, gain, rates(s.hit)[0] - rates(slotHits(runs, spec.BlockSize))[0], nil
}
