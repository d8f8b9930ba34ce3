package diagnose

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/drafter"
)

// slotLosses are losses by slot of a step, different from slot to slot.
func slotLosses(step, slots int) []float64 {
	out := make([]float64, slots)
	for k := range out {
		out[k] = 4 - 2/float64(k+1) - 0.01*float64(step)*math.Cos(float64(k))
	}
	return out
}

func TestALogWithLossesBySlotGivesItsObjectiveExactly(t *testing.T) {
	for _, o := range objectives() {
		if o.gamma < 0 {
			continue // D-PACE weights need every block
		}
		var steps []Step
		for step := range 5 {
			losses := slotLosses(step, 15)
			steps = append(steps, Step{Step: step, Loss: o.value(losses, nil), Slots: map[string][]float64{string(o.loss): losses}})
		}
		var f Finding
		if !exactObjective(&f, steps) || f.Verdict != Confirmed || !strings.Contains(f.Sentence, o.String()) {
			t.Errorf("%s: %s %s (%s)", o, f.Verdict, f.Sentence, f.Measure)
		}
	}
}

func TestALogOfAnUnknownObjectiveIsNotNamed(t *testing.T) {
	losses := slotLosses(1, 15)
	var f Finding
	if exactObjective(&f, []Step{{Loss: 99, Slots: map[string][]float64{string(drafter.CE): losses}}}) {
		t.Errorf("%s", f.Sentence)
	}
}

func TestALogsAcceptanceIsRecognised(t *testing.T) {
	acc := []float64{.8, .6, .5}
	for _, tt := range []struct {
		eal  float64
		want Verdict
		says string
	}{{1.52, Confirmed, "no bonus"}, {2.52, Confirmed, "counts the bonus"}, {1.9, CannotTell, "neither"}} {
		f := logMetric("x", []Step{{Acc: acc, EAL: &tt.eal}})
		if f.Verdict != tt.want || !strings.Contains(f.Sentence, tt.says) {
			t.Errorf("eal %.2f: %s %s", tt.eal, f.Verdict, f.Sentence)
		}
	}
}

func fixtureLog(t *testing.T) *Log {
	t.Helper()
	l, err := ReadLog(strings.NewReader(string(demotest.Read(t, "train_log.jsonl"))))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// The loss of the fixtures' runs is cross-entropy, weighted with γ = 4 and
// divided by the weights. The log alone cannot tell γ: what it leaves must
// hold the truth, and must not be called certain.
func TestTheFixturesObjectiveIsAmongThoseThatFit(t *testing.T) {
	for _, name := range []string{"good", "shift"} {
		t.Run(name, func(t *testing.T) {
			c := families(demoCase(t, name), "rope-offset")
			c.Sequences = c.Sequences[:8]
			c.Log = fixtureLog(t)
			r := examine(t, c, probeDrafter, probeHealth, probeLog)
			f := find(t, r, keyObjective)
			t.Logf("%s: %s (%s)", f.Verdict, f.Sentence, f.Measure)
			if f.Verdict == Confirmed || !strings.Contains(f.Measure, "ce, γ = 4, divided by the weights") {
				t.Errorf("%s: %s (%s)", f.Verdict, f.Sentence, f.Measure)
			}
			if m := find(t, r, "log-metric"); m.Verdict != Confirmed {
				t.Errorf("%s: %s", m.Verdict, m.Sentence)
			}
		})
	}
}

func TestAnEarlyDrafterIsUndertrainedAndNotFaulty(t *testing.T) {
	c := families(demoCase(t, "early"), "rope-offset")
	c.Sequences = c.Sequences[:8]
	c.Log = fixtureLog(t)
	reference := fixture(t, "good")
	c.Reference = &reference
	r := examine(t, c, probeDrafter, probeHealth)
	wantSilence(t, r)
	f := find(t, r, keyTraining)
	if f.Verdict != Supported || f.Effect == nil || f.Effect.High >= 0 || !strings.Contains(r.Sentence, "undertrained") {
		t.Errorf("%s: %s (%s)", f.Verdict, r.Sentence, f.Measure)
	}
	c = families(demoCase(t, "good"), "rope-offset")
	c.Sequences = c.Sequences[:8]
	c.Log = fixtureLog(t)
	if f := find(t, examine(t, c, probeDrafter, probeHealth), keyTraining); f.Verdict != RuledOut {
		t.Errorf("good: %s: %s", f.Verdict, f.Sentence)
	}
}

func TestADamagedLogIsRefusedByLine(t *testing.T) {
	for _, text := range []string{"", "{", `{"step": 1}`, `{"step": 1, "drafters": {"a": {}}}`, "[]"} {
		if _, err := ReadLog(strings.NewReader(text)); err == nil {
			t.Errorf("%q was taken", text)
		}
	}
	l, err := ReadLog(strings.NewReader(`{"step": 1, "loss": 2, "acc": [0.5]}`))
	if err != nil || len(l.Runs[""]) != 1 {
		t.Errorf("a log of one run: %v, %v", l, err)
	}
}

func TestChanceFollowsKnownTails(t *testing.T) {
	for _, tt := range []struct{ t, df, want float64 }{{12.706, 1, 0.025}, {2.228, 10, 0.025}, {1.812, 10, 0.05}, {63.657, 1, 0.005}} {
		if got := studentTail(tt.t, tt.df); math.Abs(got-tt.want) > 1e-4 {
			t.Errorf("P(T > %v) of %v degrees: %.5f, want %.3f", tt.t, tt.df, got, tt.want)
		}
	}
	same := make([]float64, 14)
	for i := range same {
		same[i] = 1
	}
	if got := chance(same); got != 1.0/(1<<14) {
		t.Errorf("14 differences alike: %v", got)
	}
	for _, diff := range [][]float64{nil, {0, 0, 0}, {1}, {1, 1}, {-1, -1, -1, -1}} {
		if got := chance(diff); got != 1 {
			t.Errorf("%v: %v, want 1", diff, got)
		}
	}
	if got := fmt.Sprintf("%.4f", chance([]float64{1, 2, 1, 2, 1, 2})); got >= "0.0100" {
		t.Errorf("six clear differences: %s", got)
	}
}

func TestAReportWithoutCountsIsStillJSON(t *testing.T) {
	nan := math.NaN()
	r := Report{Numbers: []Number{{Name: "x", Is: Interval{nan, nan, nan}, Words: "w"}}, Findings: []Finding{{Key: "k", Effect: &Interval{1, 0.5, nan}}}}
	raw, err := json.Marshal(r)
	if err != nil || !strings.Contains(string(raw), `"is":{"high":null,"low":null,"value":null}`) || !strings.Contains(string(raw), `"low":0.5`) {
		t.Errorf("%s, %v", raw, err)
	}
}

func TestACaptureWithoutSupervisionIsRefused(t *testing.T) {
	c := demoCase(t, "good")
	c.Sequences = c.Sequences[:2]
	masks(&c, func(Sequence, int) bool { return false })
	if _, err := Run(t.Context(), c); !errors.Is(err, ErrCase) {
		t.Errorf("%v, want ErrCase", err)
	}
}
