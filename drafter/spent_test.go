package drafter_test

import (
	"testing"
	"time"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
)

// TestAStageTellsOfItsWorkWhateverTheBatches: operations are those of the
// sequence; weights are read again with each batch, so their bytes are not.
func TestAStageTellsOfItsWorkWhateverTheBatches(t *testing.T) {
	w := newWorld(t)
	d := w.drafter("good")
	c := w.run(sequences(t)[3])
	for _, step := range []int{len(c.ids), 7} {
		var flops float64
		var busy, whole time.Duration
		stage, mem := w.stage(drafter.Config{
			Drafters: []*drafter.Drafter{d}, Budgets: []int{8},
			Spent: func(name string, took time.Duration, work ...cuda.Work) {
				switch name {
				case "good":
					busy += took
				case "":
					whole += took
				default:
					t.Errorf("work of %q", name)
				}
				for _, p := range work {
					flops += p.Flops
				}
			},
		})
		out := feed(t, w, stage, mem, c, step)
		var anchors []int32
		for _, row := range out.drafts["good"] {
			anchors = append(anchors, row.Anchor)
		}
		slots := float64(len(anchors) * (d.BlockSize() - 1))
		want := d.ContextWork(len(c.ids)).Flops + d.DraftWork(anchors).Flops + 2*slots*hidden*vocab
		if flops != want {
			t.Errorf("batches of %d: %g operations, want %g", step, flops, want)
		}
		if busy <= 0 || busy > whole {
			t.Errorf("batches of %d: the drafter was busy for %v of %v", step, busy, whole)
		}
	}
}
