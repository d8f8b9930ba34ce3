package diagnose

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/schemas"
)

// maskCounts is what the loss masks get wrong, by kind, over all turns.
type maskCounts struct {
	turns, supervised int // assistant turns, and those with a loss
	header            int // turns whose header is inside
	reply             int // turns whose first tokens are outside
	end               int // turns whose closing token is outside
	alien             int // tokens of other roles inside
	odd               int // supervised turns with another header, which are not looked at
	unknown           int // tokens of no known role
	example           string
	found             []Misplaced
	turn              int // of found, those of earlier turns
}

// Misplaced is a token on the wrong side of its loss mask.
type Misplaced struct {
	Token int
	What  string // which token it is
}

// MisplacedMask lists the tokens of a sequence at which its mask is off, the
// first of each kind in a turn. encode may be nil.
func MisplacedMask(tokens []schemas.Token, text func(id int32) string, encode func(text string) []int32) []Misplaced {
	s := &study{Case: Case{Text: text, Encode: encode}}
	q := &subject{Sequence: Sequence{Tokens: tokens}}
	for _, t := range tokens {
		q.ids, q.mask = append(q.ids, t.TokenID), append(q.mask, t.LossMask)
	}
	var m maskCounts
	q.turnsOf(func(lo, hi int) {
		m.turn = len(m.found)
		s.maskOfTurn(&m, q, lo, hi)
	})
	return m.found
}

func (m *maskCounts) note(q *subject, t int, what string) {
	if !slices.ContainsFunc(m.found[m.turn:], func(f Misplaced) bool { return f.What == what }) {
		m.found = append(m.found, Misplaced{t, what})
	}
	if m.example == "" {
		m.example = fmt.Sprintf("%s, token %d %s", q.ID, t, what)
	}
}

const (
	roleAssistant = "assistant"
	roleUnknown   = "unknown"
	closing       = "<|im_end|>"
	thinkOpen     = "<think>"
	thinkClose    = "</think>"
	headerMost    = 8 // tokens in which a header ends
)

// probeMask compares the loss masks with the turns of the text.
func probeMask(_ context.Context, s *study, r *Report) error {
	var m maskCounts
	for _, q := range s.seqs {
		q.turnsOf(func(lo, hi int) { s.maskOfTurn(&m, q, lo, hi) })
	}
	boundary := Finding{Key: "mask-boundary", Subject: OfCapture, Hypothesis: "the loss mask begins or ends at the wrong token of a reply", weight: 2}
	alien := Finding{Key: "mask-roles", Subject: OfCapture, Hypothesis: "the loss mask covers tokens that the target did not write", weight: 2}
	boundary.Measure = fmt.Sprintf("of %d supervised replies: header inside in %d, first token outside in %d, closing token outside in %d", m.supervised, m.header, m.reply, m.end)
	alien.Measure = fmt.Sprintf("%d supervised tokens in turns of other roles", m.alien)
	boundary.Control = "the template's own header ends where the reply begins; the mask is compared with it token by token"
	switch {
	case s.Text == nil || m.turns == 0 || m.odd > 0 && m.supervised+m.alien == 0:
		for _, f := range []*Finding{&boundary, &alien} {
			f.Verdict, f.Needs, f.Sentence = CannotTell, "a tokenizer, and replies that its template marks", "Where replies begin is not known."
		}
	case m.header+m.reply+m.end+m.alien == 0:
		boundary.Verdict, boundary.Sentence = RuledOut, "Every reply is supervised from its first token to its closing one."
		alien.Verdict, alien.Sentence = RuledOut, "Only replies are supervised."
	default:
		boundary.Verdict, boundary.Sentence = RuledOut, "Every reply is supervised from its first token to its closing one."
		alien.Verdict, alien.Sentence = RuledOut, "Only replies are supervised."
		if m.header+m.reply+m.end > 0 {
			boundary.Verdict = Confirmed
			boundary.Sentence = "The loss mask is off at the borders of replies" + m.direction() + " (" + m.example + ")."
		}
		if m.alien > 0 {
			alien.Verdict = Confirmed
			alien.Sentence = fmt.Sprintf("%d tokens that the target did not write count in the loss (%s).", m.alien, m.example)
			if m.header+m.reply+m.end > 0 {
				alien.weight = 1.5 // a moved border spills over; the border is the cause
			}
		}
	}
	r.Findings = append(r.Findings, boundary, alien)
	return nil
}

// direction says which way a mask moved, where all turns agree.
func (m *maskCounts) direction() string {
	switch n := m.supervised; {
	case m.header == n && m.reply == 0 && m.end > 0:
		return ": it is moved to the left"
	case m.reply == n && m.header == 0 && m.end == 0:
		return ": it is moved to the right, or begins late"
	case m.header == n && m.end == 0:
		return ": the generation header is inside"
	case m.header+m.reply == 0:
		return ": the closing token is outside"
	}
	return ""
}

// maskOfTurn looks at the turn lo..hi-1.
func (s *study) maskOfTurn(m *maskCounts, q *subject, lo, hi int) {
	if s.Text == nil {
		return
	}
	role := q.Tokens[lo].Role
	if role == roleUnknown || role == "" {
		m.unknown += hi - lo
		return
	}
	// The reply is begin..end: behind the header, to its closing token.
	begin, exact := s.headerEnd(q, lo, hi)
	end, closed := hi, false
	for t := begin; t < hi; t++ {
		if s.Text(q.ids[t]) == closing {
			end, closed = t, true
			break
		}
	}
	if role != roleAssistant {
		for t := lo; t < hi; t++ {
			if q.mask[t] {
				m.alien++
				m.note(q, t, "of the "+role)
			}
		}
		return
	}
	m.turns++
	if !anyTrue(q.mask[lo:hi]) {
		return // left out on purpose, such as all but the last turn
	}
	if !exact {
		m.odd++
		return // nobody knows where its header ends
	}
	m.supervised++
	for t := lo; t < begin; t++ {
		if q.mask[t] {
			m.header++
			m.note(q, t, "of a header")
			break
		}
	}
	start := s.afterThinking(q, begin, end)
	if begin < end && !q.mask[begin] && (start >= end || !q.mask[start]) {
		m.reply++
		m.note(q, begin, "that begins a reply")
	}
	if closed {
		if !q.mask[end] {
			m.end++
			m.note(q, end, "that closes a reply")
		}
		for t := end + 1; t < hi; t++ {
			// The template's line feed closes a reply as its closing token does:
			// speculators supervises both.
			if q.mask[t] && (strings.TrimSpace(s.Text(q.ids[t])) != "" || !q.mask[end]) {
				m.alien++
				m.note(q, t, "after a reply's end")
			}
		}
	}
}

// afterThinking is where a reply begins behind an empty scaffold of thought,
// which a template may have filled in.
func (s *study) afterThinking(q *subject, begin, end int) int {
	if begin >= end || strings.TrimSpace(s.Text(q.ids[begin])) != thinkOpen {
		return begin
	}
	t := begin + 1
	for t < end {
		text := strings.TrimSpace(s.Text(q.ids[t]))
		if text != "" && text != thinkClose {
			break
		}
		t++
	}
	return t
}

func anyTrue(bits []bool) bool {
	for _, b := range bits {
		if b {
			return true
		}
	}
	return false
}
