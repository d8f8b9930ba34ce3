//go:build cgo

package report

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/draftscope/draftscope/data/query/querytest"
	"github.com/draftscope/draftscope/schemas"
)

func TestPartsAreTheMeansOfTheirSequences(t *testing.T) {
	dir := t.TempDir()
	start := time.Date(2026, 5, 1, 10, 0, 0, 0, time.UTC)
	for i := range 8 {
		seq := fmt.Sprintf("s%d", i)
		querytest.Write(t, dir, "sequences/run=r/"+seq+".parquet", schemas.Sequence{
			SeqID: seq, PromptLen: 2, Length: 40, CreatedAt: start.Add(time.Duration(7-i) * time.Hour),
			Tags: map[string]string{"task": []string{"code", "prose"}[i%2], "id": seq},
		})
		querytest.Rounds(t, dir, "r", "d", schemas.MethodChain, 7, seq, 1+i, 1+i)
	}
	d := build(t, dir, Options{Resamples: 100}).Runs[0].Drafters[0]
	// The tag id names every sequence apart, and is no way to split them.
	if len(d.ByTag) != 2 || d.ByTag[0].Value != "code" || *d.ByTag[0].AcceptLenMacro.Value != 4 || *d.ByTag[1].AcceptLenMacro.Value != 5 || d.ByTag[1].Sequences != 4 {
		t.Errorf("by tag: %+v", d.ByTag)
	}
	// What came first has the last number.
	if len(d.OverTime) != 2 || *d.OverTime[0].AcceptLenMacro.Value != 6.5 || *d.OverTime[1].AcceptLenMacro.Value != 2.5 || !d.OverTime[0].Since.Equal(start) {
		t.Errorf("over time: %+v", d.OverTime)
	}
	if low := d.ByTag[0].AcceptLenMacro.Low; low == nil || *low < 1 || *low > 4 {
		t.Errorf("the interval of code begins at %v", low)
	}
}

func TestCostCountsTheRootOfEveryWholeRound(t *testing.T) {
	dir := t.TempDir()
	querytest.Rounds(t, dir, "r", "d", schemas.MethodChain, 7, "s", 1, 3, -5)
	a := build(t, dir, Options{}).Runs[0].Drafters[0].Acceptance[0]
	if a.Proposed != 14 || *a.VerifiedPerToken != 4 { // (7+1)·2 / (1+3)
		t.Errorf("%d proposed, %v verified a token", a.Proposed, *a.VerifiedPerToken)
	}
}

func TestReadingsFollowTheChain(t *testing.T) {
	dir := t.TempDir()
	tokens := []int32{5, 6, 10, 11, 12, 13, 14, 15}
	querytest.Sequence(t, dir, "r", "s", 2, tokens, nil)
	// Anchors 2 and 5: two accepted and one refused, then a whole block of 1.
	querytest.Write(t, dir, "rounds/run=r/drafter=d/x.parquet",
		schemas.Round{SeqID: "s", Method: schemas.MethodChain, Budget: 3, Anchor: 2, Proposed: 3, Accepted: 2, AcceptLen: 3},
		schemas.Round{SeqID: "s", Method: schemas.MethodChain, Budget: 3, Round: 1, Anchor: 5, Proposed: 1, Accepted: 1, AcceptLen: 2})
	words := map[int32]string{10: "a\n", 11: "b", 12: "c", 13: "<d>", 14: "\x00"}
	r := build(t, dir, Options{Texts: 1, Decode: func(_ string, id int32) string { return words[id] }})
	read := r.Runs[0].Readings[0]
	var got []string
	for _, x := range read.Tokens {
		got = append(got, fmt.Sprintf("%s:%s:%d", x.Text, x.Fate, x.Slot))
	}
	want := "5 :masked:0|6 :masked:0|a\n:unscored:0|b:hit:1|c:hit:2|<d>:miss:3|·:hit:1|15 :bonus:2"
	if s := strings.Join(got, "|"); s != want {
		t.Errorf("read %q\nwant %q", s, want)
	}
	if read.Hits != 3 || read.Drafted != 4 {
		t.Errorf("%d of %d", read.Hits, read.Drafted)
	}
	page := html(t, r)
	for _, part := range []string{`<span class="masked">5 6 </span>`, `<span class="free">a⏎`, `<span class="hit">bc</span>`, `<span class="miss" title="refused at slot 3">&lt;d&gt;</span>`, `<span class="bonus">15 </span>`} {
		if !strings.Contains(page, part) {
			t.Errorf("the page lacks %s", part)
		}
	}
}

func TestComparedCapturesAreDrawnByStateAndPosition(t *testing.T) {
	dir := t.TempDir()
	querytest.Sequence(t, dir, "a", "s", 2, []int32{1, 2, 3, 4}, nil)
	var rows []schemas.Similarity
	for state := range int32(40) {
		for pos := range int32(100) {
			cosine := float32(1)
			if state == 7 && pos == 50 {
				cosine = 0.5
			}
			rows = append(rows, schemas.Similarity{RunA: "a", RunB: "b", SeqID: "s", Pos: pos, State: state, Cosine: &cosine, RelL2: new(float32(0.25))})
		}
	}
	rows = append(rows, schemas.Similarity{RunA: "a", RunB: "c", SeqID: "s"}) // zero vectors
	querytest.Write(t, dir, "similarity/a--b.parquet", rows...)
	r := build(t, dir, Options{})
	if len(r.Similarities) != 2 || len(r.Similarities[0].States) != 40 || len(r.Similarities[0].States[7].Cells) != 25 {
		t.Fatalf("%d pairs", len(r.Similarities))
	}
	s := r.Similarities[0].States[7]
	if *s.MinCosine != 0.5 || s.Rows != 100 || *s.MeanCosine != 0.995 || *s.MeanRelL2 != 0.25 || *s.Cells[12].MinCosine != 0.5 || s.Cells[12].FirstPos != 48 {
		t.Errorf("state 7: %+v", s)
	}
	if c := r.Similarities[1].States[0]; c.MeanCosine != nil || c.Cells[0].MeanCosine != nil {
		t.Errorf("zero vectors have a cosine: %+v", c)
	}
	page := html(t, r)
	if n := strings.Count(page, "positions 48–51"); n != heatStates+1 { // a cell a shown state, and the table's row of state 7
		t.Errorf("%d mentions of positions 48–51", n)
	}
	if !strings.Contains(page, `<rect class="bar h7"`) || !strings.Contains(page, `<rect class="bar h0"`) || strings.Contains(page, "NaN") {
		t.Error("the map has not the colours of 0.125 and of 0")
	}
	if got := build(t, dir, Options{Run: "a"}).Similarities; len(got) != 2 {
		t.Errorf("run a has %d pairs", len(got))
	}
}

func TestTheLeaderBoardIsInOrder(t *testing.T) {
	run := build(t, demo(t), Options{Resamples: 100}).Runs[0]
	rows := run.leaderTable().rows
	if len(rows) != 3 || rows[0][1] != "good" || rows[0][3] != "" || rows[2][1] != "early" || rows[2][8] != "behind" || rows[1][8] != "behind" {
		t.Errorf("rows are %q", rows)
	}
}

// A page has a bound, whatever the dataset.
func TestThePageStaysSmall(t *testing.T) {
	dir := t.TempDir()
	var drafters []querytest.Drafter
	for i := range 14 {
		drafters = append(drafters, querytest.Drafter{Name: fmt.Sprintf("drafter-%02d", i), Skill: 0.9 - 0.03*float64(i), Decay: 0.95})
	}
	for _, run := range []string{"one", "two"} {
		querytest.Random(t, dir, run, 3, 24, 16, drafters...)
	}
	long := make([]int32, 5000)
	querytest.Sequence(t, dir, "one", "long", 1000, long, map[string]string{"task": "long"})
	for _, d := range drafters {
		querytest.Rounds(t, dir, "one", d.Name, schemas.MethodChain, 15, "long", make([]int, 100)...)
	}
	r := build(t, dir, Options{Resamples: 20, Texts: 3, Decode: func(string, int32) string { return strings.Repeat("long ", 100) }})
	page := html(t, r)
	if n := len(page); n > 1<<20 {
		t.Errorf("the page has %d bytes", n)
	}
	if !strings.Contains(page, "the plots show the best 10 of 14 drafters") || strings.Count(page, "drafter-13") == 0 {
		t.Error("what is not drawn is not said, or not on the leader board")
	}
}
