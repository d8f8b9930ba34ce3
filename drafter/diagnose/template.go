package diagnose

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// generationPrompt is what the template renders before a reply.
const generationPrompt = "<|im_start|>" + roleAssistant + "\n"

// turnsOf calls do for every turn lo..hi-1 of a sequence.
func (q *subject) turnsOf(do func(lo, hi int)) {
	for lo := 0; lo < len(q.Tokens); {
		hi := lo
		for hi < len(q.Tokens) && q.Tokens[hi].Turn == q.Tokens[lo].Turn {
			hi++
		}
		do(lo, hi)
		lo = hi
	}
}

// headerEnd is where a turn's own text begins: behind the rendered generation
// prompt where its tokens are those, or else behind the first line's end.
// exact is false where a reply does not begin with those tokens.
func (s *study) headerEnd(q *subject, lo, hi int) (begin int, exact bool) {
	if s.Encode != nil && q.Tokens[lo].Role == roleAssistant {
		want := s.Encode(generationPrompt)
		if lo+len(want) <= hi && slices.Equal(q.ids[lo:lo+len(want)], want) {
			return lo + len(want), true
		}
	}
	begin = lo
	for t := lo; t < min(hi, lo+headerMost); t++ {
		if strings.Contains(s.Text(q.ids[t]), "\n") {
			return t + 1, s.Encode == nil
		}
	}
	return begin, s.Encode == nil
}

// probeTemplate asks whether what the template renders stands before every
// supervised reply, token by token, and on which side of the mask a scaffold
// of thought stands.
func probeTemplate(_ context.Context, s *study, r *Report) error {
	odd := make([]count, len(s.seqs))
	thoughts := [2]thoughtCounts{{inside: make([]count, len(s.seqs))}, {inside: make([]count, len(s.seqs))}}
	example := ""
	if s.Text != nil {
		for i, q := range s.seqs {
			q.turnsOf(func(lo, hi int) {
				if q.Tokens[lo].Role != roleAssistant || !anyTrue(q.mask[lo:hi]) {
					return
				}
				begin, exact := s.headerEnd(q, lo, hi)
				odd[i].scored++
				if !exact {
					odd[i].hits++
					if example == "" {
						example = fmt.Sprintf("%s, token %d: %q", q.ID, lo, s.words(q.ids[lo:min(hi, lo+headerMost)]))
					}
				}
				if think, ok := s.thoughtOf(q, begin, hi); ok {
					thoughts[think.kind].add(i, q, think)
				}
			})
		}
	}
	r.Findings = append(r.Findings, s.templateFinding(odd, example), s.thinkingFinding(thoughts, total(odd).scored))
	return nil
}

func (s *study) words(ids []int32) string {
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(s.Text(id))
	}
	return b.String()
}

func (s *study) templateFinding(odd []count, example string) Finding {
	f := Finding{Key: "template", Subject: OfCapture, Hypothesis: "replies do not stand behind the generation prompt that the template renders", weight: 2.5}
	f.Control = fmt.Sprintf("the tokens of %q, as an engine puts them before a reply", generationPrompt)
	if s.Text == nil || s.Encode == nil || total(odd).scored == 0 {
		f.Verdict, f.Needs, f.Sentence = CannotTell, "a tokenizer, and replies that its template marks", "What the template renders is not known."
		return f
	}
	rate := rateOf(odd)
	f.Effect = &rate
	f.Measure = fmt.Sprintf("replies that begin with other tokens: %.0f of %.0f", total(odd).hits, total(odd).scored)
	f.Sentence = "The generation prompt stands before every supervised reply, token by token."
	if rate.Value > 0 {
		f.Sentence = "Nearly all replies stand behind the generation prompt (not " + example + ")."
	}
	if f.Verdict = ofShare(rate); f.Verdict != RuledOut {
		f.Sentence = fmt.Sprintf("Of the supervised replies %.0f %% do not stand behind the generation prompt %q (%s): an engine drafts behind other tokens than these. Render the text with the target's template, and encode the reply apart.", 100*rate.Value, generationPrompt, example)
	}
	return f
}

// ofShare is the verdict on a fault of some replies: a share that is not
// relevant is none.
func ofShare(rate Interval) Verdict {
	switch {
	case rate.Low > relevance:
		return Confirmed
	case rate.Value > relevance:
		return Supported
	}
	return RuledOut
}

// thought is the scaffold or thought at a reply's begin: open is the place of
// <think>, shut that of </think> or where the reply ends without one.
type thought struct {
	kind       int // 0: nothing but space within, 1: a thought
	open, shut int
}

// thoughtOf finds the thought that begins a reply begin..hi-1.
func (s *study) thoughtOf(q *subject, begin, hi int) (thought, bool) {
	for begin < hi && strings.TrimSpace(s.Text(q.ids[begin])) == "" {
		begin++
	}
	if begin >= hi || strings.TrimSpace(s.Text(q.ids[begin])) != thinkOpen {
		return thought{}, false
	}
	th := thought{open: begin, shut: hi}
	for t := begin + 1; t < hi; t++ {
		switch text := strings.TrimSpace(s.Text(q.ids[t])); text {
		case "":
		case thinkClose:
			th.shut = t
			return th, true
		default:
			th.kind = 1
		}
	}
	return th, true
}

// thoughtCounts is on which side of the mask <think> and </think> stand.
type thoughtCounts struct {
	inside  []count // by sequence: replies with <think> inside, of all that have it
	shut    int     // replies with </think> inside
	example [2]string
}

func (c *thoughtCounts) add(i int, q *subject, th thought) {
	side := 0
	if q.mask[th.open] {
		side = 1
	}
	c.inside[i].add(side == 1)
	if th.shut < len(q.mask) && q.mask[th.shut] {
		c.shut++
	}
	if c.example[side] == "" {
		c.example[side] = fmt.Sprintf("%s, token %d", q.ID, th.open)
	}
}

// minority is the share of the replies on the rarer side of the mask.
func (c thoughtCounts) minority() Interval {
	rate := rateOf(c.inside)
	if rate.Value > 0.5 {
		return Interval{1 - rate.Value, 1 - rate.High, 1 - rate.Low}
	}
	return rate
}

// words says where a kind of scaffold stands.
func (c thoughtCounts) words(kind string) string {
	n := total(c.inside)
	if n.scored == 0 {
		return ""
	}
	return fmt.Sprintf("; %s at the begin of %.0f: <think> inside the mask in %.0f, </think> in %d", kind, n.scored, n.hits, c.shut)
}

// thinkingFinding judges where scaffolds stand. A template that does not think
// renders an empty one before the reply, and one that does leaves it to the
// target, or opens it: either is sound, both at once for one kind are not.
func (s *study) thinkingFinding(by [2]thoughtCounts, replies float64) Finding {
	f := Finding{Key: "thinking", Subject: OfCapture, Hypothesis: "the scaffold of thought is in the loss of some replies and not of others", weight: 2.2}
	f.Control = "a template renders one kind of scaffold before every reply, or before none"
	if s.Text == nil || replies == 0 {
		f.Verdict, f.Needs, f.Sentence = CannotTell, "a tokenizer, and replies that its template marks", "What the template renders is not known."
		return f
	}
	f.Measure = fmt.Sprintf("of %.0f supervised replies", replies) + by[0].words("an empty scaffold") + by[1].words("a thought")
	worse := 0
	if !(by[0].minority().Value >= by[1].minority().Value) && total(by[1].inside).scored > 0 {
		worse = 1
	}
	if total(by[worse].inside).scored == 0 {
		f.Verdict = RuledOut
		f.Measure += " none begins with <think>"
		f.Sentence = "No reply begins with a scaffold of thought."
		return f
	}
	rate := by[worse].minority()
	f.Effect, f.Verdict = &rate, ofShare(rate)
	if f.Verdict == RuledOut {
		f.Sentence = "Scaffolds of thought stand on one side of the mask throughout" + by[0].side("empty ones") + by[1].side("thoughts") + "."
		return f
	}
	kind := []string{"An empty scaffold of thought", "The opening of a thought"}[worse]
	f.Sentence = fmt.Sprintf("%s counts in the loss of some replies (%s) and not of others (%s): the boundary was taken from renderings that disagree. Render prompt and reply with the same thinking mode.", kind, by[worse].example[1], by[worse].example[0])
	return f
}

// side says where a kind of scaffold stands, nearly always.
func (c thoughtCounts) side(kind string) string {
	n := total(c.inside)
	switch {
	case n.scored == 0:
		return ""
	case n.hits > n.scored/2:
		return "; " + kind + " are inside"
	}
	return "; " + kind + " begin outside"
}
