package diagnose

import (
	"fmt"
	"slices"

	"github.com/draftscope/draftscope/drafter"
)

// variant is the declared graph with one choice changed.
type variant struct {
	key   string // of the finding that it belongs to
	words string // what the graph does, after "the block's hits with"
	graph Graph
}

// variants lists what is tried on a drafter. Every entry must be a different
// computation than the declared one.
//
// states are those that are known; specials are the tokens that could stand
// for the mask.
func variants(spec drafter.Spec, targetLayers int, states []int, specials []int32) []variant {
	d := Declared(spec)
	var out []variant
	add := func(key, words string, change func(*Graph)) {
		g := d.clone()
		change(&g)
		out = append(out, variant{key, words, g})
	}
	ropeVariants(spec, add)
	attentionVariants(d.Attention, add)
	if spec.KVHeads > 1 && spec.Heads > spec.KVHeads {
		add("gqa-order", "query head g on kv head g mod kv (tiled)", func(g *Graph) { g.Tiled = everyLayer })
		eachLayer(spec, func(i int, words string) {
			add("gqa-order", "query head g on kv head g mod kv (tiled)"+words, func(g *Graph) { g.Tiled = 1 << i })
		})
	}
	add("slot-0", "the mask token in slot 0", func(g *Graph) { g.MaskAnchor = true })
	add("anchor-leak", "the anchor's own states in the context", func(g *Graph) { g.Context = 1 })
	add("context-end", "the context ending a token before the anchor's predecessor", func(g *Graph) { g.Context = -1 })
	add("across-blocks", "the blocks of other anchors visible", func(g *Graph) { g.Across = true })
	for _, size := range []int{4, 8, 12} {
		if size < spec.BlockSize {
			add("block-size", fmt.Sprintf("blocks of %d", size), func(g *Graph) { g.Block = size })
		}
	}
	for _, id := range specials {
		if id != spec.MaskToken {
			add("mask-token", fmt.Sprintf("mask token %d", id), func(g *Graph) { g.MaskToken = id })
		}
	}
	tapVariants(d.Taps, targetLayers, states, add)
	return out
}

// eachLayer visits the layers of a drafter that has several.
func eachLayer(spec drafter.Spec, visit func(i int, words string)) {
	for i := range spec.Attention {
		if len(spec.Attention) > 1 {
			visit(i, fmt.Sprintf(" in layer %d", i))
		}
	}
}

type adder func(key, words string, change func(*Graph))

func ropeVariants(spec drafter.Spec, add adder) {
	for _, theta := range []float64{1e3, 1e4, 1e5, 5e5, 1e6, 1e7} {
		if theta != spec.Theta {
			add("rope-base", fmt.Sprintf("RoPE base %g", theta), func(g *Graph) { g.Theta = theta })
		}
	}
	for _, quarter := range []int{1, 2, 3, 4} {
		rotary := spec.HeadDim * quarter / 4
		if rotary >= 2 && rotary%2 == 0 && rotary != spec.Rotary {
			add("rope-fraction", fmt.Sprintf("%d of %d dims of a head rotated", rotary, spec.HeadDim), func(g *Graph) { g.Rotary = rotary })
		}
	}
	add("rope-layout", "neighbouring dims rotated together (interleaved)", func(g *Graph) { g.Interleaved = everyLayer })
	eachLayer(spec, func(i int, words string) {
		add("rope-layout", "neighbouring dims rotated together (interleaved)"+words, func(g *Graph) { g.Interleaved = 1 << i })
	})
	for _, by := range []int{-2, -1, 1, 2} {
		add("rope-offset", fmt.Sprintf("the block's positions moved by %+d", by), func(g *Graph) { g.Offset = by })
	}
	add("rope-offset", "the block's positions counted from 0", func(g *Graph) { g.Relative = true })
}

// attentionVariants changes one layer at a time, and all at once.
func attentionVariants(rules []drafter.Visibility, add adder) {
	words := map[bool]string{true: "causal", false: "bidirectional"}
	windows := []int{0, 8, 32, 128, 512, 2048}
	causal := func(g *Graph, i int) { g.Attention[i].Causal = !rules[i].Causal }
	for i, rule := range rules {
		add("causality", fmt.Sprintf("layer %d %s within the block", i, words[!rule.Causal]), func(g *Graph) { causal(g, i) })
		for _, w := range windows {
			if w != rule.Window {
				add("window", windowWords(w)+fmt.Sprintf(" in layer %d", i), func(g *Graph) { g.Attention[i].Window = w })
			}
		}
	}
	if len(rules) < 2 {
		return
	}
	add("causality", "every layer the other way within the block", func(g *Graph) {
		for i := range rules {
			causal(g, i)
		}
	})
	for _, w := range windows {
		if slices.ContainsFunc(rules, func(r drafter.Visibility) bool { return r.Window != w }) {
			add("window", windowWords(w)+" in every layer", func(g *Graph) {
				for i := range rules {
					g.Attention[i].Window = w
				}
			})
		}
	}
}

func windowWords(w int) string {
	if w == 0 {
		return "no window"
	}
	return fmt.Sprintf("a window of %d", w)
}

// tapVariants changes what fc reads, as far as the states are known.
func tapVariants(taps []drafter.Tap, n int, states []int, add adder) {
	known := func(t drafter.Tap) bool {
		return slices.Contains(states, t.State)
	}
	moved := func(by int) ([]drafter.Tap, bool) {
		out := slices.Clone(taps)
		for i, t := range taps {
			out[i] = drafter.Tap{State: t.State + by}
			if t.State+by < 0 || t.State+by > n || !known(out[i]) {
				return nil, false
			}
		}
		return out, true
	}
	for _, by := range []int{-1, 1, -2, 2} {
		if m, ok := moved(by); ok && !slices.Equal(m, taps) {
			add("state-number", "every tap reading the state "+map[int]string{-1: "one lower", 1: "one higher", -2: "two lower", 2: "two higher"}[by], func(g *Graph) { g.Taps = m })
		}
		if by != 1 && by != -1 {
			continue
		}
		for p, t := range taps {
			other := drafter.Tap{State: t.State + by}
			if known(other) && other.State >= 0 && other.State <= n {
				add("tap-state", fmt.Sprintf("tap %d reading state %d for %d", p, other.State, t.State), func(g *Graph) { g.Taps[p] = other })
			}
		}
	}
	for p, t := range taps {
		if t.State == n {
			words := map[bool]string{true: "before", false: "after"}[t.Normed]
			add("final-norm", fmt.Sprintf("tap %d %s the final norm", p, words), func(g *Graph) { g.Taps[p].Normed = !t.Normed })
		}
		if len(taps) > 1 {
			add("tap-use", fmt.Sprintf("tap %d left out", p), func(g *Graph) { g.Mute = p + 1 })
		}
	}
	tapOrders(taps, add)
	if len(taps) > 2 {
		reversed := slices.Clone(taps)
		slices.Reverse(reversed)
		add("tap-order", "the taps in reverse order", func(g *Graph) { g.Taps = reversed })
	}
	for _, by := range []int{-1, 1} {
		late := slices.Repeat([]int{by}, len(taps))
		add("tap-late", fmt.Sprintf("every tap %s by a token", map[int]string{-1: "early", 1: "late"}[by]), func(g *Graph) { g.Late = late })
	}
}

// tapOrders exchanges two taps.
func tapOrders(taps []drafter.Tap, add adder) {
	for p := range taps {
		for q := p + 1; q < len(taps); q++ {
			add("tap-order", fmt.Sprintf("taps %d and %d exchanged", p, q), func(g *Graph) { g.Taps[p], g.Taps[q] = g.Taps[q], g.Taps[p] })
		}
	}
}

// orderWords says in which order taps stand.
func orderWords(taps []drafter.Tap) string {
	states := make([]int, len(taps))
	for i, t := range taps {
		states[i] = t.State
	}
	return fmt.Sprintf("the taps reading the states %v", states)
}
