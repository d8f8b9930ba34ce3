package diagnose

import (
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/drafter"
)

// Of the fixtures' drafters: heads of 64, 4 query and 2 kv heads, width 256.
const (
	fixtureDim  = 64
	fixtureWide = 256
)

func TestAPlantedFaultOfADrafterIsNamedFirst(t *testing.T) {
	config := func(change func(map[string]any)) func(*testing.T, *Checkpoint) {
		return func(t *testing.T, c *Checkpoint) { c.Config = setConfig(t, c.Config, change) }
	}
	weights := func(change func(string, []float32) []float32) func(*testing.T, *Checkpoint) {
		return func(_ *testing.T, c *Checkpoint) { c.Weights = edited{c.Weights, change} }
	}
	theta := func(v float64) func(map[string]any) {
		return func(m map[string]any) {
			m["rope_theta"] = v
			m["rope_parameters"].(map[string]any)["rope_theta"] = v
		}
	}
	taps := func(ids ...int) func(map[string]any) {
		return func(m map[string]any) { m["dflash_config"].(map[string]any)["target_layer_ids"] = ids }
	}
	for _, tt := range []struct {
		name, drafter, key string
		plant              func(*testing.T, *Checkpoint)
	}{
		{"a RoPE base of 1e6 in the config", "good", "rope-base", config(theta(1e6))},
		{"a RoPE base of 1e7 in the config", "early", "rope-base", config(theta(1e7))},
		{"half of a head rotated", "good", "rope-fraction", config(func(m map[string]any) { m["partial_rotary_factor"] = 0.5 })},
		{"a quarter of a head rotated", "good", "rope-fraction", config(func(m map[string]any) { m["partial_rotary_factor"] = 0.25 })},
		{"weights for interleaved RoPE", "good", "rope-layout", weights(interleave)},
		{"a window of 8 in layer 0", "good", "window", config(sliding(8, "sliding_attention", "full_attention"))},
		{"causal blocks", "good", "causality", config(func(m map[string]any) { m["is_causal"] = true })},
		{"heads in tiled order", "good", "gqa-order", weights(tile)},
		{"taps 0 and 3 exchanged in the config", "good", "tap-order", config(taps(5, 3, 4, 1))},
		{"column blocks 0 and 2 of fc exchanged", "good", "tap-order", weights(exchangeBlocks(0, 2))},
		{"three taps rotated in the config", "good", "tap-order", config(taps(3, 4, 1, 5))},
		{"layer ids two too high, up to the last", "good", "state-number", config(taps(3, 5, 6, 7))},
		{"heads of layer 0 in tiled order", "good", "gqa-order", weights(inLayer("0", tile))},
		{"layer ids one too low", "good", "state-number", config(taps(0, 2, 3, 4))},
		{"layer ids one too high", "good", "state-number", config(taps(2, 4, 5, 6))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := families(demoCase(t, tt.drafter), "rope-fraction", "gqa-order", "slot-0", tt.key)
			if tt.key == "state-number" { // a small effect
				c = families(c, "state-number", "slot-0")
			}
			tt.plant(t, &c.Drafter)
			r := examine(t, c, probeDrafter)
			if f := r.Findings[0]; tt.key == "state-number" && f.Verdict == Supported {
				wantFirst(t, r, tt.key, Supported)
				return
			}
			wantFirst(t, r, tt.key, Confirmed)
		})
	}
}

// sliding sets layer types and their window; causality stays as trained.
func sliding(window int, types ...string) func(map[string]any) {
	return func(m map[string]any) {
		m["layer_types"], m["sliding_window"], m["use_sliding_window"], m["is_causal"] = types, window, true, false
	}
}

// interleave stores q and k for RoPE over neighbouring dims: what stood at
// dims i and 32+i stands at 2i and 2i+1.
func interleave(name string, vals []float32) []float32 {
	var width int
	switch {
	case strings.HasSuffix(name, "q_proj.weight"), strings.HasSuffix(name, "k_proj.weight"):
		width = fixtureWide
	case strings.HasSuffix(name, "q_norm.weight"), strings.HasSuffix(name, "k_norm.weight"):
		width = 1
	default:
		return vals
	}
	out := slices.Clone(vals)
	for g := range len(vals) / (width * fixtureDim) {
		for i := range fixtureDim / 2 {
			for half := range 2 {
				from, to := (g*fixtureDim+half*fixtureDim/2+i)*width, (g*fixtureDim+2*i+half)*width
				copy(out[to:to+width], vals[from:from+width])
			}
		}
	}
	return out
}

// tile stores the query heads so that head g must read kv head g mod 2: heads
// 0 1 | 2 3 of kv heads 0 | 1 become 0 2 1 3.
func tile(name string, vals []float32) []float32 {
	heads := []int{0, 2, 1, 3}
	switch {
	case strings.HasSuffix(name, "q_proj.weight"):
		dims := make([]int, fixtureDim)
		for i := range dims {
			dims[i] = i
		}
		return permuteRows(vals, fixtureWide, heads, dims)
	case strings.HasSuffix(name, "o_proj.weight"):
		return permuteHeadColumns(vals, fixtureWide, fixtureDim, heads)
	}
	return vals
}

func exchangeBlocks(a, b int) func(string, []float32) []float32 {
	return func(name string, vals []float32) []float32 {
		if name != "fc.weight" {
			return vals
		}
		blocks := []int{0, 1, 2, 3}
		blocks[a], blocks[b] = b, a
		return permuteHeadColumns(vals, fixtureWide, fixtureWide, blocks)
	}
}

// preNorm rewrites the configuration in the speculators' form, whose ids are
// states before the final norm: the shortcut drafter was trained on the state
// behind it.
func preNorm(t *testing.T, c *Checkpoint) {
	c.Config = setConfig(t, c.Config, func(m map[string]any) {
		nested := map[string]any{}
		for k, v := range m {
			if k != "dflash_config" && k != "architectures" && k != "block_size" && k != "num_target_layers" {
				nested[k] = v
			}
		}
		for k := range m {
			delete(m, k)
		}
		m["speculators_model_type"], m["architectures"] = "dflash", []string{"DFlashSpeculator"}
		m["transformer_layer_config"], m["block_size"], m["mask_token_id"] = nested, 16, 3
		m["aux_hidden_state_layer_ids"] = []int{2, 4, 6, 8}
	})
}

// The shortcut drafter hardly uses its final state, so that the side of the
// norm makes no difference that these sequences could show: it must not be
// called a fault, nor be found without reason.
func TestTheSideOfTheFinalNormIsNotJudgedWhereItMakesNoDifference(t *testing.T) {
	c := families(demoCase(t, "shortcut"), "final-norm")
	preNorm(t, &c.Drafter)
	r := examine(t, c, probeDrafter)
	if f := find(t, r, "final-norm"); f.alarm() {
		t.Errorf("%s: %s", f.Verdict, f.Measure)
	} else {
		t.Logf("%s: %s", f.Verdict, f.Measure)
	}
}

func TestHealthyDraftersRaiseNoAlarm(t *testing.T) {
	for _, name := range []string{"good", "early"} {
		t.Run(name, func(t *testing.T) {
			c := families(demoCase(t, name), "rope-offset", "causality", "state-number", "anchor-leak")
			wantSilence(t, examine(t, c, probeStates, probeLabels, probeMask, probeDrafter))
		})
	}
}

func TestAnotherScaleOfFcIsNoFinding(t *testing.T) {
	c := families(demoCase(t, "good"), "rope-base", "tap-use")
	c.Drafter.Weights = edited{c.Drafter.Weights, func(name string, vals []float32) []float32 {
		if name == "fc.weight" {
			for i := range vals {
				vals[i] *= 7
			}
		}
		return vals
	}}
	wantSilence(t, examine(t, c, probeDrafter))
}

func TestShiftedLabelsAreConfirmedWithTheirOffset(t *testing.T) {
	r := examine(t, families(demoCase(t, "shift"), "rope-offset"), probeDrafter)
	wantFirst(t, r, keyShift, Confirmed)
	for _, o := range r.Offsets {
		if o.Shift != 1 && o.Accuracy[0] > 0.2 || o.Shift == 1 && o.Accuracy[0] < 0.4 {
			t.Errorf("offset %+d: slot 1 hits %.3f", o.Shift, o.Accuracy[0])
		}
	}
}

func TestTheFinalStateAmongTheTapsIsConfirmedWithItsSmallEffect(t *testing.T) {
	r := examine(t, families(demoCase(t, "shortcut"), "tap-use"), probeDrafter)
	wantFirst(t, r, keyFinalTap, Confirmed)
	if e := r.Findings[0].Effect; e == nil || e.Value < -0.05 || e.Value > 0.15 {
		t.Errorf("its effect is %v", e)
	}
}

func TestTheGraphOfStoredDraftsIsNamed(t *testing.T) {
	for _, tt := range []struct {
		name, family, words string
		graph               func(*Graph)
	}{
		{"the mask in slot 0", "slot-0", "the mask token in slot 0", func(g *Graph) { g.MaskAnchor = true }},
		{"the anchor in the context", "anchor-leak", "the anchor's own states", func(g *Graph) { g.Context = 1 }},
		{"positions one too far", "rope-offset", "moved by +1", func(g *Graph) { g.Offset = 1 }},
		{"positions one too early", "rope-offset", "moved by -1", func(g *Graph) { g.Offset = -1 }},
		{"taps a token late", "tap-late", "late by a token", func(g *Graph) { g.Late = []int{1, 1, 1, 1} }},
		{"tiled heads", "gqa-order", "tiled", func(g *Graph) { g.Tiled = everyLayer }},
		{"interleaved RoPE", "rope-layout", "interleaved", func(g *Graph) { g.Interleaved = everyLayer }},
		{"a causal first layer", "causality", "layer 0 causal", func(g *Graph) { g.Attention[0].Causal = true }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := families(demoCase(t, "good"), "slot-0", "rope-offset", tt.family)
			storeDrafts(t, &c, c.Drafter, tt.graph)
			r := examine(t, c, probeDrafter)
			wantFirst(t, r, keyStored, Confirmed)
			if !strings.Contains(r.Findings[0].Sentence, tt.words) {
				t.Errorf("it says %q, want %q in it", r.Findings[0].Sentence, tt.words)
			}
		})
	}
	t.Run("other weights", func(t *testing.T) {
		c := families(demoCase(t, "good"), "slot-0")
		storeDrafts(t, &c, fixture(t, "early"), func(*Graph) {})
		wantFirst(t, examine(t, c, probeDrafter), keyStored, Supported)
	})
	t.Run("its own drafts", func(t *testing.T) {
		c := families(demoCase(t, "good"), "slot-0")
		storeDrafts(t, &c, c.Drafter, func(*Graph) {})
		r := examine(t, c, probeDrafter)
		wantSilence(t, r)
		if f := find(t, r, keyStored); f.Verdict != RuledOut {
			t.Errorf("stored drafts: %s", f.Verdict)
		}
	})
}

// storeDrafts records in the case what a graph of some weights drafts.
func storeDrafts(t *testing.T, c *Case, from Checkpoint, change func(*Graph)) {
	t.Helper()
	s, err := newStudy(t.Context(), *c)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := drafter.ParseDFlash(from.Config, c.Host.Layers)
	if err != nil {
		t.Fatal(err)
	}
	rep, err := newReplica(spec, from.Weights, c.Host, c.Device)
	if err != nil {
		t.Fatal(err)
	}
	defer rep.close()
	g := Declared(spec).clone()
	change(&g)
	ms, err := s.scan(t.Context(), rep, []Graph{g}, spec.BlockSize-1, false)
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range ms[0] {
		drafts := map[int32][]int32{}
		for j, a := range m.anchors {
			drafts[a] = m.tokens[j*m.slots : (j+1)*m.slots]
		}
		c.Sequences[i].Drafts = drafts
	}
}
