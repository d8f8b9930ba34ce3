package drafter

import "github.com/draftscope/draftscope/cuda"

// Visibility is the attention rule of one layer: which keys a slot of a block
// may see. The zero value is a full, bidirectional layer.
type Visibility struct {
	// Window is the number W of the sliding window; 0 is unlimited.
	Window int
	// Fixed anchors the window at the block's start: every slot sees the W
	// positions before the anchor (the speculators rule). Otherwise the window
	// moves with the slot, whose own key counts as one of the W (SpecForge).
	Fixed bool
	// Causal hides the later slots of the own block.
	Causal bool
}

// Span gives the keys that slot j of the block at anchor may see, when the
// context's row t holds position t and the block's b rows start at row first
// of the call. The anchor and all that follows it are never in the context.
func (v Visibility) Span(anchor, j, first, b int) cuda.Span {
	lo := 0
	if v.Window > 0 {
		if v.Fixed {
			lo = anchor - v.Window
		} else {
			lo = anchor + j - (v.Window - 1)
		}
	}
	hi := first + b
	if v.Causal {
		hi = first + j + 1
	}
	return cuda.Span{
		CtxLo: int32(min(max(lo, 0), anchor)), CtxHi: int32(anchor),
		BlkLo: int32(first), BlkHi: int32(hi),
	}
}
