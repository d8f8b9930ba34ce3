package diagnose

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/schemas"
)

// rewrite gives a sequence other tokens, as long as it was or shorter, with
// the states and answers that belong to them.
func rewrite(t *testing.T, c *Case, i int, ids []int32) {
	t.Helper()
	q := &c.Sequences[i]
	q.Tokens = q.Tokens[:len(ids)]
	all, err := c.Recompute(t.Context(), ids)
	if err != nil {
		t.Fatal(err)
	}
	for n := range q.States {
		q.States[n] = all[n]
	}
	s := &study{Case: *c}
	answers, _, err := s.answers(all[c.Host.Layers], nil)
	if err != nil {
		t.Fatal(err)
	}
	for k, id := range ids {
		q.Tokens[k].TokenID, q.Tokens[k].TargetArgmax = id, &answers[k]
	}
}

// commit puts a token into a sequence, and what the target says greedily
// behind it, more tokens of it.
func commit(t *testing.T, c *Case, i, at int, id int32, more int) {
	t.Helper()
	ids := append(slices.Clone(idsOf(c.Sequences[i])[:at]), id)
	s := &study{Case: *c}
	h := c.Host.Hidden
	for range more {
		all, err := c.Recompute(t.Context(), ids)
		if err != nil {
			t.Fatal(err)
		}
		next, _, err := s.answers(all[c.Host.Layers][(len(ids)-1)*h:], nil)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, next[0])
	}
	rewrite(t, c, i, ids)
}

// storeRounds records the rounds of the chain that the case's drafter makes,
// and its drafts.
func storeRounds(t *testing.T, c *Case) {
	t.Helper()
	c.Anchors = 1 << 20 // all
	storeDrafts(t, c, c.Drafter, func(*Graph) {})
	for i := range c.Sequences {
		q := &c.Sequences[i]
		for a := q.PromptLen; a < len(q.Tokens)-1; {
			drafts := q.Drafts[int32(a)]
			m := 0
			for m < len(drafts) && a+1+m < len(q.Tokens) && q.Tokens[a+1+m].TokenID == drafts[m] {
				m++
			}
			q.Rounds = append(q.Rounds, schemas.Round{
				Round: int32(len(q.Rounds)), Anchor: int32(a), Proposed: int32(len(drafts)), Accepted: int32(m), AcceptLen: int32(m + 1),
				Truncated: a+1+m >= len(q.Tokens),
			})
			a += m + 1
		}
	}
}

func TestAWronglyCommittedTokenIsNamedFirst(t *testing.T) {
	for _, tt := range []struct {
		name    string
		verdict Verdict
		plant   func(*testing.T, *Case)
	}{
		{"one token", Confirmed, func(t *testing.T, c *Case) { commit(t, c, 3, c.Sequences[3].PromptLen+6, 77, 8) }},
		{"the last token", Confirmed, func(t *testing.T, c *Case) { commit(t, c, 3, len(c.Sequences[3].Tokens)-1, 77, 0) }},
		{"the second likeliest, where the margin is a tenth of a logit or more", Confirmed, func(t *testing.T, c *Case) {
			runnerUp(t, c, 0.1, 1)
		}},
		{"one token in another engine's text", Supported, func(t *testing.T, c *Case) {
			c.Capture.Exact = false
			commit(t, c, 3, c.Sequences[3].PromptLen+6, 77, 8)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := demoCase(t, "good")
			c.Sequences = c.Sequences[:8]
			tt.plant(t, &c)
			wantFirst(t, examine(t, c, probeStates, probeLabels, probeLossless), "lossless", tt.verdict)
		})
	}
}

// runnerUp commits the second likeliest token where the likeliest leads by a
// margin of logits between least and most.
func runnerUp(t *testing.T, c *Case, least, most float64) {
	t.Helper()
	s, err := newStudy(t.Context(), *c)
	if err != nil {
		t.Fatal(err)
	}
	norm, h := s.finalNorm(), c.Host.Hidden
	z := make([]float32, h)
	for i, q := range s.seqs {
		for at := q.PromptLen; at < len(q.ids); at++ {
			norm(z, q.clean[c.Host.Layers][(at-1)*h:at*h])
			for id := range int32(200) {
				margin, noise, err := s.margin(z, q.labels[at], id)
				if err != nil {
					t.Fatal(err)
				}
				if margin > least && margin < most {
					t.Logf("%s, token %d: margin %.3g, arithmetic %.2g", q.ID, at, margin, noise)
					commit(t, c, i, at, id, 4)
					return
				}
			}
		}
	}
	t.Fatalf("no second token within %v to %v logits", least, most)
}

func TestSoundVerificationRaisesNoAlarm(t *testing.T) {
	for _, tt := range []struct {
		name  string
		want  Verdict
		plant func(*testing.T, *Case)
	}{
		{"greedy text", RuledOut, func(*testing.T, *Case) {}},
		{"another engine's near tie", RuledOut, func(t *testing.T, c *Case) {
			c.Capture.Exact = false
			runnerUp(t, c, 0, 0.6)
		}},
		{"text that is given", CannotTell, func(_ *testing.T, c *Case) {
			for i := range c.Sequences {
				c.Sequences[i].Greedy = false
			}
		}},
		{"another engine's text with penalties", CannotTell, func(t *testing.T, c *Case) {
			c.Capture.Exact = false
			rng := rand.New(rand.NewPCG(1, 2))
			for i, q := range c.Sequences {
				ids := idsOf(q)
				for at := q.PromptLen; at < len(ids); at++ {
					if rng.IntN(8) == 0 {
						ids[at] = int32(rng.IntN(4000) + 4)
					}
				}
				rewrite(t, c, i, ids)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := demoCase(t, "good")
			c.Sequences = c.Sequences[:8]
			tt.plant(t, &c)
			r := examine(t, c, probeStates, probeLabels, probeLossless)
			wantSilence(t, r)
			if f := find(t, r, "lossless"); f.Verdict != tt.want {
				t.Errorf("%s: %s (%s)", f.Verdict, f.Sentence, f.Measure)
			}
		})
	}
}

// keepRefused replaces the states behind every round by those of a cache that
// keeps what each round refused; other gives other tokens for it.
func keepRefused(t *testing.T, c *Case, other bool) {
	t.Helper()
	h := c.Host.Hidden
	for i := range c.Sequences {
		q := &c.Sequences[i]
		ids := idsOf(*q)
		sub := &subject{Sequence: *q}
		var run []int32
		rows := make([]int, 0, len(ids)) // of run, for every token
		at := 0
		take := func(hi int) {
			for ; at < hi; at++ {
				rows = append(rows, len(run))
				run = append(run, ids[at])
			}
		}
		for _, j := range sub.rejections() {
			take(j.next)
			refused := slices.Clone(j.refused)
			for k := range refused {
				if other {
					refused[k] = int32(100 + k)
				}
			}
			run = append(run, refused...)
		}
		take(len(ids))
		all, err := c.Recompute(t.Context(), run)
		if err != nil {
			t.Fatal(err)
		}
		for n := range q.States {
			out := make([]float32, 0, len(ids)*h)
			for _, row := range rows {
				out = append(out, all[n][row*h:(row+1)*h]...)
			}
			q.States[n] = out
		}
	}
}

func TestStatesThatKeepRefusedDraftsAreNamedFirst(t *testing.T) {
	for _, tt := range []struct {
		name    string
		verdict Verdict
		other   bool
	}{
		{"the stored drafts", Confirmed, false},
		{"drafts that are not stored", Supported, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := demoCase(t, "good")
			c.Sequences = c.Sequences[:8]
			storeRounds(t, &c)
			keepRefused(t, &c, tt.other)
			wantFirst(t, examine(t, c, probeStates, probeLabels), "rollback", tt.verdict)
		})
	}
	t.Run("none", func(t *testing.T) {
		c := demoCase(t, "good")
		c.Sequences = c.Sequences[:8]
		storeRounds(t, &c)
		r := examine(t, c, probeStates, probeLabels, probeLossless)
		wantSilence(t, r)
		if f := find(t, r, "rollback"); f.Verdict != RuledOut {
			t.Errorf("%s: %s", f.Verdict, f.Sentence)
		}
	})
	t.Run("a wrong token says in which round", func(t *testing.T) {
		c := demoCase(t, "good")
		c.Sequences = c.Sequences[:4]
		storeRounds(t, &c)
		q := c.Sequences[2]
		commit(t, &c, 2, int(q.Rounds[2].Anchor+q.Rounds[2].AcceptLen), 77, 3)
		wantFirst(t, examine(t, c, probeLossless), "lossless", Confirmed)
	})
}

// A hybrid target's recurrent state keeps what was refused as its keys do.
func TestAHybridsStatesThatKeepRefusedDraftsAreNamedFirst(t *testing.T) {
	w := sharedWorld(t)
	m, err := target.Open(demotest.FS(t), "hybrid", w.dev)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	hybrid := &world{model: m, clean: map[string][][]float32{}}
	c := Case{Device: w.dev, Capture: Capture{DType: schemas.F32, Exact: true}, Drafter: fixture(t, "good"), Recompute: hybrid.recompute, Host: drafter.Host{
		Embedding: m.Embedding(), Head: m.Head(), Vocab: m.Config().Vocab, Hidden: m.Config().Hidden, Layers: m.Config().Layers,
	}}
	c.Host.FinalNorm, c.Host.Eps, c.Host.Gain = m.FinalNorm()
	rng := rand.New(rand.NewPCG(3, 4))
	for range 4 {
		q := Sequence{ID: "h", PromptLen: 10, States: map[int][]float32{}, Drafts: map[int32][]int32{}}
		var ids []int32
		for k := range 60 {
			ids = append(ids, int32(rng.IntN(c.Host.Vocab)))
			q.Tokens = append(q.Tokens, schemas.Token{TokenID: ids[k], LossMask: k >= 10})
		}
		states, err := c.Recompute(t.Context(), ids)
		if err != nil {
			t.Fatal(err)
		}
		for n := range states {
			q.States[n] = states[n]
		}
		for a := int32(12); a < 50; a += 9 {
			q.Rounds = append(q.Rounds, schemas.Round{Anchor: a, Proposed: 4, Accepted: 1, AcceptLen: 2})
			for range 4 {
				q.Drafts[a] = append(q.Drafts[a], int32(rng.IntN(c.Host.Vocab)))
			}
		}
		c.Sequences = append(c.Sequences, q)
	}
	wantSilence(t, examine(t, c, probeStates))
	keepRefused(t, &c, false)
	wantFirst(t, examine(t, c, probeStates), "rollback", Confirmed)
}
