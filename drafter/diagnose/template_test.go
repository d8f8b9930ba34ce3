package diagnose

import (
	"strings"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

// Two tokens that these tests spell as a tokenizer of a thinking target does.
const openID, shutID = 4001, 4002

// thinking spells two tokens as the marks of a thought.
func thinking(c *Case) {
	text := c.Text
	c.Text = func(id int32) string {
		switch id {
		case openID:
			return thinkOpen
		case shutID:
			return thinkClose
		}
		return text(id)
	}
}

// write puts tokens at the begin of a sequence's reply, by spoken places.
func write(q Sequence, places map[int]int32) {
	for at, id := range places {
		q.Tokens[q.PromptLen+at].TokenID = id
	}
}

// unmask leaves the first n tokens of a reply out of the mask.
func unmask(q Sequence, n int) {
	for t := range n {
		q.Tokens[q.PromptLen+t].LossMask = false
	}
}

// eachOf changes the sequences of a case, which are copies.
func eachOf(c *Case, change func(i int, q Sequence)) {
	for i, q := range c.Sequences {
		change(i, q)
	}
}

func TestAPlantedFaultOfATemplateIsNamedFirst(t *testing.T) {
	scaffold := map[int]int32{0: openID, 1: shutID}
	for _, tt := range []struct {
		name, key string
		verdict   Verdict
		plant     func(*Case)
	}{
		{"another token for the header's newline", "template", Confirmed, func(c *Case) {
			eachOf(c, func(_ int, q Sequence) { q.Tokens[q.PromptLen-1].TokenID = 5 })
		}},
		{"the same in one sequence of eight", "template", Supported, func(c *Case) {
			c.Sequences[3].Tokens[c.Sequences[3].PromptLen-1].TokenID = 5
		}},
		{"a header in other tokens of the same text", "template", Confirmed, func(c *Case) {
			text := c.Text
			c.Text = func(id int32) string {
				if id == 7 {
					return "\n"
				}
				return text(id)
			}
			eachOf(c, func(_ int, q Sequence) { q.Tokens[q.PromptLen-1].TokenID = 7 })
		}},
		{"an empty scaffold in the loss of every other reply", "thinking", Confirmed, func(c *Case) {
			eachOf(c, func(i int, q Sequence) {
				write(q, scaffold)
				unmask(q, 2*(i%2))
			})
		}},
		{"the opening of a thought in the loss of one reply of eight", "thinking", Supported, func(c *Case) {
			eachOf(c, func(i int, q Sequence) {
				write(q, map[int]int32{0: openID, 4: shutID})
				if i > 0 {
					unmask(q, 1)
				}
			})
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := demoCase(t, "good")
			c.Sequences = c.Sequences[:8]
			thinking(&c)
			tt.plant(&c)
			wantFirst(t, examine(t, c, probeMask, probeTemplate), tt.key, tt.verdict)
		})
	}
}

func TestSoundTemplatesRaiseNoAlarm(t *testing.T) {
	for _, tt := range []struct {
		name  string
		plant func(*Case)
	}{
		{"no thoughts", func(*Case) {}},
		{"empty scaffolds outside and thoughts inside", func(c *Case) {
			eachOf(c, func(i int, q Sequence) {
				if i%2 == 0 {
					write(q, map[int]int32{0: openID, 1: shutID})
					unmask(q, 2)
				} else {
					write(q, map[int]int32{0: openID, 9: shutID})
				}
			})
		}},
		{"thoughts that the template opens", func(c *Case) {
			eachOf(c, func(_ int, q Sequence) {
				write(q, map[int]int32{0: openID, 9: shutID})
				unmask(q, 1)
			})
		}},
		{"a thought that does not end", func(c *Case) {
			eachOf(c, func(_ int, q Sequence) { write(q, map[int]int32{0: openID}) })
		}},
		{"no encoder", func(c *Case) { c.Encode = nil }},
		{"no tokenizer", func(c *Case) { c.Text, c.Encode = nil, nil }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := demoCase(t, "good")
			c.Sequences = c.Sequences[:8]
			thinking(&c)
			tt.plant(&c)
			wantSilence(t, examine(t, c, probeMask, probeTemplate))
		})
	}
}

func TestHitsWithinThoughtsAreToldFromThoseBehind(t *testing.T) {
	c := demoCase(t, "good")
	c.Sequences = c.Sequences[:8]
	thinking(&c)
	eachOf(&c, func(_ int, q Sequence) { write(q, map[int]int32{0: openID, 9: shutID}) })
	s, err := newStudy(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	runs := make([]engineRun, len(s.seqs))
	for i, q := range s.seqs {
		for at := q.PromptLen; at+1 < min(len(q.ids), q.PromptLen+30); at++ {
			hit := at+1 > q.PromptLen+9 || at%5 == 0
			runs[i].slots = append(runs[i].slots, schemas.Slot{Anchor: int32(at), Slot: 1, Hit: &hit})
		}
	}
	var r Report
	s.probeThoughts(&r, runs)
	f := find(t, &r, "thinking-hits")
	if f.Verdict != Confirmed || f.alarm() || f.Effect.High >= 0 {
		t.Errorf("%s: %s (%s)", f.Verdict, f.Sentence, f.Measure)
	}
	if got := s.byReach(runs); !strings.HasSuffix(got, "1.000 from 16") {
		t.Errorf("by distance: %s", got)
	}
}
