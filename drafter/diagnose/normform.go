package diagnose

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
)

// normRows is how many rows of a sequence the forms of the norm are tried on.
const normRows = 32

// sharpness are the factors of the logits under which a form is tried: a
// larger gain is a lower temperature, which says nothing of the form. A text
// that is likeliest at the last is greedy or nearly so: then hits alone tell.
var sharpness = []float32{0.2, 0.35, 0.6, 1, 1.7, 3}

// relevantNats is the mean log-likelihood a token from which on a form counts
// as better.
const relevantNats = 0.02

// normed is one way from a final state to the head.
type normed struct {
	words, sentence string
	gain            float32
	none            bool // the state goes to the head as it is
	// By sequence: answers that are the text, and log-likelihoods of it at each
	// sharpness.
	hits, likely []count
	bySharpness  [][]count
	edge         bool // the first or the last sharpness is the likeliest
}

// normForm compares the forms of the final norm, w, 1+w, and none for a state
// that has been through it already, by how likely they make the text, each at
// its best temperature, and by how often the head's answer is the text.
func (s *study) normForm() (Finding, error) {
	f := Finding{Key: "norm-form", Subject: OfCapture, Hypothesis: "the final norm's gain is of the other form, w or 1+w, or the state is normed twice", weight: 2}
	f.Control = "of two forms the right one makes sampled text likelier, and greedy text no less; each is tried at its own best temperature"
	n := s.Host.Layers
	forms := []normed{
		{words: "the declared form", gain: s.Host.Gain},
		{words: "the other", gain: 1 - s.Host.Gain, sentence: "The text follows the other form of the final norm: the target's head is applied with the wrong gain."},
		{words: "no norm", none: true, sentence: "The text follows the head without the final norm: the final state has been through it already, and would be normed twice."},
	}
	for i := range forms {
		forms[i].hits = make([]count, len(s.seqs))
		for range sharpness {
			forms[i].bySharpness = append(forms[i].bySharpness, make([]count, len(s.seqs)))
		}
	}
	for i, q := range s.seqs {
		final := s.states(q, false)[n]
		if final == nil {
			f.Verdict, f.Needs, f.Sentence = CannotTell, fmt.Sprintf("state %d", n), "The final state is not known."
			return f, nil
		}
		var rows []float32
		var next []int32
		for t := 1; t < len(q.ids) && len(next) < normRows; t++ {
			if q.mask[t] {
				rows = append(rows, final[(t-1)*s.Host.Hidden:t*s.Host.Hidden]...)
				next = append(next, q.ids[t])
			}
		}
		if len(next) == 0 {
			continue
		}
		for at := range forms {
			if err := s.tryForm(&forms[at], i, rows, next); err != nil {
				return f, err
			}
		}
	}
	for at := range forms {
		forms[at].settle()
	}
	f.judgeForms(forms)
	return f, nil
}

// tryForm counts a form on rows of sequence i.
func (s *study) tryForm(form *normed, i int, rows []float32, next []int32) error {
	h := s.Host
	buf, err := s.Device.New(len(rows))
	if err != nil {
		return err
	}
	defer buf.Close()
	x := cuda.Matrix(buf, len(next), h.Hidden)
	scaled := make([]float32, len(rows))
	for k, factor := range sharpness {
		// A factor on a normed state is one on its logits.
		for j, v := range rows {
			scaled[j] = v * factor
		}
		if err := s.Device.Upload(x, scaled); err != nil {
			return err
		}
		if !form.none {
			if err := s.normScaled(x, rows, form.gain, factor); err != nil {
				return err
			}
		}
		got, logprob, err := s.headOn(x, next)
		if err != nil {
			return err
		}
		for j, id := range got {
			form.bySharpness[k][i].hits += float64(logprob[j])
			form.bySharpness[k][i].scored++
			if factor == 1 {
				form.hits[i].add(id == next[j])
			}
		}
	}
	return nil
}

// normScaled sets x to the normed rows times a factor.
func (s *study) normScaled(x cuda.Tensor, rows []float32, gain, factor float32) error {
	h := s.Host
	if err := s.Device.Upload(x, rows); err != nil {
		return err
	}
	if err := s.Device.RMSNorm(x, x, h.FinalNorm, h.Eps, gain); err != nil {
		return err
	}
	vals := make([]float32, len(rows))
	if err := s.Device.Download(vals, x); err != nil {
		return err
	}
	for j := range vals {
		vals[j] *= factor
	}
	return s.Device.Upload(x, vals)
}

// settle takes the sharpness under which the text is likeliest.
func (n *normed) settle() {
	for k, cs := range n.bySharpness {
		if n.likely == nil || total(cs).rate() > total(n.likely).rate() {
			n.likely, n.edge = cs, k == 0 || k == len(n.bySharpness)-1
		}
	}
}

// judgeForms compares the declared form, the first, with the others.
func (f *Finding) judgeForms(forms []normed) {
	own := forms[0]
	f.Measure = fmt.Sprintf("of %.0f tokens", total(own.hits).scored)
	for _, form := range forms {
		f.Measure += fmt.Sprintf("; with %s %.3f are its answer and the mean NLL is %.3f", form.words, total(form.hits).rate(), -total(form.likely).rate())
	}
	f.Verdict, f.Sentence = RuledOut, "The declared form of the final norm gives the text, and no other does so more often or makes it likelier."
	const level = familyError / 4 // two forms by two measures
	open := false
	best := relevantNats
	for i, form := range forms[1:] {
		hits, likely := compare(own.hits, form.hits), compare(own.likely, form.likely)
		if i == 0 {
			f.Effect = &likely.gain
		}
		told := !own.edge && !form.edge
		switch {
		case hits.p < level && hits.gain.Low > relevance*hits.a, told && likely.p < level && likely.gain.Low > relevantNats:
			if f.Verdict != Confirmed || likely.gain.Value > best {
				f.Verdict, f.Sentence, f.Effect, best = Confirmed, form.sentence, &likely.gain, likely.gain.Value
			}
		case hits.gain.High > relevance*hits.a || told && likely.gain.High > relevantNats:
			open = true
		}
	}
	if f.Verdict == RuledOut && open {
		f.Verdict, f.Needs, f.Sentence = CannotTell, "more sequences", "More than one form fits."
	}
}
