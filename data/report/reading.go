package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/draftscope/draftscope/data/query"
)

// How much text a report shows: a page must stay small.
const (
	readDrafters = 3
	readTokens   = 280 // of one text
	readPrompt   = 16  // of them before the first generated one
	readRunes    = 24  // of one token
)

// What became of a token under the chain; the view fates has the definitions.
const (
	fateHit      = "hit"
	fateMiss     = "miss"
	fateBonus    = "bonus"
	fateUnscored = "unscored"
	fateMasked   = "masked"
)

// Reading is a part of one sequence, token by token, with what became of each
// under one drafter's chain.
type Reading struct {
	SeqID   string      `json:"seq_id"`
	Why     string      `json:"why"` // it was chosen
	Drafter string      `json:"drafter"`
	First   int64       `json:"first_pos"`
	Length  int64       `json:"length"` // of the whole sequence
	Hits    int64       `json:"hits"`   // of all of it
	Drafted int64       `json:"drafted"`
	Tokens  []ReadToken `json:"tokens"`
}

// ReadToken is one token. Slot is the place in the block whose draft was
// judged at it, 0 for none.
type ReadToken struct {
	TokenID int64  `json:"token_id"`
	Text    string `json:"text"`
	Fate    string `json:"fate"`
	Slot    int64  `json:"slot,omitempty"`
}

// readings picks the sequences in which the best drafter does worst,
// middling and best, and reads each with the best few drafters that have it.
func (l *loader) readings(run string, all []*sums, drafters []Drafter, opt Options) []Reading {
	if opt.Texts <= 0 || l.err != nil {
		return nil
	}
	var order []int
	for _, i := range ranking(drafters) {
		if key, ok := all[i].firstSetting(); ok && key.method == "chain" && len(order) < readDrafters {
			order = append(order, i)
		}
	}
	if len(order) == 0 {
		return nil
	}
	var out []Reading
	for _, pick := range all[order[0]].choose(opt.Texts) {
		for _, i := range order {
			if _, ok := all[i].index[pick.seq]; !ok {
				continue
			}
			r := Reading{SeqID: pick.seq, Why: pick.why, Drafter: all[i].drafter}
			l.read(run, &r, opt.Decode)
			if len(r.Tokens) > 0 {
				out = append(out, r)
			}
		}
	}
	return out
}

type choice struct{ seq, why string }

// choose takes n sequences, from the one with the fewest tokens a round to the
// one with the most, evenly.
func (s *sums) choose(n int) []choice {
	key, _ := s.firstSetting()
	macro := s.accept[key].macro
	var at []int
	for i := range s.seqs {
		if macro.den[i] > 0 {
			at = append(at, i)
		}
	}
	slices.SortStableFunc(at, func(i, j int) int { return cmp.Compare(macro.num[i], macro.num[j]) })
	n = min(n, len(at))
	var out []choice
	for k := range n {
		i := at[len(at)/2]
		why := "middling for " + s.drafter
		if n > 1 {
			i = at[k*(len(at)-1)/(n-1)]
		}
		switch {
		case n > 1 && k == 0:
			why = "the hardest for " + s.drafter
		case n > 1 && k == n-1:
			why = "the easiest for " + s.drafter
		}
		out = append(out, choice{s.seqs[i], fmt.Sprintf("%s, %.2f tokens a round", why, macro.num[i])})
	}
	return out
}

// read fetches the tokens of one reading.
func (l *loader) read(run string, r *Reading, decode func(run string, id int32) string) {
	var all []ReadToken
	start := -1
	l.each("SELECT token_id, fate, slot, pos FROM fates WHERE run = "+query.Literal(run)+" AND drafter = "+query.Literal(r.Drafter)+
		" AND seq_id = "+query.Literal(r.SeqID)+" ORDER BY pos", func(row record) {
		t := ReadToken{TokenID: row.int(0), Fate: row.text(1), Slot: row.int(2)}
		switch t.Fate {
		case fateHit:
			r.Hits++
			r.Drafted++
		case fateMiss:
			r.Drafted++
		}
		if t.Fate != fateMasked && start < 0 {
			start = len(all)
		}
		all = append(all, t)
	})
	r.Length = int64(len(all))
	from := max(0, start-readPrompt)
	r.First = int64(from)
	r.Tokens = all[from:min(len(all), from+readTokens)]
	for i := range r.Tokens {
		t := &r.Tokens[i]
		if decode != nil {
			t.Text = decode(run, int32(t.TokenID))
		}
		if t.Text == "" {
			t.Text = fmt.Sprintf("%d ", t.TokenID)
		}
		t.Text = clip(legible(t.Text), readRunes)
	}
}

// legible keeps what a page can show: half of a character and control signs
// become a middle dot.
func legible(s string) string {
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || r != '\n' && r != '\t' && !unicode.IsGraphic(r) {
			return '·'
		}
		return r
	}, s)
}

// pageReading is a reading as the page shows it: neighbours of one fate and
// one round in one stretch.
type pageReading struct {
	Title, Note string
	Spans       []pageSpan
	Rest        string
}

type pageSpan struct{ Class, Text, Tip string }

var fateClass = map[string]string{fateHit: "hit", fateMiss: "miss", fateBonus: "bonus", fateUnscored: "free", fateMasked: "masked"}

func (r Reading) page() pageReading {
	p := pageReading{
		Title: fmt.Sprintf("%s, drafted by %s", r.SeqID, r.Drafter),
		Note:  fmt.Sprintf("%s; %s of %s accepted", r.Why, count(r.Hits), quantity(r.Drafted, "judged draft")),
	}
	for _, t := range r.Tokens {
		class, ok := fateClass[t.Fate]
		if !ok {
			continue
		}
		text := strings.ReplaceAll(t.Text, "\n", "⏎\n")
		if n := len(p.Spans); n > 0 && p.Spans[n-1].Class == class && t.Slot != 1 && class != "miss" {
			p.Spans[n-1].Text += text
			continue
		}
		s := pageSpan{Class: class, Text: text}
		if class == "miss" {
			s.Tip = fmt.Sprintf("refused at slot %d", t.Slot)
		}
		p.Spans = append(p.Spans, s)
	}
	if left := r.Length - r.First - int64(len(r.Tokens)); left > 0 {
		p.Rest = quantity(left, "more token")
	}
	return p
}
