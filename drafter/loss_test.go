package drafter_test

import (
	"encoding/json"
	"fmt"
	"math"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/drafter"
)

func near(t *testing.T, name string, got, want, tol float64) {
	t.Helper()
	if !(math.Abs(got-want) <= tol) {
		t.Errorf("%s = %.9g, want %.9g within %g", name, got, want, tol)
	}
}

func TestLossesOfTwoBlocksByHand(t *testing.T) {
	nan := math.NaN()
	l := [][]float64{{nan, .5, 1, 2}, {nan, .2, .4, nan}}
	mask := [][]bool{{false, true, true, true}, {false, true, true, false}}
	for _, tt := range []struct {
		opt  drafter.LossOptions
		want float64
	}{
		{drafter.LossOptions{Weighting: drafter.ExpDecay, Gamma: 7}, .7617405},
		{drafter.LossOptions{Weighting: drafter.ExpDecay, Gamma: 7, Normaliser: drafter.ByCount}, .6833154},
		{drafter.LossOptions{Weighting: drafter.DPace, Normaliser: drafter.ByCount}, .5909590},
		{drafter.LossOptions{Weighting: drafter.DPace, Normaliser: drafter.ByBatch}, 2.9548011},
		{drafter.LossOptions{Weighting: drafter.DPace, Normaliser: drafter.ByBatch, Batch: 2}, 2.9548011 / 2},
		{drafter.LossOptions{}, 4.1 / 5},
	} {
		got, err := drafter.Loss(l, l, mask, tt.opt)
		if err != nil {
			t.Fatal(err)
		}
		near(t, fmt.Sprintf("%+v", tt.opt), got, tt.want, 1e-7)
	}
	for k, want := range []float64{0, 1.6645185, .8612532, .3118681} {
		near(t, fmt.Sprintf("D-PACE weight %d", k), drafter.DPaceWeights(l[0], mask[0])[k], want, 1e-7)
	}
	for k, want := range []float64{0, 1.6688310, .7594656, 0} {
		near(t, fmt.Sprintf("D-PACE weight %d", k), drafter.DPaceWeights(l[1], mask[1])[k], want, 1e-7)
	}
	near(t, "EAL", drafter.EAL([]float64{.8, .6, .5}), 1.52, 1e-12)
}

func TestNothingScoredIsNoLoss(t *testing.T) {
	got, err := drafter.Loss([][]float64{{0, 1}}, nil, [][]bool{{false, false}}, drafter.LossOptions{})
	if err != nil || !math.IsNaN(got) {
		t.Errorf("loss %v, %v; want NaN", got, err)
	}
}

func TestWrongLossOptionsAreRefused(t *testing.T) {
	for _, opt := range []drafter.LossOptions{
		{Weighting: "steep"}, {Weighting: drafter.ExpDecay}, {Normaliser: "tokens"}, {Batch: -1},
	} {
		if _, err := drafter.Loss(nil, nil, nil, opt); err == nil {
			t.Errorf("%+v was accepted", opt)
		}
	}
}

func TestLossesAndMetricsEqualTheSpeculatorsProject(t *testing.T) {
	var golden struct {
		BlockSize int `json:"block_size"`
		Cases     []struct {
			Loss      drafter.Objective  `json:"loss_fn"`
			Weighting drafter.Weighting  `json:"weight"`
			Gamma     float64            `json:"gamma"`
			Want      float64            `json:"loss"`
			Metrics   map[string]float64 `json:"metrics"`
		} `json:"cases"`
	}
	if err := json.Unmarshal(demotest.Read(t, "golden/training_metrics.json"), &golden); err != nil {
		t.Fatal(err)
	}
	if len(golden.Cases) != 14 {
		t.Fatalf("%d cases, want 14", len(golden.Cases))
	}
	data := readTensors(t, "golden/training_metrics.safetensors")
	rows, vocab := data["logits"].shape[0], data["logits"].shape[1]
	b := golden.BlockSize
	row := func(name string, i int) []float32 { return data[name].f[i*vocab : (i+1)*vocab] }
	perSlot := func(o drafter.Objective) [][]float64 {
		var blocks [][]float64
		for i := range rows {
			if i%b == 0 {
				blocks = append(blocks, nil)
			}
			l, err := drafter.SlotLoss(o, row("logits", i), row("target_logits", i))
			if err != nil {
				t.Fatal(err)
			}
			blocks[i/b] = append(blocks[i/b], l)
		}
		return blocks
	}
	var mask [][]bool
	var tally drafter.Tally
	for i := 0; i < rows; i += b {
		scored, hit := make([]bool, b), make([]bool, b)
		for k := range b {
			scored[k] = data["loss_mask"].f[i+k] == 1
			hit[k] = drafter.Argmax(row("logits", i+k)) == drafter.Argmax(row("target_logits", i+k))
		}
		mask = append(mask, scored)
		tally.Add(hit, scored)
	}
	ce := perSlot(drafter.CE)
	for _, c := range golden.Cases {
		t.Run(fmt.Sprintf("%s/%s/%g", c.Loss, c.Weighting, c.Gamma), func(t *testing.T) {
			got, err := drafter.Loss(perSlot(c.Loss), ce, mask, drafter.LossOptions{
				Weighting: c.Weighting, Gamma: c.Gamma, Normaliser: drafter.ByCount,
			})
			if err != nil {
				t.Fatal(err)
			}
			near(t, "loss", got, c.Want, 1e-5)
			near(t, "loss_sum", got, c.Metrics["loss_sum"], 1e-5)
			hits, scored := tally.Accuracy()
			near(t, "full_acc_sum", float64(hits), c.Metrics["full_acc_sum"], 0)
			near(t, "full_acc_total", float64(scored), c.Metrics["full_acc_total"], 0)
			for k := 1; k < b; k++ {
				name := fmt.Sprintf("position_%d_acc_", k)
				near(t, name+"sum", float64(tally.Hits[k]), c.Metrics[name+"sum"], 0)
				near(t, name+"total", float64(tally.Scored[k]), c.Metrics[name+"total"], 0)
			}
			near(t, "eal_sum", tally.EAL(), c.Metrics["eal_sum"], 1e-5)
		})
	}
}

func TestTheTallyKeepsRawCounts(t *testing.T) {
	var tally drafter.Tally
	yes := []bool{false, true, true, true, true}
	tally.Add([]bool{false, true, false, true, false}, yes)
	tally.Add([]bool{false, true, true, true, true}, []bool{false, true, true, false, false})
	if acc, ok := tally.SlotAccuracy(1); !ok || acc != 1 {
		t.Errorf("slot 1: %v, %v", acc, ok)
	}
	if acc, ok := tally.SlotAccuracy(2); !ok || acc != .5 {
		t.Errorf("slot 2: %v, %v", acc, ok)
	}
	if tally.Scored[3] != 1 || tally.Hits[3] != 1 {
		t.Errorf("an unscored slot was counted: %+v", tally)
	}
	near(t, "expected accepted", tally.Expected(), 1.5, 0)
	if _, ok := new(drafter.Tally).SlotAccuracy(1); ok {
		t.Error("an empty tally has an accuracy")
	}
	if got := drafter.Streak([]int32{0, 7, 3, -1, 0}, 8); got != 3 {
		t.Errorf("streak %d, want 3", got)
	}
	if got := drafter.Streak([]int32{0, 8}, 8); got != 1 {
		t.Errorf("streak %d, want 1", got)
	}
}
