package drafter_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
)

// asSpeculators is the configuration of the fixtures' drafter good in the
// flavour of the speculators project, which names state c where z-lab names
// layer c-1.
const asSpeculators = `{
	"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 16, "mask_token_id": 3,
	"aux_hidden_state_layer_ids": [2, 4, 5, 6, 8], "draft_vocab_size": 4096, "target_hidden_size": 256,
	"transformer_layer_config": {
		"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2,
		"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
		"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}}}`

// scored runs one drafter over a sequence with KL asked for.
func (w *world) scored(d *drafter.Drafter, c captured) *emitted {
	w.tb.Helper()
	stage, mem := w.stage(drafter.Config{Drafters: []*drafter.Drafter{d}, Losses: cuda.KL, Budgets: []int{8}})
	return feed(w.tb, w, stage, mem, c, 64)
}

func TestACheckpointsOwnEmbeddingAndHeadAreUsed(t *testing.T) {
	w := newWorld(t)
	c := w.run(sequences(t)[2])
	want := w.scored(w.drafter("good"), c)
	embedding := make([]float32, vocab*hidden)
	w.must(w.dev.Download(embedding, w.host.Embedding))
	open := func(embed, head []float32) *drafter.Drafter {
		t.Helper()
		d, err := drafter.Open("good", []byte(asSpeculators), changed{checkpoint(t, "drafters/good"), map[string]*tensor{
			"embed_tokens.weight": {shape: []int{vocab, hidden}, f: embed},
			"lm_head.weight":      {shape: []int{vocab, hidden}, f: head},
		}}, w.host, w.dev)
		w.must(err)
		t.Cleanup(d.Close)
		return d
	}
	t.Run("copies change nothing, and the captured final state is no tap", func(t *testing.T) {
		d := open(embedding, embedding)
		if diff := cmp.Diff(taps(2, 4, 5, 6), d.Taps()); diff != "" || d.OwnHead() {
			t.Errorf("own head %t, taps:\n%s", d.OwnHead(), diff)
		}
		if diff := diff(want, w.scored(d, c)); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("another head drafts, and leaves the divergences out", func(t *testing.T) {
		turned := slices.Clone(embedding) // row i is the target's row i+1
		copy(turned, embedding[hidden:])
		copy(turned[(vocab-1)*hidden:], embedding[:hidden])
		d := open(embedding, turned)
		got := w.scored(d, c)
		if !d.OwnHead() {
			t.Fatal("the head counts as the target's")
		}
		for i, s := range got.slots["good"] {
			o := want.slots["good"][i]
			if s.DraftToken != (o.DraftToken+vocab-1)%vocab || s.KL != nil || !cmp.Equal(s.Label, o.Label) {
				t.Fatalf("anchor %d, slot %d: draft %d for %d, kl %v", s.Anchor, s.Slot, s.DraftToken, o.DraftToken, s.KL)
			}
		}
	})
	t.Run("another embedding changes the drafts", func(t *testing.T) {
		d := open(make([]float32, vocab*hidden), embedding)
		if slices.EqualFunc(want.drafts["good"], w.scored(d, c).drafts["good"], func(a, b schemas.Draft) bool {
			return slices.Equal(a.TopLogprobs, b.TopLogprobs)
		}) {
			t.Error("an embedding of zeros drafts the same")
		}
	})
}

// prefixed is a checkpoint whose names carry "model.".
type prefixed struct{ drafter.Weights }

func (p prefixed) Names() []string {
	var names []string
	for _, n := range p.Weights.Names() {
		names = append(names, "model."+n)
	}
	return names
}

func (p prefixed) Shape(name string) ([]int, bool) {
	return p.Weights.Shape(strings.TrimPrefix(name, "model."))
}

func (p prefixed) Float32s(name string) ([]float32, error) {
	return p.Weights.Float32s(strings.TrimPrefix(name, "model."))
}

func TestNamesMayCarryThePrefixOfAWholeModel(t *testing.T) {
	w := newWorld(t)
	d, err := drafter.Open("good", demotest.Read(t, "drafters/good/config.json"), prefixed{checkpoint(t, "drafters/good")}, w.host, w.dev)
	w.must(err)
	defer d.Close()
	if d.BlockSize() != 16 {
		t.Errorf("block size %d", d.BlockSize())
	}
}

func TestSlidingLayersForgetWhatLeftTheirWindow(t *testing.T) {
	w := newWorld(t)
	c := w.run(sequences(t)[2])
	config := string(demotest.Read(t, "drafters/good/config.json"))
	const anchor, window, block = 40, 8, 16
	sliding := []string{"sliding_attention", "sliding_attention"}
	for _, tt := range []struct {
		name   string
		config []byte
		oldest int // position that slot 1 still sees
		seen   int // position below which no slot sees
	}{
		{"moving with the slot", edit(t, config, map[string]any{"layer_types": sliding, "sliding_window": window}), anchor + 1 - (window - 1), anchor - (window - 1)},
		{"fixed at the anchor", edit(t, asSpeculators, map[string]any{"transformer_layer_config.layer_types": sliding, "transformer_layer_config.sliding_window": window}), anchor - window, anchor - window},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d, err := drafter.Open("sliding", tt.config, checkpoint(t, "drafters/good"), w.host, w.dev)
			w.must(err)
			defer d.Close()
			draft := func(changed int) [][]float32 {
				states := slices.Clone(c.states)
				if changed >= 0 {
					states[4] = slices.Clone(states[4])
					for j := range hidden {
						states[4][changed*hidden+j] -= 2
					}
				}
				ctx, err := d.NewContext()
				w.must(err)
				defer ctx.Close()
				w.must(ctx.Extend(w.taps(d, states, len(c.ids))))
				z, err := ctx.Draft([]int32{anchor}, c.ids[anchor:anchor+1])
				w.must(err)
				return slices.Collect(slices.Chunk(w.download(z), hidden))
			}
			clean := draft(-1)
			if len(clean) != block-1 {
				t.Fatalf("%d slots", len(clean))
			}
			if got := draft(tt.seen - 1); !slices.EqualFunc(clean, got, slices.Equal[[]float32]) {
				t.Errorf("position %d is out of every window and changes the block", tt.seen-1)
			}
			if got := draft(tt.oldest); slices.Equal(clean[0], got[0]) {
				t.Errorf("position %d is in slot 1's window and does not change it", tt.oldest)
			}
			if got := draft(anchor); !slices.EqualFunc(clean, got, slices.Equal[[]float32]) {
				t.Error("the anchor's own state changes the block")
			}
		})
	}
}

func TestAnchorsBeyondTheContextAreRefused(t *testing.T) {
	w := newWorld(t)
	c := w.run(sequences(t)[2])
	d := w.drafter("good")
	ctx, err := d.NewContext()
	w.must(err)
	defer ctx.Close()
	w.must(ctx.Extend(w.taps(d, c.states, 10)))
	if ctx.Len() != 10 {
		t.Errorf("length %d", ctx.Len())
	}
	for _, anchors := range [][]int32{{11}, {-1}, {3, 12}} {
		if _, err := ctx.Draft(anchors, make([]int32, len(anchors))); err == nil {
			t.Errorf("anchors %v were accepted", anchors)
		}
	}
	if _, err := ctx.Draft([]int32{3}, nil); err == nil {
		t.Error("an anchor without its token was accepted")
	}
	if err := ctx.Extend(w.taps(d, c.states, 3)[:2]); err == nil {
		t.Error("two of four taps were accepted")
	}
	for _, anchors := range [][]int32{nil, {10}, {0}} { // nothing; right at the end; no context at all
		if z, err := ctx.Draft(anchors, make([]int32, len(anchors))); err != nil || z.Rows != 15*len(anchors) {
			t.Errorf("anchors %v: %d rows, %v", anchors, z.Rows, err)
		}
	}
}
