package drafter_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/backendtest"
	"github.com/draftscope/draftscope/cuda/cpu"
	"github.com/draftscope/draftscope/cuda/gpu"
	"github.com/draftscope/draftscope/drafter"
)

// onProcessor is a float32 device to compare with.
func onProcessor(tb testing.TB) cuda.Device {
	tb.Helper()
	dev, err := cpu.New(cpu.Config{})
	if err != nil {
		tb.Fatal(err)
	}
	return dev
}

func inBF16(tb testing.TB) cuda.Device {
	tb.Helper()
	return backendtest.OpenGPU(tb, gpu.Config{Precision: gpu.BF16})
}

var fixtureDrafters = []string{"good", "early", "shift", "shortcut"}

// acceptance is the mean number of tokens that a round accepts, by drafter
// and method, over 40 of the fixtures' prompts; captured and drafted on dev.
func acceptance(t *testing.T, dev cuda.Device) (by map[string]float64, all float64) {
	t.Helper()
	w := newWorldOn(t, dev)
	cfg := drafter.Config{Anchors: drafter.Rounds, Budgets: []int{8, 16, 64}}
	for _, name := range fixtureDrafters {
		cfg.Drafters = append(cfg.Drafters, w.drafter(name))
	}
	stage, mem := w.stage(cfg)
	sum, n := map[string]float64{}, map[string]float64{}
	var total, rounds float64
	for _, c := range sequences(t)[:40] {
		out := feed(t, w, stage, mem, w.run(c), 64)
		for name, list := range out.rounds {
			for _, r := range list {
				key := fmt.Sprintf("%s %s %d", name, r.Method, r.Budget)
				sum[key] += float64(r.AcceptLen)
				n[key]++
				total += float64(r.AcceptLen)
				rounds++
			}
		}
	}
	for key := range sum {
		sum[key] /= n[key]
	}
	return sum, total / rounds
}

func TestAcceptanceInBF16IsThatOfFloat32(t *testing.T) {
	half := inBF16(t) // skips before the work
	want, all := acceptance(t, onProcessor(t))
	got, own := acceptance(t, half)
	for key, w := range want {
		t.Logf("%-24s accepts %.3f a round in float32, %.3f in bf16: %+.2f %%", key, w, got[key], 100*(got[key]/w-1))
		if math.Abs(got[key]/w-1) > .01 {
			t.Errorf("%s: beyond 1 %%", key)
		}
	}
	t.Logf("all: %.4f in float32, %.4f in bf16: %+.2f %%", all, own, 100*(own/all-1))
}

// distances are how far the log-probabilities of dev's candidates are from
// the reference's of the same tokens: mean and root mean square.
func distances(t *testing.T, dev cuda.Device) (mean, rms float64) {
	t.Helper()
	w := newWorldOn(t, dev)
	names := []string{"good", "early", "shortcut"}
	cfg := drafter.Config{}
	for _, name := range names {
		cfg.Drafters = append(cfg.Drafters, w.drafter(name))
	}
	stage, mem := w.stage(cfg)
	const k = 16
	var sum, squares, n float64
	for i, c := range sequences(t)[:4] {
		golden := readTensors(t, fmt.Sprintf("golden/p%04d.safetensors", i))
		out := feed(t, w, stage, mem, w.run(c), 64)
		for _, name := range names {
			ids, logprobs := golden[name+".top16_ids"].i, golden[name+".top16_logprobs"].f
			for d, draft := range out.drafts[name] {
				for slot := range 15 {
					known := map[int32]float32{}
					for j := range k {
						at := (d*15+slot)*k + j
						known[ids[at]] = logprobs[at]
					}
					for j, id := range draft.TopIDs[slot*k : (slot+1)*k] {
						if want, ok := known[id]; ok {
							off := float64(draft.TopLogprobs[slot*k+j] - want)
							sum, squares, n = sum+math.Abs(off), squares+off*off, n+1
						}
					}
				}
			}
		}
	}
	return sum / n, math.Sqrt(squares / n)
}

func TestLogProbsInBF16AreAsGoodAsThoseOfAPlainVersion(t *testing.T) {
	half := inBF16(t)
	plainMean, plainRMS := distances(t, backendtest.Rounding(onProcessor(t)))
	mean, rms := distances(t, half)
	t.Logf("off by %.2g on average (rms %.2g), a plain bf16 version by %.2g (%.2g)", mean, rms, plainMean, plainRMS)
	if mean > 2*plainMean || rms > 2*plainRMS {
		t.Error("beyond twice a plain bf16 version")
	}
}

// TestAHeadThatRoundsToTheTargetsIsTheTargets: what counts as a copy of the
// target's head is decided by the values that the device keeps.
func TestAHeadThatRoundsToTheTargetsIsTheTargets(t *testing.T) {
	for _, one := range []struct {
		name string
		dev  cuda.Device
		own  bool
	}{
		{"float32", onProcessor(t), true},
		{"bf16", backendtest.Rounding(onProcessor(t)), false},
	} {
		t.Run(one.name, func(t *testing.T) {
			w := newWorldOn(t, one.dev)
			head := make([]float32, vocab*hidden)
			w.must(w.dev.Download(head, w.host.Head))
			for i := range head {
				head[i] *= 1 + 1./2048 // less than bf16 resolves
			}
			d, err := drafter.Open("good", demotest.Read(t, "drafters/good/config.json"), changed{checkpoint(t, "drafters/good"), map[string]*tensor{
				"lm_head.weight": {shape: []int{vocab, hidden}, f: head},
			}}, w.host, w.dev)
			w.must(err)
			defer d.Close()
			if d.OwnHead() != one.own {
				t.Errorf("OwnHead = %t, want %t", d.OwnHead(), one.own)
			}
		})
	}
}
