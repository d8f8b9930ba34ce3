// Package diagnose says why a drafter is good or bad, from what was captured:
// which hypotheses the data rule out, which they support, and how strongly.
//
// Three ideas carry it. A capture is compared with the target run again, so
// that what was recorded wrongly shows by itself. A drafter is put through
// variants of its own graph, each with one choice changed; the graph for
// which its weights were trained drafts best, so a variant that beats the
// declared graph names the mismatch, and the declared one beating all others
// rules them out. And whatever drafts are stored are matched with the
// variants, which names what the engine that made them did otherwise.
//
// Every comparison is paired over the same slots, has an interval over
// sequences, and is tested at a level that is divided by the number of
// hypotheses, so that a healthy drafter stays silent. docs/diagnose.md lists
// the hypotheses and how each was tried on planted faults.
package diagnose

import (
	"context"
	"fmt"
	"time"
)

// Run examines a case.
func Run(ctx context.Context, c Case) (*Report, error) {
	start := time.Now()
	s, err := newStudy(ctx, c)
	if err != nil {
		return nil, err
	}
	r := &Report{Drafter: c.Drafter.Name, Sequences: len(s.seqs)}
	if c.Reference != nil {
		r.Reference = c.Reference.Name
	}
	for _, q := range s.seqs {
		r.Anchors += len(q.sample)
	}
	if r.Anchors == 0 {
		return nil, fmt.Errorf("%w: no two tokens in a row are supervised, so that nothing can be drafted or scored; look at the loss masks with draftscope validate", ErrCase)
	}
	for _, probe := range []func(context.Context, *study, *Report) error{
		probeStates, probeLabels, probeMask, probeTemplate, probeLossless,
		probeDrafter, probeIdentity, probeFinal, probeHealth, probeLog,
	} {
		if err := probe(ctx, s, r); err != nil {
			return nil, fmt.Errorf("diagnosing %s: %w", c.Drafter.Name, err)
		}
	}
	r.rank()
	r.conclude(s.littleToJudge())
	r.Seconds = time.Since(start).Seconds()
	return r, nil
}

// conclude says the whole in one sentence. little says why a drafter without a
// fault may have one all the same.
func (r *Report) conclude(little string) {
	if len(r.Findings) > 0 && r.Findings[0].alarm() {
		r.Sentence = r.Findings[0].Sentence
		return
	}
	r.Sentence = fmt.Sprintf("No fault found in %s or in the capture%s.", r.Drafter, little)
	for _, f := range r.Findings {
		if f.Key == keyTraining {
			r.Sentence += " " + f.Sentence
		}
	}
}
