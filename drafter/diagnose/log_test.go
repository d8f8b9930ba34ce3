package diagnose

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/drafter"
)

// logSteps is how many steps a log of the tests has.
const logSteps = 12

// slotLosses are every loss by slot at a step of a log: they fall each in its
// own way, and scatter a little from batch to batch.
func slotLosses(step, slots int) map[string][]float64 { return scattered(step, slots, 0.02) }

func scattered(step, slots int, scatter float64) map[string][]float64 {
	rng := rand.New(rand.NewPCG(3, uint64(step)))
	out := map[string][]float64{}
	for i, name := range []drafter.Objective{drafter.CE, drafter.KLDiv, drafter.RKLDiv, drafter.JSDiv, drafter.TVDist, drafter.NLA, warmKL} {
		for k := range slots {
			at := float64(step) / (3 + 0.4*float64(i) + 0.1*float64(k))
			out[string(name)] = append(out[string(name)], 4-2/float64(k+1)-0.2*float64(i)+2*math.Exp(-at)+scatter*rng.NormFloat64())
		}
	}
	return out
}

// logOf is a log that an objective makes; shape changes each step before its
// loss is computed.
func logOf(o objective, shape func(*Step)) []Step {
	var steps []Step
	for n := range logSteps {
		st := Step{Step: n, Slots: slotLosses(n, 15)}
		if shape != nil {
			shape(&st)
		}
		st.Loss = o.of(st)
		steps = append(steps, st)
	}
	return steps
}

// byBlock gives a step losses of twelve blocks, the last of them cut short.
func byBlock(st *Step) {
	const blocks = 12
	st.Blocks, st.Slots = map[string][][]float64{}, nil
	for name, losses := range slotLosses(st.Step, 15) {
		for b := range blocks {
			row := make([]float64, len(losses))
			for k, l := range losses {
				if row[k] = l * (1 + 0.3*math.Sin(float64(7*b+k+st.Step))); k+b >= 20 {
					row[k] = math.NaN()
				}
			}
			st.Blocks[name] = append(st.Blocks[name], row)
		}
	}
	st.pool()
}

// wantObjective checks that a log's objective is named, and no other.
func wantObjective(t *testing.T, o objective, steps []Step) {
	t.Helper()
	var f Finding
	if !exactObjective(&f, steps) || f.Verdict != Confirmed || f.Sentence != fmt.Sprintf("The objective is %s: it gives every logged loss.", o) {
		t.Errorf("%s: %s %s (%s)", o, f.Verdict, f.Sentence, f.Measure)
	}
}

func TestALogWithLossesBySlotGivesItsObjectiveExactly(t *testing.T) {
	planted := objectives()
	mixture := func(gamma float64, norm drafter.Normaliser, terms ...term) {
		planted = append(planted, objective{terms, gamma, norm})
	}
	for _, norm := range []drafter.Normaliser{drafter.ByWeight, drafter.ByCount} {
		mixture(4.4, norm, term{drafter.CE, 1, false}) // and not 4
		mixture(6.3, norm, term{drafter.CE, 1, false})
		mixture(7, norm, term{drafter.CE, 0.55, false}, term{drafter.NLA, 0.45, false})
		mixture(10, norm, term{drafter.CE, 0.5, false}, term{warmKL, 0.5, true})
		mixture(12.5, norm, term{drafter.CE, 0.2, false}, term{drafter.KLDiv, 0.5, false}, term{drafter.TVDist, 0.3, false})
	}
	for _, o := range planted {
		if o.gamma >= 0 {
			wantObjective(t, o, logOf(o, nil))
			wantObjective(t, o, logOf(o, byBlock))
		}
	}
}

func TestALogWithLossesByBlockGivesDPaceExactly(t *testing.T) {
	for _, o := range slices.Concat(objectives(), batchDPace()) {
		if o.gamma < 0 {
			wantObjective(t, o, logOf(o, byBlock))
		}
	}
}

func TestALogsCountsTellItsNormaliser(t *testing.T) {
	// Shares that sum to 1.1: with as many labels for every slot, either
	// normaliser explains them.
	o := objective{[]term{{drafter.CE, 1, false}, {drafter.TVDist, 0.1, false}}, 6.3, drafter.ByCount}
	f := Finding{Verdict: CannotTell}
	if !exactObjective(&f, logOf(o, nil)) || f.Verdict != CannotTell || !strings.Contains(f.Sentence, o.String()) {
		t.Errorf("as many for every slot: %s %s", f.Verdict, f.Sentence)
	}
	f = Finding{Verdict: CannotTell}
	if !exactObjective(&f, logOf(o, byBlock)) || strings.Contains(f.Sentence, "weights.") || !strings.Contains(f.Sentence, o.String()) {
		t.Errorf("other counts: %s %s", f.Verdict, f.Sentence)
	}
}

func TestALogOfFewDigitsIsNotToldMoreThanItHolds(t *testing.T) {
	for _, o := range objectives() {
		if o.gamma < 0 {
			continue
		}
		steps := logOf(o, nil)
		for i := range steps {
			steps[i].Loss = math.Round(steps[i].Loss*1e3) / 1e3
		}
		var f Finding
		if !exactObjective(&f, steps) || !strings.Contains(f.Measure, o.String()) {
			t.Errorf("%s: %s %s (%s)", o, f.Verdict, f.Sentence, f.Measure)
		}
	}
}

// Losses without scatter fall so much alike that other sums come near the
// logged one.
func TestASmoothLogNamesNoWrongSum(t *testing.T) {
	smooth := func(st *Step) { st.Slots = scattered(st.Step, 15, 0) }
	for _, terms := range [][]term{
		{{drafter.CE, 0.5, false}, {warmKL, 0.5, true}},
		{{drafter.CE, 0.2, false}, {drafter.KLDiv, 0.5, false}, {drafter.TVDist, 0.3, false}},
		{{drafter.CE, 0.4, false}, {drafter.JSDiv, 0.3, false}, {drafter.RKLDiv, 0.2, false}, {drafter.NLA, 0.1, false}},
	} {
		for _, gamma := range []float64{0, 3, 6.3, 12.5} {
			o := objective{terms, gamma, drafter.ByWeight}
			f := Finding{Verdict: CannotTell}
			if exactObjective(&f, logOf(o, smooth)) && f.Verdict == Confirmed && !strings.Contains(f.Sentence, o.String()) {
				t.Errorf("%s: %s (%s)", o, f.Sentence, f.Measure)
			}
			t.Logf("%s: %s %s", o, f.Verdict, f.Sentence)
		}
	}
}

func TestWeightsOfAnotherLawAreRegressed(t *testing.T) {
	var steps []Step
	for n := range 60 {
		rng := rand.New(rand.NewPCG(1, uint64(n)))
		st := Step{Slots: map[string][]float64{"ce": nil}}
		for k := range 8 {
			l := 2 + 0.3*float64(k) + 0.1*rng.Float64()
			st.Slots["ce"] = append(st.Slots["ce"], l)
			st.Loss += l * float64(8-k) / 36 // falls along a line
		}
		steps = append(steps, st)
	}
	var f Finding
	if !exactObjective(&f, steps) || f.Verdict != Supported || !strings.Contains(f.Sentence, "0.222 0.194 0.167") {
		t.Errorf("%s %s (%s)", f.Verdict, f.Sentence, f.Measure)
	}
}

func TestALogOfAnUnknownObjectiveIsNotNamed(t *testing.T) {
	for _, tt := range []struct {
		name string
		loss func(n int, st Step) float64
	}{
		{"none of its losses", func(n int, _ Step) float64 { return 99 + float64(n*n%7) }},
		{"their product", func(_ int, st Step) float64 { return st.Slots["ce"][0] * st.Slots["tv"][3] }},
		{"D-PACE, from means alone", func(n int, _ Step) float64 {
			st := Step{Step: n}
			byBlock(&st)
			return objective{[]term{{drafter.CE, 1, false}}, dpaceGamma, drafter.ByWeight}.of(st)
		}},
	} {
		steps := logOf(objectives()[0], nil)
		for n := range steps {
			steps[n].Loss = tt.loss(n, steps[n])
		}
		f := Finding{Verdict: CannotTell}
		if exactObjective(&f, steps) && f.Verdict != CannotTell {
			t.Errorf("%s: %s %s (%s)", tt.name, f.Verdict, f.Sentence, f.Measure)
		}
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
	for _, name := range []string{"good", "shift", "shortcut"} {
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

// Totals and accuracies of one half of the sequences, held against what the
// other half shows: whatever made them is among what is said to fit.
func TestTotalsLeaveTheObjectiveThatMadeThem(t *testing.T) {
	c := families(demoCase(t, "good"), "rope-offset")
	c.Log = &Log{}
	s, err := newStudy(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	var r Report
	for _, p := range []probe{probeDrafter, probeHealth} {
		if err := p(t.Context(), s, &r); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.warm(t.Context()); err != nil {
		t.Fatal(err)
	}
	half := len(s.trained) / 2
	made := profileOf(s.trained[half:], s.spec.BlockSize, slices.Repeat([]float64{1}, len(s.trained)-half))
	s.seqs, s.trained = s.seqs[:half], s.trained[:half]
	for _, o := range objectives() {
		f := Finding{Verdict: CannotTell}
		steps := []Step{{Loss: o.value(made.losses, made.dpace), Acc: made.acc}}
		if err := s.likelyObjective(t.Context(), &f, "x", steps); err != nil {
			t.Fatal(err)
		}
		if f.Verdict != CannotTell || !strings.Contains(f.Measure, o.String()) {
			t.Errorf("%s: %s %s (%s)", o, f.Verdict, f.Sentence, f.Measure)
		}
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
	for _, text := range []string{
		"", "{", `{"step": 1}`, `{"step": 1, "drafters": {"a": {}}}`, "[]",
		`{"loss": 1, "slot_loss": {"ce": [1, 2], "tv": [1]}}`, `{"loss": 1, "slot_loss": {"ce": []}}`,
		`{"loss": 1, "slot_loss": {"ce": [1, 2]}, "slot_count": [3]}`,
		`{"loss": 1, "block_loss": {"ce": [[1, null], [2]]}}`, `{"loss": 1, "block_loss": {"ce": [[1]], "tv": [[1], [2]]}}`,
	} {
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
