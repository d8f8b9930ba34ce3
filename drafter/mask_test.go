package drafter_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/draftscope/draftscope/drafter"
)

func TestEachLayerKindSeesItsOwnKeys(t *testing.T) {
	const anchor, b, rows = 6, 4, 12
	for _, tt := range []struct {
		name string
		v    drafter.Visibility
		want [b][]int
	}{
		{"full", drafter.Visibility{}, [b][]int{
			{0, 1, 2, 3, 4, 5, 12, 13, 14, 15},
			{0, 1, 2, 3, 4, 5, 12, 13, 14, 15},
			{0, 1, 2, 3, 4, 5, 12, 13, 14, 15},
			{0, 1, 2, 3, 4, 5, 12, 13, 14, 15},
		}},
		{"SpecForge sliding", drafter.Visibility{Window: 4, Causal: true}, [b][]int{
			{3, 4, 5, 12}, {4, 5, 12, 13}, {5, 12, 13, 14}, {12, 13, 14, 15},
		}},
		{"speculators sliding", drafter.Visibility{Window: 4, Fixed: true, Causal: true}, [b][]int{
			{2, 3, 4, 5, 12}, {2, 3, 4, 5, 12, 13}, {2, 3, 4, 5, 12, 13, 14}, {2, 3, 4, 5, 12, 13, 14, 15},
		}},
		{"speculators sliding, not causal", drafter.Visibility{Window: 4, Fixed: true}, [b][]int{
			{2, 3, 4, 5, 12, 13, 14, 15},
			{2, 3, 4, 5, 12, 13, 14, 15},
			{2, 3, 4, 5, 12, 13, 14, 15},
			{2, 3, 4, 5, 12, 13, 14, 15},
		}},
		{"a window of one block", drafter.Visibility{Window: 1, Causal: true}, [b][]int{
			{12}, {12, 13}, {12, 13, 14}, {12, 13, 14, 15},
		}},
	} {
		for j := range b {
			t.Run(fmt.Sprintf("%s, slot %d", tt.name, j), func(t *testing.T) {
				span := tt.v.Span(anchor, j, rows, b)
				var keys []int
				for t := span.CtxLo; t < span.CtxHi; t++ {
					keys = append(keys, int(t))
				}
				for r := span.BlkLo; r < span.BlkHi; r++ {
					keys = append(keys, int(r))
				}
				if diff := cmp.Diff(tt.want[j], keys); diff != "" {
					t.Errorf("keys (-want +got):\n%s", diff)
				}
			})
		}
	}
}

func TestTheAnchorIsNotInItsContext(t *testing.T) {
	for anchor := range 9 {
		for _, v := range []drafter.Visibility{{}, {Window: 3}, {Window: 3, Fixed: true, Causal: true}} {
			for j := range 4 {
				s := v.Span(anchor, j, 0, 4)
				if int(s.CtxHi) > anchor || s.CtxLo < 0 || s.CtxLo > s.CtxHi {
					t.Errorf("%+v, anchor %d, slot %d: context %d..%d", v, anchor, j, s.CtxLo, s.CtxHi)
				}
			}
		}
	}
}

func TestAnchorsNeedTheirOwnMaskAndTheNext(t *testing.T) {
	for mask, want := range map[string][]int32{
		"":       nil,
		"1":      nil,
		"01":     nil,
		"011":    {1},
		"110111": {0, 3, 4},
		"0101":   nil,
	} {
		if got := drafter.Anchors(bits(mask)); !slices.Equal(got, want) {
			t.Errorf("mask %s: anchors %v, want %v", mask, got, want)
		}
	}
	want := []drafter.Turn{{Lo: 0, Hi: 2}, {Lo: 3, Hi: 6}}
	if diff := cmp.Diff(want, drafter.Turns(bits("1101110"))); diff != "" {
		t.Errorf("runs:\n%s", diff)
	}
}

func bits(s string) []bool {
	var out []bool
	for _, c := range s {
		out = append(out, c == '1')
	}
	return out
}
