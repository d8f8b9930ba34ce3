package drafter_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/drafter"
)

// half is a map of every other token of the target's vocabulary.
func half(vocab int) (d2t, t2d *tensor) {
	d2t, t2d = &tensor{shape: []int{vocab / 2}}, &tensor{shape: []int{vocab}}
	for t := range vocab {
		bit := int32(1 - t%2)
		t2d.i = append(t2d.i, bit)
		if bit == 1 {
			d2t.i = append(d2t.i, int32(t-t/2))
		}
	}
	return d2t, t2d
}

func TestAReducedVocabularyDraftsItsOwnTokensAndMissesTheOthers(t *testing.T) {
	w := newWorld(t)
	c := w.run(sequences(t)[2])
	vocab, hidden := w.host.Vocab, w.host.Hidden
	d2t, t2d := half(vocab)
	config := edit(t, asSpeculators, map[string]any{"draft_vocab_size": vocab / 2})
	open := func(set map[string]*tensor) *drafter.Drafter {
		t.Helper()
		d, err := drafter.Open("half", config, changed{checkpoint(t, "drafters/good"), set}, w.host, w.dev)
		w.must(err)
		t.Cleanup(d.Close)
		return d
	}
	whole := w.scored(w.drafter("good"), c)
	d := open(map[string]*tensor{"d2t": d2t, "t2d": t2d})
	got := w.scored(d, c)
	if !d.OwnHead() {
		t.Error("its head counts as the target's")
	}
	inside, outside := 0, 0
	for i, s := range got.slots["half"] {
		if s.DraftToken%2 != 0 {
			t.Fatalf("anchor %d, slot %d: token %d has no draft token", s.Anchor, s.Slot, s.DraftToken)
		}
		if full := whole.slots["good"][i].DraftToken; full%2 == 0 && s.DraftToken != full {
			t.Fatalf("anchor %d, slot %d: draft %d; the whole vocabulary's %d can be drafted", s.Anchor, s.Slot, s.DraftToken, full)
		}
		switch {
		case s.Hit == nil:
		case *s.Label%2 == 0:
			inside++
			if s.CE == nil || *s.Hit != (s.DraftToken == *s.Label) || s.KL != nil {
				t.Fatalf("anchor %d, slot %d: a label that can be drafted has ce %v, kl %v", s.Anchor, s.Slot, s.CE, s.KL)
			}
		default:
			outside++
			if *s.Hit || s.CE != nil || s.Rank != nil {
				t.Fatalf("anchor %d, slot %d: a label that cannot be drafted has hit %v, ce %v, rank %v", s.Anchor, s.Slot, *s.Hit, s.CE, s.Rank)
			}
		}
	}
	if inside == 0 || outside == 0 {
		t.Errorf("%d labels can be drafted and %d cannot: the test shows nothing", inside, outside)
	}
	for _, draft := range got.drafts["half"] {
		if slices.ContainsFunc(draft.TopIDs, func(id int32) bool { return id%2 != 0 }) {
			t.Fatalf("anchor %d: a candidate has no draft token", draft.Anchor)
		}
	}
	t.Run("with a head of its own it is the same", func(t *testing.T) {
		rows := w.download(w.host.Head)
		own := &tensor{shape: []int{vocab / 2, hidden}}
		for id := 0; id < vocab; id += 2 {
			own.f = append(own.f, rows[id*hidden:(id+1)*hidden]...)
		}
		again := w.scored(open(map[string]*tensor{"d2t": d2t, "t2d": t2d, "lm_head.weight": own}), c)
		for i, s := range again.slots["half"] {
			if s.DraftToken != got.slots["half"][i].DraftToken {
				t.Fatalf("anchor %d, slot %d: %d and %d", s.Anchor, s.Slot, s.DraftToken, got.slots["half"][i].DraftToken)
			}
		}
	})
}

func TestDamagedVocabularyMapsAreRefusedByName(t *testing.T) {
	w := newWorld(t)
	vocab := w.host.Vocab
	config := edit(t, asSpeculators, map[string]any{"draft_vocab_size": vocab / 2})
	with := func(change func(d2t, t2d *tensor)) map[string]*tensor {
		d2t, t2d := half(vocab)
		change(d2t, t2d)
		return map[string]*tensor{"d2t": d2t, "t2d": t2d}
	}
	for _, tt := range []struct {
		name string
		set  map[string]*tensor
		want string
	}{
		{"no map", nil, "draft_vocab_size is 2048 of 4096, and d2t is missing"},
		{"tokens in place of offsets", with(func(d2t, _ *tensor) {
			for d := range d2t.i {
				d2t.i[d] = int32(2 * d)
			}
		}), "outside the target's vocabulary of 4096; it must hold offsets"},
		{"two draft tokens for one", with(func(d2t, _ *tensor) { d2t.i[5]--; d2t.i[5]-- }), "draft tokens 4 and 5 to the same token 8"},
		{"outside", with(func(d2t, _ *tensor) { d2t.i[7] = 1 << 20 }), "outside the target's vocabulary"},
		{"a bit of t2d gone", with(func(_, t2d *tensor) { t2d.i[12] = 0 }), "t2d and d2t disagree on token 12"},
		{"a short t2d", with(func(_, t2d *tensor) { t2d.shape, t2d.i = []int{vocab - 1}, t2d.i[1:] }), "t2d has shape [4095], want [4096]"},
		{"a head of another height", func() map[string]*tensor {
			set := with(func(*tensor, *tensor) {})
			set["lm_head.weight"] = filled(0, 15, 256)
			return set
		}(), "lm_head.weight has shape [15 256], want [2048 256]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := drafter.Open("half", config, changed{checkpoint(t, "drafters/good"), tt.set}, w.host, w.dev)
			if !errors.Is(err, drafter.ErrWeights) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}
