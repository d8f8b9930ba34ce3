//go:build cgo

package report

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/draftscope/draftscope/data/query"
	"github.com/draftscope/draftscope/data/query/querytest"
	"github.com/draftscope/draftscope/schemas"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got); run with -update when the change is meant\n%s", path, diff)
	}
}

func build(t *testing.T, dir string, opt Options) *Report {
	t.Helper()
	db, err := query.Open(t.Context(), dir, query.Options{Threads: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	r, err := Build(t.Context(), db, opt)
	if err != nil {
		t.Fatal(err)
	}
	r.Dataset = "DATASET"
	return r
}

// demo is a run with three drafters of which the best two are close, a fault,
// a file that cannot be read, and states.
func demo(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	querytest.Random(t, dir, "demo", 3, 12, 6,
		querytest.Drafter{Name: "early", Skill: 0.5, Decay: 0.9},
		querytest.Drafter{Name: "good", Skill: 0.9, Decay: 0.95},
		querytest.Drafter{Name: "shortcut", Skill: 0.88, Decay: 0.95})
	querytest.Write(t, dir, "states/run=demo/shard=00/p.parquet", schemas.State{SeqID: "p0000", State: 2}, schemas.State{SeqID: "p0000", State: 5})
	querytest.Write(t, dir, "faults/run=demo/p.parquet",
		schemas.Fault{SeqID: "x", Check: "finite"}, schemas.Fault{SeqID: "x", Check: "finite"}, schemas.Fault{SeqID: "y", Check: "rows"})
	if err := os.WriteFile(filepath.Join(dir, "slots", "run=demo", "drafter=good", "cut.parquet"), []byte("PAR1"), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

func text(t *testing.T, r *Report) string {
	t.Helper()
	var b strings.Builder
	if err := WriteText(&b, r); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func html(t *testing.T, r *Report) string {
	t.Helper()
	var b strings.Builder
	if err := WriteHTML(&b, r); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestTheTextIsTheGoldenOne(t *testing.T) {
	golden(t, "report.txt", text(t, build(t, demo(t), Options{Resamples: 500})))
}

func TestTheFieldsOfTheJSONAreTheGoldenOnes(t *testing.T) {
	var b bytes.Buffer
	if err := WriteJSON(&b, build(t, demo(t), Options{Resamples: 50})); err != nil {
		t.Fatal(err)
	}
	var v any
	if err := json.Unmarshal(b.Bytes(), &v); err != nil {
		t.Fatal(err)
	}
	fields := make(map[string]bool)
	collect(fields, "", v)
	var lines []string
	for f := range fields {
		lines = append(lines, f)
	}
	slices.Sort(lines)
	golden(t, "fields.txt", strings.Join(lines, "\n")+"\n")
}

// collect lists "path type"; null stands for a number that may be absent.
func collect(fields map[string]bool, path string, v any) {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			collect(fields, path+"."+k, e)
		}
	case []any:
		fields[path+"[]"] = true
		for _, e := range v {
			collect(fields, path+"[]", e)
		}
	case nil:
	default:
		fields[fmt.Sprintf("%s %T", path, v)] = true
	}
}

func TestEqualSeedsGiveEqualReports(t *testing.T) {
	dir := demo(t)
	one, two := build(t, dir, Options{Seed: 5, Resamples: 200}), build(t, dir, Options{Seed: 5, Resamples: 200})
	if diff := cmp.Diff(one, two); diff != "" {
		t.Errorf("equal seeds differ\n%s", diff)
	}
	other := build(t, dir, Options{Seed: 6, Resamples: 200})
	if cmp.Equal(one.Runs[0].Drafters[0].EAL, other.Runs[0].Drafters[0].EAL) {
		t.Error("another seed gives the very same interval")
	}
}

func TestTheReportEqualsTheViews(t *testing.T) {
	dir := demo(t)
	db, err := query.Open(t.Context(), dir, query.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	r, err := Build(t.Context(), db, Options{Resamples: 20})
	if err != nil {
		t.Fatal(err)
	}
	value := func(sql string) float64 {
		rows, err := db.Query(t.Context(), sql)
		if err != nil {
			t.Fatal(err)
		}
		all, err := rows.All()
		if err != nil || len(all) != 1 {
			t.Fatalf("%s: %v, %v", sql, all, err)
		}
		return record(all[0]).float(0)
	}
	for _, d := range r.Runs[0].Drafters {
		in := " WHERE drafter = '" + d.Drafter + "'"
		got := map[string]*float64{
			"SELECT eal FROM eal" + in:                                             d.EAL.Value,
			"SELECT expected_accepted FROM expected_accepted" + in:                 d.ExpectedAccepted.Value,
			"SELECT top8_streak FROM top8_streak" + in:                             d.Top8Streak.Value,
			"SELECT mean FROM loss_means" + in + " AND objective = 'nla'":          d.LossMeans[5].Mean.Value,
			"SELECT sum(hits) FROM slot_accuracy" + in:                             sumHits(d),
			"SELECT loss FROM loss('ce', 'dpace', NULL, 'batch')" + in:             d.Losses[0].Loss,
			"SELECT conditional_rate FROM conditional_rate" + in + " AND slot = 3": d.Slots[2].ConditionalRate.Value,
		}
		for _, a := range d.Acceptance {
			at := fmt.Sprintf("%s AND method = '%s' AND budget = %d", in, a.Method, a.Budget)
			got["SELECT accept_len_macro FROM accept_len"+at] = a.AcceptLenMacro.Value
			got["SELECT accepted_micro FROM accept_len"+at] = a.AcceptedMicro.Value
			n := float64(a.Truncated)
			got["SELECT truncated FROM accept_len"+at] = &n
		}
		for sql, v := range got {
			if want := value(sql); v == nil || math.Abs(*v-want) > 1e-9 {
				t.Errorf("%s is %v, the report says %v", sql, want, v)
			}
		}
	}
}

func sumHits(d Drafter) *float64 {
	var n float64
	for _, s := range d.Slots {
		n += float64(s.Hits)
	}
	return &n
}

func TestACaptureAloneIsReported(t *testing.T) {
	dir := t.TempDir()
	querytest.Sequence(t, dir, "r", "s", 2, []int32{1, 2, 3, 4}, nil)
	r := build(t, dir, Options{})
	run := r.Runs[0]
	if len(run.Drafters) != 0 || !strings.HasPrefix(run.Verdict, "Capture only") || run.Tokens != 4 || run.Generated != 2 {
		t.Errorf("run is %+v", run)
	}
	for _, s := range []string{text(t, r), html(t, r)} {
		if !strings.Contains(s, "Capture only") || strings.Contains(s, "NaN") {
			t.Errorf("it reads\n%s", s)
		}
	}
}

func TestNothingScoredIsNotAvailableInsteadOfZero(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", []int{-1, -1})
	querytest.Rounds(t, dir, "r", "d", schemas.MethodChain, 2, "s", -1)
	querytest.Rounds(t, dir, "r", "e", schemas.MethodChain, 2, "s", -2)
	r := build(t, dir, Options{})
	d := r.Runs[0].Drafters[0]
	if d.Slots[0].Accuracy.Value != nil || d.EAL.Value != nil || d.ExpectedAccepted.Value != nil || d.Top8Streak.Value != nil ||
		d.Acceptance[0].AcceptLenMacro.Value != nil || d.Acceptance[0].AcceptedMicro.Value != nil || d.Acceptance[0].Truncated != 1 {
		t.Errorf("drafter is %+v", d)
	}
	if !strings.Contains(r.Runs[0].Verdict, "cannot be compared") {
		t.Errorf("verdict is %q", r.Runs[0].Verdict)
	}
	var b bytes.Buffer
	if err := WriteJSON(&b, r); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text(t, r), none) || strings.Contains(b.String()+html(t, r), "NaN") {
		t.Errorf("it reads\n%s", text(t, r))
	}
}

func TestAnEmptyDatasetIsReported(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "dataset.json"), []byte(`{"format_version": 1}`), 0o644); err != nil {
		t.Fatal(err)
	}
	r := build(t, dir, Options{})
	if !strings.Contains(text(t, r), "holds no run") || !strings.Contains(html(t, r), "holds no run") {
		t.Errorf("it reads\n%s", text(t, r))
	}
}

func TestAnUnknownRunIsNamed(t *testing.T) {
	db, err := query.Open(t.Context(), demo(t), query.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := Build(t.Context(), db, Options{Run: "dmeo"}); !errors.Is(err, ErrNoRun) || !strings.Contains(err.Error(), `"demo"`) {
		t.Errorf("error is %v, want ErrNoRun and the runs there are", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Build(ctx, db, Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v, want context.Canceled", err)
	}
	if _, err := Build(t.Context(), db, Options{Resamples: -1}); err == nil {
		t.Error("negative resamples were accepted")
	}
}

func TestOnlyTheChosenRunIsReported(t *testing.T) {
	dir := demo(t)
	querytest.Slots(t, dir, "other", "good", "s", []int{1})
	if r := build(t, dir, Options{Resamples: 10}); len(r.Runs) != 2 {
		t.Errorf("%d runs, want 2", len(r.Runs))
	}
	r := build(t, dir, Options{Run: "other", Resamples: 10})
	if len(r.Runs) != 1 || r.Runs[0].Run != "other" || len(r.Runs[0].Drafters) != 1 || r.Runs[0].Drafters[0].Scored != 1 {
		t.Errorf("runs are %+v", r.Runs)
	}
}

func TestThePageIsWellFormedAndStandsAlone(t *testing.T) {
	page := html(t, build(t, demo(t), Options{Resamples: 100}))
	d := xml.NewDecoder(strings.NewReader(page))
	elements := make(map[string]int)
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("not well formed: %v", err)
		}
		if e, ok := token.(xml.StartElement); ok {
			elements[e.Name.Local]++
		}
	}
	// Accuracy, prefix, budgets, cost, time, tags, forest; 3 distributions; 2
	// slot differences.
	if got := strings.Count(page, `<svg class="plot"`); got != 12 {
		t.Errorf("%d plots, want 12", got)
	}
	for _, bad := range []string{"script", "link", "img", "iframe", "object", "image"} {
		if elements[bad] > 0 {
			t.Errorf("the page holds <%s>", bad)
		}
	}
	if m := regexp.MustCompile(`(?i)https?:|src=|href=|url\(|@import|ZgotmplZ|NaN|%!|\[object`).FindString(page); m != "" {
		t.Errorf("the page holds %q", m)
	}
	if !strings.Contains(page, "prefers-color-scheme: dark") {
		t.Error("the page has no dark form")
	}
}

func TestNamesCannotWriteIntoThePage(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "%3Cscript%3Ealert(1)%3C%2Fscript%3E", "s", []int{1, 0}, []int{0, 0})
	querytest.Slots(t, dir, "r", `a"b&c`, "s", []int{1, 1})
	page := html(t, build(t, dir, Options{}))
	if strings.Contains(page, "<script>") || !strings.Contains(page, "&lt;script&gt;") || !strings.Contains(page, "b&amp;c") {
		t.Error("a drafter's name was not escaped")
	}
}

// gap writes two drafters over n sequences; b trails a by one token a round
// in the sequences where lead says so.
func gap(t *testing.T, n int, lead func(i int) int) Run {
	t.Helper()
	dir := t.TempDir()
	for i := range n {
		seq := fmt.Sprintf("s%02d", i)
		querytest.Rounds(t, dir, "r", "a", schemas.MethodChain, 7, seq, 4+i%3)
		querytest.Rounds(t, dir, "r", "b", schemas.MethodChain, 7, seq, 4+i%3-lead(i))
	}
	return build(t, dir, Options{Resamples: 400}).Runs[0]
}

func TestALeadIsClaimedOnlyBeyondTheInterval(t *testing.T) {
	for _, c := range []struct {
		name    string
		n       int
		lead    func(int) int
		ahead   int
		verdict string
	}{
		{"a steady lead", 12, func(int) int { return 1 }, 1, "a is better than b: 5.000 tokens a round by the chain against 4.000 (+1.000, 95 % +1.000 to +1.000)."},
		{"a lead in most", 12, func(i int) int { return b2i(i%4 > 0) }, 1, "a is better than b"},
		{"a lead in one", 12, func(i int) int { return b2i(i == 0) }, 0, "No lead is shown between a and b: 5.000 tokens a round by the chain against 4.917 (+0.083, 95 % 0.000 to +0.250), which includes 0."},
		{"equals", 12, func(int) int { return 0 }, 0, "a and b are equal on every shared sequence"},
		{"too few", 3, func(int) int { return 1 }, 0, "a stands above b, but 3 shared sequences are too few to call it"},
		{"one sequence", 1, func(int) int { return 1 }, 0, "a stands above b, but 1 shared sequence is too few to call it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			run := gap(t, c.n, c.lead)
			if got := run.Pairs[0].Acceptance[0].Ahead(); got != c.ahead {
				t.Errorf("ahead is %d, want %d: %+v", got, c.ahead, run.Pairs[0].Acceptance[0])
			}
			if !strings.HasPrefix(run.Verdict, c.verdict) {
				t.Errorf("verdict is %q, want %q", run.Verdict, c.verdict)
			}
		})
	}
}

func TestPairsUseSharedSequencesOnly(t *testing.T) {
	dir := t.TempDir()
	for i := range 8 {
		seq := fmt.Sprintf("s%d", i)
		querytest.Rounds(t, dir, "r", "a", schemas.MethodChain, 7, seq, 3)
		querytest.Rounds(t, dir, "r", "b", schemas.MethodChain, 3, seq, 2)
	}
	querytest.Rounds(t, dir, "r", "a", schemas.MethodChain, 7, "mine", 8)
	querytest.Rounds(t, dir, "r", "b", schemas.MethodChain, 3, "yours", 8)
	querytest.Rounds(t, dir, "r", "b", schemas.MethodChain, 3, "capped", -8)
	querytest.Rounds(t, dir, "r", "a", schemas.MethodChain, 7, "capped", 8)
	p := build(t, dir, Options{Resamples: 50}).Runs[0].Pairs[0]
	d := p.Acceptance[0] // chains of two block sizes
	if p.Sequences != 9 || d.Wins != 8 || d.Ties+d.Losses != 0 || *d.A != 3 || *d.B != 2 || *d.Difference.Value != 1 || d.Budget != 0 {
		t.Errorf("pair is %+v", p)
	}
}

func TestManyDraftersAreComparedWithTheBest(t *testing.T) {
	dir := t.TempDir()
	for i := range 8 {
		querytest.Rounds(t, dir, "r", fmt.Sprintf("d%d", i), schemas.MethodChain, 15, "s", 1+i)
	}
	pairs := build(t, dir, Options{Resamples: 10}).Runs[0].Pairs
	if len(pairs) != 7 || pairs[0].A != "d7" || pairs[0].B != "d6" || pairs[6].B != "d0" {
		t.Errorf("pairs are %+v", pairs)
	}
}

func TestAbsurdRowsDoNoHarm(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", []int{1, 0})
	nan := float32(math.NaN())
	querytest.Write(t, dir, "slots/run=r/drafter=d/x.parquet",
		schemas.Slot{SeqID: "x", Slot: math.MaxInt32, Hit: new(true)}, schemas.Slot{SeqID: "x", Slot: -5, Hit: new(true)},
		schemas.Slot{SeqID: "y", Slot: 1, Hit: new(true), CE: &nan, TV: &nan})
	querytest.Write(t, dir, "rounds/run=r/drafter=d/x.parquet",
		schemas.Round{SeqID: "x", Method: "chain", AcceptLen: math.MaxInt32}, schemas.Round{SeqID: "x", Method: "?", Budget: -3, AcceptLen: -4},
		schemas.Round{SeqID: "x", Method: "ddtree", Budget: math.MinInt32, AcceptLen: 1})
	r := build(t, dir, Options{Resamples: 10})
	if err := WriteJSON(io.Discard, r); err != nil {
		t.Error(err)
	}
	if s := text(t, r) + html(t, r); strings.Contains(s, "NaN") || len(r.Runs[0].Drafters[0].Slots) != 2 {
		t.Errorf("it reads\n%s", s)
	}
}
