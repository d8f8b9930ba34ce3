//go:build cgo

package report

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/data/query"
	"github.com/draftscope/draftscope/data/query/querytest"
	"github.com/draftscope/draftscope/schemas"
)

// contest is a run in which a leads on code by 2 tokens a round, b on prose by
// 1, and b hits slot 1 at label 1 where a misses it in one sequence.
func contest(t *testing.T) *query.DB {
	t.Helper()
	dir := t.TempDir()
	for i := range 12 {
		seq, task, a, b := fmt.Sprintf("s%02d", i), "code", 4, 2
		if i%3 == 0 {
			task, a, b = "prose", 2, 3
		}
		querytest.Sequence(t, dir, "r", seq, 5, make([]int32, 20+i), map[string]string{"task": task})
		querytest.Rounds(t, dir, "r", "a", schemas.MethodChain, 7, seq, a, a)
		querytest.Rounds(t, dir, "r", "b", schemas.MethodChain, 7, seq, b, b)
		querytest.Slots(t, dir, "r", "a", seq, []int{b2i(i != 4), 1}, []int{1, 0}, []int{-1, -1})
		querytest.Slots(t, dir, "r", "b", seq, []int{1, 0}, []int{0, 0})
	}
	db, err := query.Open(t.Context(), dir, query.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func TestTwoDraftersAreComparedPartByPart(t *testing.T) {
	v, err := CompareDrafters(t.Context(), contest(t), "r", "a", "b", Options{Resamples: 200, Decode: func(string, int32) string { return "word" }})
	if err != nil {
		t.Fatal(err)
	}
	parts := map[string]PartDifference{}
	for _, p := range v.Parts {
		parts[p.By+" "+p.Value] = p
	}
	for name, want := range map[string]float64{"task code": 2, "task prose": -1, "length 16 to 31": 1, "distance 2 to 3": 1} {
		if p, ok := parts[name]; !ok && name != "distance 2 to 3" || ok && *p.Difference.Difference.Value != want {
			t.Errorf("%s: %+v, want a difference of %v (%v)", name, p, want, parts)
		}
	}
	if p := parts["task code"]; p.Wins != 8 || p.Losses != 0 || p.Ahead() != 1 {
		t.Errorf("code: %+v", p)
	}
	if p := parts["task prose"]; p.Wins != 0 || p.Losses != 4 || p.Ahead() != 0 { // four are too few to claim it
		t.Errorf("prose: %+v", p)
	}
	if v.Slot1 != (Agreement{Both: 11, OnlyA: 12, OnlyB: 1}) {
		t.Errorf("slot 1: %+v", v.Slot1)
	}
	if !slices.Equal(v.FailsA, []Failure{{1, "word", 1, 24}}) || !slices.Equal(v.FailsB, []Failure{{1, "word", 12, 24}}) {
		t.Errorf("failures: %+v and %+v", v.FailsA, v.FailsB)
	}
	if n := len(v.Sequences); n != 9 || v.Sequences[0].Difference != 2 || v.Sequences[n-1].Difference != -1 {
		t.Errorf("sequences: %+v", v.Sequences)
	}
	var b strings.Builder
	if err := WriteVersus(&b, v); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"Run r, a − b, over 12 shared sequences", `task      code`, `a        1      "word"       1  24`} {
		if !strings.Contains(b.String(), line) {
			t.Errorf("no %q in\n%s", line, b.String())
		}
	}
}

func TestADrafterWithoutRowsIsNamed(t *testing.T) {
	if _, err := CompareDrafters(t.Context(), contest(t), "r", "a", "c", Options{}); !errors.Is(err, ErrNoDrafter) || !strings.Contains(err.Error(), `"b"`) {
		t.Errorf("error is %v", err)
	}
}
