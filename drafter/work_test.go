package drafter

import (
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// TestWorkIsWhatTheBaselineCounts spells out the counts of a benchmark in
// PyTorch at the shapes of Qwen3.6-27B's drafter: 2048 rows of context, 32
// anchors, every layer full.
func TestWorkIsWhatTheBaselineCounts(t *testing.T) {
	const h, layers, qh, kvh, hd, ff, vocab, b, taps = 5120, 5, 32, 8, 128, 17408, 248320, 16, 5
	const n, a = 2048, 32
	s := Spec{
		Hidden: h, Inter: ff, Layers: layers, Heads: qh, KVHeads: kvh, HeadDim: hd, Vocab: vocab,
		BlockSize: b, Taps: make([]Tap, taps), Attention: make([]Visibility, layers),
	}
	var anchors []int32
	seen := 0
	for i := range a {
		at := n/8 + i*(n-n/8-b-2)/(a-1)
		anchors = append(anchors, int32(at))
		seen += at + b
	}
	for _, part := range []struct {
		name      string
		got, want cuda.Work
	}{
		{"context", s.contextWork(n), cuda.Work{
			Flops:  2 * n * (taps*h*h + layers*2*h*kvh*hd),
			Values: taps*h*h + layers*2*h*kvh*hd + n*taps*h,
		}},
		{"draft", s.draftWork(anchors), cuda.Work{
			Flops:  layers*2*a*b*(h*qh*hd*2+h*kvh*hd*2+3*h*ff) + layers*4*qh*hd*b*float64(seen),
			Values: layers * (2*h*qh*hd + 2*h*kvh*hd + 3*h*ff),
		}},
		{"head", headWork(a*(b-1), cuda.Tensor{Rows: vocab, Cols: h}), cuda.Work{
			Flops:  2 * a * (b - 1) * h * vocab,
			Values: vocab * h,
		}},
	} {
		if part.got != part.want {
			t.Errorf("%s: %+v, want %+v", part.name, part.got, part.want)
		}
	}
}

func TestWorkLeavesOutWhatIsMasked(t *testing.T) {
	s := Spec{Heads: 1, HeadDim: 1, BlockSize: 4}
	keys := func(rule Visibility, anchors ...int32) float64 {
		s.Attention = []Visibility{rule}
		return s.draftWork(anchors).Flops / 4
	}
	for _, tt := range []struct {
		name string
		rule Visibility
		want float64
	}{
		{"full", Visibility{}, 4 * (100 + 4)},
		{"causal", Visibility{Causal: true}, 4*100 + 1 + 2 + 3 + 4},
		{"window at the block's start", Visibility{Window: 10, Fixed: true}, 4 * (10 + 4)},
		{"window at the slot", Visibility{Window: 10}, 9 + 8 + 7 + 6 + 4*4},
	} {
		if got := keys(tt.rule, 100); got != tt.want {
			t.Errorf("%s: %v keys, want %v", tt.name, got, tt.want)
		}
	}
}
