package drafter_test

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
)

// reference is one record of real speculative decoding.
type reference struct {
	Drafter string  `json:"drafter"`
	ID      string  `json:"id"`
	Method  string  `json:"method"`
	Budget  int     `json:"budget"`
	Lengths []int32 `json:"acceptance_lengths"`
}

func references(tb testing.TB) []reference {
	tb.Helper()
	var out []reference
	dec := json.NewDecoder(strings.NewReader(string(demotest.Read(tb, "speculative_reference.jsonl"))))
	for dec.More() {
		var r reference
		if err := dec.Decode(&r); err != nil {
			tb.Fatal(err)
		}
		out = append(out, r)
	}
	return out
}

func TestReplayedRoundsEqualRealSpeculativeDecoding(t *testing.T) {
	w := newWorld(t)
	names := []string{"good", "early", "shift", "shortcut"}
	cfg := drafter.Config{Anchors: drafter.Rounds, Budgets: []int{8, 16, 64}}
	for _, name := range names {
		cfg.Drafters = append(cfg.Drafters, w.drafter(name))
	}
	stage, mem := w.stage(cfg)
	rounds := map[string][]schemas.Round{}
	prompts := map[string]captured{}
	for _, c := range sequences(t)[:16] {
		prompts[c.id] = c
		out := feed(t, w, stage, mem, w.run(c), 64)
		for _, name := range names {
			for _, r := range out.rounds[name] {
				key := fmt.Sprint(name, r.SeqID, r.Method, r.Budget)
				rounds[key] = append(rounds[key], r)
			}
		}
	}
	equal := 0
	refs := references(t)
	for _, ref := range refs {
		method, budget := schemas.MethodDDTree, ref.Budget
		if ref.Method == "linear" {
			method, budget = schemas.MethodChain, 15
		}
		got := rounds[fmt.Sprint(ref.Drafter, ref.ID, method, budget)]
		if err := agree(got, ref.Lengths, prompts[ref.ID]); err != nil {
			t.Errorf("%s %s %s %d: %v", ref.Drafter, ref.ID, method, budget, err)
			continue
		}
		equal++
	}
	if equal != 160 || len(refs) != 160 {
		t.Errorf("%d of %d records equal, want 160 of 160", equal, len(refs))
	}
}

// agree applies the fixtures' rule: every round equals the reference's of the
// same number, but a truncated last one, which is at most the reference's.
// Our rounds start at the first generated token and cover the rest.
func agree(got []schemas.Round, want []int32, c captured) error {
	if len(got) == 0 || len(got) > len(want) {
		return fmt.Errorf("%d rounds, the reference has %d", len(got), len(want))
	}
	next := int32(c.promptLen)
	for _, r := range got {
		if r.Anchor != next {
			return fmt.Errorf("round %d is at %d, want %d", r.Round, r.Anchor, next)
		}
		next += r.AcceptLen
	}
	if int(next) < len(c.ids)-1 {
		return fmt.Errorf("rounds end at %d of %d", next, len(c.ids))
	}
	for i, r := range got {
		if int(r.Round) != i || r.AcceptLen != r.Accepted+1 {
			return fmt.Errorf("round %d is %+v", i, r)
		}
		if r.Truncated && i != len(got)-1 {
			return fmt.Errorf("round %d is truncated and not the last", i)
		}
		if r.AcceptLen == want[i] || r.Truncated && r.AcceptLen < want[i] {
			continue
		}
		return fmt.Errorf("round %d accepts %d, the reference %d", i, r.AcceptLen, want[i])
	}
	return nil
}

func TestDraftsEqualTheGoldenOnesAtEveryAnchorAndSlot(t *testing.T) {
	w := newWorld(t)
	names := []string{"good", "early", "shortcut"}
	cfg := drafter.Config{Losses: cuda.KL}
	for _, name := range names {
		cfg.Drafters = append(cfg.Drafters, w.drafter(name))
	}
	stage, mem := w.stage(cfg)
	for n, c := range sequences(t)[:4] {
		golden := readTensors(t, fmt.Sprintf("golden/p%04d.safetensors", n))
		if !slices.Equal(golden["input_ids"].i, c.ids) {
			t.Fatalf("%s: other tokens", c.id)
		}
		out := feed(t, w, stage, mem, w.run(c), 64)
		for _, name := range names {
			t.Run(c.id+"/"+name, func(t *testing.T) {
				compareGolden(t, golden, name, len(c.ids), out.drafts[name], out.slots[name])
			})
		}
	}
}

func compareGolden(t *testing.T, golden map[string]tensor, name string, length int, drafts []schemas.Draft, slots []schemas.Slot) {
	var anchors []int32
	for _, d := range drafts {
		anchors = append(anchors, d.Anchor)
	}
	if !slices.Equal(anchors, golden["anchors"].i) {
		t.Fatalf("anchors %v, want %v", anchors, golden["anchors"].i)
	}
	const k = 16
	ids, logprobs := golden[name+".top16_ids"].i, golden[name+".top16_logprobs"].f
	var worst float64
	for i, d := range drafts {
		if len(d.TopIDs) != 15*k || len(d.TopLogprobs) != 15*k || len(d.DraftTokens) != 15 {
			t.Fatalf("anchor %d: %d ids, %d logprobs, %d tokens", d.Anchor, len(d.TopIDs), len(d.TopLogprobs), len(d.DraftTokens))
		}
		for j := range d.TopIDs {
			at := i*15*k + j
			worst = max(worst, math.Abs(float64(d.TopLogprobs[j]-logprobs[at])))
			// Candidates as likely as each other within rounding may swap.
			if d.TopIDs[j] != ids[at] && math.Abs(float64(d.TopLogprobs[j]-logprobs[at])) > 1e-5 {
				t.Errorf("anchor %d, slot %d, rank %d: token %d, want %d", d.Anchor, j/k+1, j%k, d.TopIDs[j], ids[at])
			}
		}
	}
	measures := []struct {
		name   string
		golden []float32
		of     func(schemas.Slot) *float32
		worst  float64
	}{
		{"ce", golden[name+".ce"].f, func(s schemas.Slot) *float32 { return s.CE }, 0},
		{"kl", golden[name+".kl"].f, func(s schemas.Slot) *float32 { return s.KL }, 0},
	}
	for i, s := range slots {
		label := golden[name+".labels"].i[i]
		if past := int(s.Anchor+s.Slot) >= length; past != (label < 0) || past != (s.Label == nil) || past != (s.Hit == nil) || past != (s.DataToken == nil) {
			t.Fatalf("anchor %d, slot %d: golden label %d, row %+v", s.Anchor, s.Slot, label, s)
		}
		if label < 0 {
			if s.CE != nil || s.KL != nil || s.Rank != nil {
				t.Errorf("anchor %d, slot %d is past the end and has measures", s.Anchor, s.Slot)
			}
			continue
		}
		top := ids[i*k : (i+1)*k]
		if *s.Label != label || *s.Hit != (s.DraftToken == label) || s.DraftToken != drafts[i/15].DraftTokens[i%15] {
			t.Errorf("anchor %d, slot %d: label %d hit %t draft %d, golden label %d", s.Anchor, s.Slot, *s.Label, *s.Hit, s.DraftToken, label)
		}
		if rank := slices.Index(top, label); (rank < 0) != (s.Rank == nil) || rank >= 0 && int(*s.Rank) != rank {
			t.Errorf("anchor %d, slot %d: rank %v, want %d", s.Anchor, s.Slot, s.Rank, rank)
		}
		for m := range measures {
			d := math.Abs(float64(*measures[m].of(s) - measures[m].golden[i]))
			measures[m].worst = max(measures[m].worst, d)
		}
	}
	t.Logf("largest difference: logprob %.2g, ce %.2g, kl %.2g", worst, measures[0].worst, measures[1].worst)
	if worst > 1e-4 || measures[0].worst > 1e-4 || measures[1].worst > 1e-4 {
		t.Error("beyond 1e-4")
	}
}
