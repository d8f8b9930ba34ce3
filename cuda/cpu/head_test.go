package cpu

import (
	"testing"

	"github.com/draftscope/draftscope/cuda"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestHowMuchTheHeadKeepsDoesNotChangeABit(t *testing.T) {
	const rows, width, vocab, targets = 120, 24, 70, 60
	run := func(limits headLimits) cuda.HeadResult {
		d := device(t)
		d.limits = limits
		targetRow, labels := make([]int32, rows), make([]int32, rows)
		for i := range targetRow {
			// Blocks of 15 slots over neighbouring targets, then back again.
			targetRow[i] = int32((i/15*7+i%15)%targets) - 1
			labels[i] = int32(i * 7 % vocab)
		}
		res, err := d.Head(cuda.HeadArgs{
			Hidden: fill(t, d, width, normal(1, rows*width)...), Weight: fill(t, d, width, normal(2, vocab*width)...),
			Target: fill(t, d, width, normal(3, targets*width)...), TargetRow: targetRow, Labels: labels,
			K: 5, Losses: cuda.KL | cuda.RKL | cuda.JSD | cuda.TV,
		})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	want := run(defaultLimits)
	for name, limits := range map[string]headLimits{
		"one row of each":      {rows: 1, logits: 1, kept: 1},
		"few rows, few kept":   {rows: 7, logits: 1 << 20, kept: 9 * vocab},
		"many rows, none kept": {rows: 50, logits: 1 << 20, kept: 0},
		"few logits":           {rows: 256, logits: 16 * vocab, kept: 20 * vocab},
	} {
		if diff := cmp.Diff(want, run(limits), cmpopts.EquateNaNs()); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
