package diagnose

import (
	"slices"

	"github.com/draftscope/draftscope/drafter"
)

// Graph is every choice that a DFlash pass makes and that weights do not fix.
// The declared graph follows a checkpoint's configuration; a variant changes
// one choice. If a variant drafts better than the declared graph, the weights
// were trained for the variant.
type Graph struct {
	Taps        []drafter.Tap // what each column block of fc reads
	Late        []int         // by how many tokens each tap is late; nil is none
	Mute        int           // 1 + the tap that fc does not read; 0 mutes none
	Theta       float64
	Rotary      int
	Interleaved layerSet // in which RoPE turns neighbours (2i, 2i+1), not halves
	Offset      int      // added to the positions of the block's rows
	Relative    bool     // the block's positions begin at 0, not at the anchor's
	Attention   []drafter.Visibility
	Tiled       layerSet // in which query head g reads kv head g mod kv, not g div (q/kv)
	Block       int      // how many slots of a block see one another, slot 0 counted
	MaskToken   int32
	MaskAnchor  bool // slot 0 carries the mask token instead of the anchor's
	// Context is how many positions the context holds beyond those before the
	// anchor: +1 is the anchor's own states, −1 lacks the last before it.
	Context int
	Across  bool // blocks of one sequence see one another
}

// layerSet is a set of layers, bit i for layer i.
type layerSet uint64

// everyLayer holds all of them.
const everyLayer = ^layerSet(0)

func (l layerSet) has(i int) bool { return l>>i&1 == 1 }

// Declared is the graph that a configuration asks for.
func Declared(s drafter.Spec) Graph {
	return Graph{Taps: s.Taps, Theta: s.Theta, Rotary: s.Rotary, Attention: s.Attention, Block: s.BlockSize, MaskToken: s.MaskToken}
}

// clone is a copy that shares nothing with g.
func (g Graph) clone() Graph {
	g.Taps, g.Late, g.Attention = slices.Clone(g.Taps), slices.Clone(g.Late), slices.Clone(g.Attention)
	return g
}

// late is by how many tokens tap p is late.
func (g Graph) late(p int) int {
	if g.Late == nil {
		return 0
	}
	return g.Late[p]
}
