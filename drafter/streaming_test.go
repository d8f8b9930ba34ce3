package drafter_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/google/go-cmp/cmp"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
	"github.com/draftscope/draftscope/schemas/sound"
)

// pick keeps some of the recorded states.
func (c captured) pick(states ...int) captured {
	out := c
	out.recorded, out.states = nil, nil
	for i, s := range c.recorded {
		if slices.Contains(states, s) {
			out.recorded, out.states = append(out.recorded, s), append(out.states, c.states[i])
		}
	}
	return out
}

// diff is "" when two results are equal bit for bit: floats are compared with
// ==, and NaN is never stored.
func diff(a, b *emitted) string {
	if reflect.DeepEqual(a.drafts, b.drafts) && reflect.DeepEqual(a.slots, b.slots) &&
		reflect.DeepEqual(a.rounds, b.rounds) && slices.Equal(a.tables, b.tables) {
		return ""
	}
	return "results differ\n" + cmp.Diff(a.tables, b.tables) + cmp.Diff(a.rounds, b.rounds) + cmp.Diff(a.slots, b.slots) + cmp.Diff(a.drafts, b.drafts)
}

func TestCuttingStatesIntoOtherBatchesChangesNoBit(t *testing.T) {
	w := newWorld(t)
	cfg := drafter.Config{
		Drafters: []*drafter.Drafter{w.drafter("good"), w.drafter("shortcut")},
		Budgets:  []int{8, 64}, Losses: cuda.KL | cuda.RKL | cuda.JSD | cuda.TV,
	}
	c := w.run(sequences(t)[3])
	stage, mem := w.stage(cfg)
	whole := feed(t, w, stage, mem, c, len(c.ids))
	if n := len(whole.slots["good"]); n != 65*15 {
		t.Fatalf("%d slots, want %d", n, 65*15)
	}
	for _, step := range []int{1, 7, 64} {
		if d := diff(whole, feed(t, w, stage, mem, c, step)); d != "" {
			t.Errorf("batches of %d rows differ from one whole:\n%s", step, d)
		}
	}
	t.Run("in a sequence longer than a tile and a pass", func(t *testing.T) {
		long := captured{id: "long", promptLen: 3}
		for _, s := range sequences(t)[:12] {
			long.ids = append(long.ids, s.ids...)
		}
		const rows = 1100
		long = w.run(captured{id: "long", promptLen: 3, ids: long.ids[:rows]})
		cfg := drafter.Config{Drafters: cfg.Drafters[:1], Budgets: []int{8}, Losses: cuda.KL}
		stage, mem := w.stage(cfg)
		if d := diff(feed(t, w, stage, mem, long, rows), feed(t, w, stage, mem, long, 37)); d != "" {
			t.Errorf("batches of 37 rows differ from one whole:\n%s", d)
		}
	})
}

func TestBothAnchorModesGiveTheSameRounds(t *testing.T) {
	w := newWorld(t)
	cfg := drafter.Config{Drafters: []*drafter.Drafter{w.drafter("good")}, Budgets: []int{16, 8, 8}}
	c := w.run(sequences(t)[1])
	every, mem := w.stage(cfg)
	all := feed(t, w, every, mem, c, 64)
	cfg.Anchors = drafter.Rounds
	drafted := 0
	cfg.Progress = func(name string, anchors int) {
		if name == "good" {
			drafted += anchors
		}
	}
	waves, mem := w.stage(cfg)
	some := feed(t, w, waves, mem, c, 64)
	if d := cmp.Diff(all.rounds, some.rounds); d != "" {
		t.Errorf("rounds (-every +rounds):\n%s", d)
	}
	reached := map[int32]bool{}
	for _, r := range some.rounds["good"] {
		reached[r.Anchor] = true
		if r.Method == schemas.MethodDDTree && r.Budget != 8 && r.Budget != 16 {
			t.Errorf("budget %d was not asked for", r.Budget)
		}
	}
	if len(some.drafts["good"]) != len(reached) || len(reached) >= len(all.drafts["good"]) {
		t.Errorf("%d drafts at %d anchors that rounds reach, %d anchors in all", len(some.drafts["good"]), len(reached), len(all.drafts["good"]))
	}
	if drafted != len(reached) {
		t.Errorf("progress told of %d anchors, %d were drafted", drafted, len(reached))
	}
	byAnchor := map[int32]schemas.Draft{}
	for _, d := range all.drafts["good"] {
		byAnchor[d.Anchor] = d
	}
	for _, d := range some.drafts["good"] {
		if diff := cmp.Diff(byAnchor[d.Anchor], d); diff != "" || !reached[d.Anchor] {
			t.Errorf("anchor %d (-every +rounds):\n%s", d.Anchor, diff)
		}
	}
	if !slices.IsSortedFunc(some.slots["good"], func(a, b schemas.Slot) int {
		return int(a.Anchor-b.Anchor)*100 + int(a.Slot-b.Slot)
	}) {
		t.Error("slots of waves are not sorted")
	}
}

func TestABlockDependsOnTheStatesBeforeItsAnchorOnly(t *testing.T) {
	w := newWorld(t)
	c := w.run(sequences(t)[2])
	for _, name := range []string{"good", "shortcut"} {
		d := w.drafter(name)
		const anchor = 40
		draft := func(states [][]float32, rows int) []float32 {
			ctx, err := d.NewContext()
			w.must(err)
			defer ctx.Close()
			w.must(ctx.Extend(w.taps(d, states, rows)))
			z, err := ctx.Draft([]int32{anchor}, c.ids[anchor:anchor+1])
			w.must(err)
			return w.download(z)
		}
		clean := draft(c.states, len(c.ids))
		for p, tap := range d.Taps() {
			for _, at := range []int{anchor - 1, anchor, anchor + 1, len(c.ids) - 1} {
				states := slices.Clone(c.states)
				states[tap.State] = slices.Clone(states[tap.State])
				for j := range hidden {
					states[tap.State][at*hidden+j] += 3
				}
				if same := slices.Equal(clean, draft(states, len(c.ids))); same != (at >= anchor) {
					t.Errorf("%s, tap %d changed at %d, anchor %d: block unchanged is %t", name, p, at, anchor, same)
				}
			}
		}
		if !slices.Equal(clean, draft(c.states, anchor)) {
			t.Errorf("%s: rows from the anchor on change the block by being there", name)
		}
	}
}

// taps places the first rows of the states that a drafter reads.
func (w *world) taps(d *drafter.Drafter, states [][]float32, rows int) []cuda.Tensor {
	w.tb.Helper()
	var out []cuda.Tensor
	for _, tap := range d.Taps() {
		x := w.upload(states[tap.State][:rows*hidden], rows, hidden)
		if tap.Normed {
			w.must(w.dev.RMSNorm(x, x, w.host.FinalNorm, eps, 0))
		}
		out = append(out, x)
	}
	return out
}

func TestAContextDoesNotDependOnHowItsTapsLie(t *testing.T) {
	w := newWorld(t)
	d := w.drafter("good")
	const rows = 4200 // more than one pass
	taps := len(d.Taps())
	rng := rand.New(rand.NewPCG(1, 2))
	values := make([]float32, rows*taps*hidden)
	for i := range values {
		values[i] = float32(rng.NormFloat64())
	}
	beside := w.upload(values, rows, taps*hidden)
	var together, apart []cuda.Tensor
	for p := range taps {
		tap := beside.ColRange(p*hidden, (p+1)*hidden)
		together, apart = append(together, tap), append(apart, w.upload(w.download(tap), rows, hidden))
	}
	draft := func(taps []cuda.Tensor, step int) []float32 {
		ctx, err := d.NewContext()
		w.must(err)
		defer ctx.Close()
		for lo := 0; lo < rows; lo += step {
			var part []cuda.Tensor
			for _, t := range taps {
				part = append(part, t.RowRange(lo, min(lo+step, rows)))
			}
			w.must(ctx.Extend(part))
		}
		z, err := ctx.Draft([]int32{10, 1500, rows}, []int32{1, 2, 3})
		w.must(err)
		return w.download(z)
	}
	want := draft(together, rows)
	for _, step := range []int{rows, 999} {
		if !slices.Equal(draft(apart, step), want) || !slices.Equal(draft(together, step), want) {
			t.Errorf("taps in steps of %d, side by side or apart, do not give the bits of all at once", step)
		}
	}
}

func TestWrongSequencesBecomeFaultsOfEachDrafter(t *testing.T) {
	w := newWorld(t)
	whole := w.run(sequences(t)[2])
	now := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	cfg := drafter.Config{
		Drafters: []*drafter.Drafter{w.drafter("good"), w.drafter("shortcut")}, Budgets: []int{8},
		Now: func() time.Time { return now }, Profile: sound.Profile{},
	}
	for _, state := range whole.recorded {
		var rms []float64
		for row := range slices.Chunk(whole.states[state], hidden) {
			rms = append(rms, float64(sound.Norm(schemas.F32, schemas.F32.AppendBytes(nil, row)))/math.Sqrt(hidden))
		}
		var sizes sound.Sizes
		sizes.Add(rms)
		cfg.Profile[state], _ = sizes.Size()
	}
	const good, shortcut = "good", "shortcut"
	for _, tt := range []struct {
		name    string
		capture captured
		change  func(*schemas.Capture)
		check   string
		detail  string
		faulty  []string
	}{
		{"NaN in a tap", whole, poison(5, 30, math.NaN()), "K1", "state 5, row 30: NaN count 1, Inf count 0", []string{good, shortcut}},
		{"Inf in a prompt row", whole, poison(4, 1, math.Inf(-1)), "K1", "state 4, row 1: NaN count 0, Inf count 1", []string{good, shortcut}},
		{"Inf in the final state", whole, poison(8, 59, math.Inf(1)), "K1", "state 8, row 59: NaN count 0, Inf count 1", []string{good, shortcut}},
		{"NaN in a state that nobody reads", whole, poison(3, 30, math.NaN()), "K1", "state 3, row 30: NaN count 1, Inf count 0", []string{good, shortcut}},
		{"nothing is wrong", whole, nil, "", "", nil},
		{"a row of zeros", whole, rewrite(3, func(s []float32) { clear(s[30*hidden : 31*hidden]) }), "K2", "state 3, row 30: 1 of 61 rows are zero", []string{good, shortcut}},
		{"a row twice", whole, rewrite(5, func(s []float32) { copy(s[30*hidden:31*hidden], s[29*hidden:]) }), "K2", "state 5, row 30: 1 of 61 rows equal the row before bit for bit", []string{good, shortcut}},
		{"a state twice as large", whole, rewrite(5, func(s []float32) {
			for i := range s {
				s[i] *= 2
			}
		}), "K7", "state 5, row 0: rows of RMS ", []string{good, shortcut}},
		{"final rows a token late", whole, rewrite(8, func(s []float32) { copy(s[hidden:], slices.Clone(s)) }), "K2", "state 8, row 1: 1 of 61 rows equal", []string{good, shortcut}},
		{"final rows a token early", whole, rewrite(8, func(s []float32) { copy(s, slices.Concat(s[hidden:], s[:hidden])) }), "K5", "the answers are 0 of the ", []string{good, shortcut}},
		{"answers of another target", whole, func(c *schemas.Capture) {
			for i := range c.Tokens {
				c.Tokens[i].TargetArgmax = new(int32(7))
			}
		}, "K5", "the head on state 8 gives 0 of 30 recorded answers", []string{good, shortcut}},
		{"a tap is not recorded", whole.pick(2, 4, 5, 8), nil, "K6", "state 6 is not recorded (recorded: [2 4 5 8])", []string{good, shortcut}},
		{"one drafter's tap is not recorded", whole.pick(2, 4, 5, 6), nil, "K6", "state 8 is not recorded (recorded: [2 4 5 6])", []string{shortcut}},
		{"a position is skipped", whole, func(c *schemas.Capture) { c.Tokens[9].Pos++ }, "K3", "position 10 where 9 was due", []string{good, shortcut}},
		{"a row of another sequence", whole, func(c *schemas.Capture) { c.Tokens[9].SeqID = "p9" }, "K3", "row of position 9 belongs to sequence p9", []string{good, shortcut}},
		{"a token past the vocabulary", whole, func(c *schemas.Capture) { c.Tokens[9].TokenID = vocab }, "K11", "token 4096 at position 9, the vocabulary has 4096", []string{good, shortcut}},
		{"a label past the vocabulary", whole, func(c *schemas.Capture) { bad := int32(-2); c.Tokens[3].TargetArgmax = &bad }, "K11", "target_argmax -2 at position 3, the vocabulary has 4096", []string{good, shortcut}},
		{"another width", whole, func(c *schemas.Capture) { c.Spec.Hidden = 128; halve(c) }, "K6", "states have 128 values, the target's 256", []string{good, shortcut}},
		{"another depth", whole, func(c *schemas.Capture) { c.Spec.Layers = 9 }, "K6", "states of a target of 9 layers, this one has 8", []string{good, shortcut}},
		{"the last row is missing", whole, func(c *schemas.Capture) { *c = whole.record(t, w, 0, len(whole.ids)-1) }, "K3", "60 rows of a sequence of 61 tokens", []string{good, shortcut}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			stage, mem := w.stage(cfg)
			c := tt.capture.record(t, w, 0, len(whole.ids))
			if tt.change != nil {
				tt.change(&c)
			}
			out := feedRecords(t, stage, mem, tt.capture, []schemas.Capture{c})
			for _, name := range []string{good, shortcut} {
				if !slices.Contains(tt.faulty, name) {
					if len(out.faults[name]) != 0 || len(out.rounds[name]) == 0 || len(out.slots[name]) == 0 {
						t.Errorf("%s: faults %v, %d rounds", name, out.faults[name], len(out.rounds[name]))
					}
					continue
				}
				want := []schemas.Fault{{SeqID: whole.id, Chunk: -1, Check: tt.check, Detail: tt.detail, At: now}}
				if got := out.faults[name]; len(got) == 1 && strings.HasPrefix(got[0].Detail, tt.detail) {
					want[0].Detail = got[0].Detail
				}
				if d := cmp.Diff(want, out.faults[name]); d != "" {
					t.Errorf("%s: fault (-want +got):\n%s", name, d)
				}
				if len(out.drafts[name])+len(out.slots[name])+len(out.rounds[name]) != 0 {
					t.Errorf("%s: a faulty sequence was scored", name)
				}
			}
		})
	}
	t.Run("states change on the way", func(t *testing.T) {
		stage, mem := w.stage(cfg)
		out := feedRecords(t, stage, mem, whole, []schemas.Capture{
			whole.record(t, w, 0, 50), whole.pick(2, 4, 5, 6, 8).record(t, w, 50, len(whole.ids)),
		})
		if len(out.faults[good]) != 1 || out.faults[good][0].Check != "K6" || len(out.tables) != 2 {
			t.Errorf("faults %v, tables %v", out.faults, out.tables)
		}
	})
}

// poison puts v into one value of a state at a position.
func poison(state, pos int, v float64) func(*schemas.Capture) {
	return func(c *schemas.Capture) {
		i := slices.Index(c.Spec.States, state)
		copy(c.States[i][(pos*hidden+3)*4:], schemas.F32.AppendBytes(nil, []float32{float32(v)}))
	}
}

// rewrite changes a state as a whole.
func rewrite(state int, change func([]float32)) func(*schemas.Capture) {
	return func(c *schemas.Capture) {
		i := slices.Index(c.Spec.States, state)
		vals := schemas.F32.AppendFloats(nil, c.States[i])
		change(vals)
		c.States[i] = schemas.F32.AppendBytes(nil, vals)
	}
}

func halve(c *schemas.Capture) {
	for i := range c.States {
		c.States[i] = c.States[i][:len(c.States[i])/2]
	}
}

func TestASequenceSetAsideBeforeYieldsNothing(t *testing.T) {
	w := newWorld(t)
	c := w.run(sequences(t)[2])
	stage, mem := w.stage(drafter.Config{Drafters: []*drafter.Drafter{w.drafter("good")}})
	out := newEmitted()
	rec, err := schemas.CaptureRecord(mem, c.record(t, w, 0, 40))
	w.must(err)
	defer rec.Release()
	w.must(stage.Process(t.Context(), c.id, rec, out.take))
	fault := schemas.Record(mem, schemas.Envelope{Table: schemas.TableFaults, Run: "r1"}, []schemas.Fault{{SeqID: c.id, Check: "K1"}})
	defer fault.Release()
	w.must(stage.Process(t.Context(), c.id, fault, out.take))
	w.must(stage.End(t.Context(), c.id, out.take))
	if len(out.tables) != 0 {
		t.Errorf("emitted %v", out.tables)
	}
}

func TestADroppedSequenceStartsAgainFromNothing(t *testing.T) {
	w := newWorld(t)
	c := w.run(sequences(t)[2])
	stage, mem := w.stage(drafter.Config{Drafters: []*drafter.Drafter{w.drafter("good")}})
	want := feed(t, w, stage, mem, c, 64)
	rec, err := schemas.CaptureRecord(mem, c.record(t, w, 0, 50))
	w.must(err)
	defer rec.Release()
	w.must(stage.Process(t.Context(), c.id, rec, nil))
	stage.Drop(c.id)
	stage.Drop("never seen")
	if d := diff(want, feed(t, w, stage, mem, c, 64)); d != "" {
		t.Errorf("after a drop:\n%s", d)
	}
}

func TestInterleavedSequencesDoNotMix(t *testing.T) {
	w := newWorld(t)
	seqs := sequences(t)
	a, b := w.run(seqs[0]), w.run(seqs[2])
	stage, mem := w.stage(drafter.Config{Drafters: []*drafter.Drafter{w.drafter("good")}})
	want := []*emitted{feed(t, w, stage, mem, a, 64), feed(t, w, stage, mem, b, 64)}
	for lo := 0; lo < max(len(a.ids), len(b.ids)); lo += 10 {
		for _, c := range []captured{a, b} {
			if lo >= len(c.ids) {
				continue
			}
			rec, err := schemas.CaptureRecord(mem, c.record(t, w, lo, min(lo+10, len(c.ids))))
			w.must(err)
			w.must(stage.Process(t.Context(), c.id, rec, nil))
			rec.Release()
		}
	}
	for i, c := range []captured{a, b} {
		out := newEmitted()
		w.must(stage.End(t.Context(), c.id, out.take))
		if d := diff(want[i], out); d != "" {
			t.Errorf("%s:\n%s", c.id, d)
		}
	}
}

func TestAMarkerComesEvenWithoutAnchors(t *testing.T) {
	w := newWorld(t)
	c := w.run(captured{id: "short", ids: []int32{1, 2, 3}, promptLen: 2})
	stage, mem := w.stage(drafter.Config{Drafters: []*drafter.Drafter{w.drafter("good"), w.drafter("early")}})
	out := feed(t, w, stage, mem, c, 2)
	if d := cmp.Diff([]string{"good/rounds", "early/rounds"}, out.tables); d != "" {
		t.Errorf("tables:\n%s", d)
	}
}

func TestMaskedSlotsAreUnscoredAndRunsAreDecodedApart(t *testing.T) {
	w := newWorld(t)
	c := w.run(sequences(t)[3])
	mask := make([]bool, len(c.ids))
	for i := range mask {
		mask[i] = i >= 41 && i < 60 || i >= 70
	}
	rec := c.record(t, w, 0, len(c.ids))
	for i := range rec.Tokens {
		rec.Tokens[i].LossMask = mask[i]
	}
	cfg := drafter.Config{Drafters: []*drafter.Drafter{w.drafter("good")}, Budgets: []int{8}, Losses: cuda.KL}
	stage, mem := w.stage(cfg)
	out := feedRecords(t, stage, mem, c, []schemas.Capture{rec})
	for _, s := range out.slots["good"] {
		pos := int(s.Anchor + s.Slot)
		scored := pos < len(mask) && mask[pos]
		if scored != (s.Hit != nil) || scored != (s.CE != nil) || scored != (s.KL != nil) || !scored && s.Rank != nil {
			t.Errorf("anchor %d, slot %d, mask %t: %+v", s.Anchor, s.Slot, scored, s)
		}
		if pos < len(mask) && (s.Label == nil || *s.LossMask != mask[pos] || *s.DataToken != c.ids[pos]) {
			t.Errorf("anchor %d, slot %d: %+v", s.Anchor, s.Slot, s)
		}
	}
	next := map[string]int32{}
	for _, r := range out.rounds["good"] {
		if want, ok := next[r.Method]; !ok && r.Anchor != 41 || ok && r.Anchor != want && (want < 59 || r.Anchor != 70) {
			t.Errorf("%s round %d is at %d, after %d", r.Method, r.Round, r.Anchor, want)
		}
		next[r.Method] = r.Anchor + r.AcceptLen
		if r.Anchor < 60 && r.Anchor+r.AcceptLen > 60 {
			t.Errorf("round %+v accepts what another turn holds", r)
		}
	}
}

func TestLabelsComeFromTheCaptureWithoutFinalStates(t *testing.T) {
	w := newWorld(t)
	c := w.run(sequences(t)[2])
	cfg := drafter.Config{Drafters: []*drafter.Drafter{w.drafter("good")}, Losses: cuda.KL}
	stage, mem := w.stage(cfg)
	want := feed(t, w, stage, mem, c, 64)
	rec := c.pick(2, 4, 5, 6).record(t, w, 0, len(c.ids))
	for _, s := range want.slots["good"] {
		if s.Label != nil {
			rec.Tokens[s.Anchor+s.Slot-1].TargetArgmax = s.Label
		}
	}
	got := feedRecords(t, stage, mem, c, []schemas.Capture{rec})
	for i := range want.slots["good"] {
		want.slots["good"][i].KL = nil
	}
	if d := diff(want, got); d != "" {
		t.Errorf("(-from final states +from the capture):\n%s", d)
	}
}

func TestAStageStopsWhenItsContextDoes(t *testing.T) {
	w := newWorld(t)
	c := w.run(sequences(t)[2])
	stage, mem := w.stage(drafter.Config{Drafters: []*drafter.Drafter{w.drafter("good")}})
	ctx, cancel := context.WithCancel(t.Context())
	rec, err := schemas.CaptureRecord(mem, c.record(t, w, 0, len(c.ids)))
	w.must(err)
	defer rec.Release()
	w.must(stage.Process(ctx, c.id, rec, nil))
	cancel()
	if err := stage.End(ctx, c.id, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("End: %v", err)
	}
}

func TestAFailingEmitEndsTheSequence(t *testing.T) {
	w := newWorld(t)
	c := w.run(sequences(t)[2])
	stage, mem := w.stage(drafter.Config{Drafters: []*drafter.Drafter{w.drafter("good")}})
	rec, err := schemas.CaptureRecord(mem, c.record(t, w, 0, len(c.ids)))
	w.must(err)
	defer rec.Release()
	w.must(stage.Process(t.Context(), c.id, rec, nil))
	full := errors.New("disk full")
	if err := stage.End(t.Context(), c.id, func(arrow.Record) error { return full }); !errors.Is(err, full) || !strings.Contains(err.Error(), c.id) {
		t.Errorf("End: %v", err)
	}
}

func TestWrongStageSettingsAreRefusedTogether(t *testing.T) {
	w := newWorld(t)
	good := w.drafter("good")
	_, err := drafter.NewStage(drafter.Config{
		Drafters: []*drafter.Drafter{good, good}, Host: w.host, Device: w.dev,
		Anchors: "some", Budgets: []int{0}, K: -1,
	})
	if !errors.Is(err, drafter.ErrStage) {
		t.Fatalf("err %v", err)
	}
	for _, want := range []string{`"good"`, `"some"`, "tree of 0 nodes", "-1 candidates"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not mention %s", err, want)
		}
	}
	if _, err := drafter.NewStage(drafter.Config{}); err == nil || !strings.Contains(fmt.Sprint(err), "no drafter") {
		t.Errorf("an empty configuration: %v", err)
	}
}
