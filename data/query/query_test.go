//go:build cgo

package query

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/draftscope/draftscope/data/query/querytest"
	"github.com/draftscope/draftscope/schemas"
)

func openDB(t *testing.T, dir string) *DB {
	t.Helper()
	db, err := Open(t.Context(), dir, Options{Threads: 1, MemoryLimit: "1GB"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

func ask(t *testing.T, db *DB, sql string) [][]any {
	t.Helper()
	rows, err := db.Query(t.Context(), sql)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	all, err := rows.All()
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return all
}

// wantRows compares the answer to sql; floats may differ by tol.
func wantRows(t *testing.T, db *DB, tol float64, sql string, want ...[]any) {
	t.Helper()
	near := cmp.Comparer(func(a, b float64) bool { return math.Abs(a-b) <= tol })
	if diff := cmp.Diff(want, ask(t, db, sql), near); diff != "" {
		t.Errorf("%s\n(-want +got)\n%s", sql, diff)
	}
}

func row(v ...any) []any { return v }

func TestTheGoldenHitsGiveTheGoldenNumbers(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", []int{1, 0, 1, 0})
	db := openDB(t, dir)
	wantRows(t, db, 0, "SELECT lead_hits, lead_scored, hits, scored, capped FROM blocks", row(int64(1), int64(4), int64(2), int64(4), false))
	wantRows(t, db, 0, "SELECT slot, hits, scored, accuracy FROM slot_accuracy ORDER BY slot",
		row(int64(1), int64(1), int64(1), 1.), row(int64(2), int64(0), int64(1), 0.), row(int64(3), int64(1), int64(1), 1.), row(int64(4), int64(0), int64(1), 0.))
	wantRows(t, db, 0, "SELECT prefix_hits, reached, conditional_rate, prefix_ratio FROM conditional_rate ORDER BY slot",
		row(int64(1), int64(1), 1., 1.), row(int64(0), int64(1), 0., 0.), row(int64(0), int64(0), nil, nil), row(int64(0), int64(0), nil, nil))
	wantRows(t, db, 0, "SELECT prefix_rate FROM prefix_rate ORDER BY slot", row(1.), row(0.), row(0.), row(0.))
	wantRows(t, db, 0, "SELECT eal, expected_accepted FROM eal JOIN expected_accepted USING (run, drafter)", row(1., 1.))
}

func TestUnscoredSlotsAreNeverMisses(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", []int{1, 1, -1, -1})
	db := openDB(t, dir)
	wantRows(t, db, 0, "SELECT lead_hits, scored, capped, lead_top8 FROM blocks", row(int64(2), int64(2), true, int64(2)))
	wantRows(t, db, 0, "SELECT hits, scored, accuracy, data_accuracy FROM slot_accuracy ORDER BY slot",
		row(int64(1), int64(1), 1., 1.), row(int64(1), int64(1), 1., 1.), row(int64(0), int64(0), nil, nil), row(int64(0), int64(0), nil, nil))
	wantRows(t, db, 0, "SELECT anchors, prefix_rate FROM prefix_rate ORDER BY slot", row(int64(1), 1.), row(int64(1), 1.), row(int64(0), nil), row(int64(0), nil))
	wantRows(t, db, 0, "SELECT slots, eal FROM eal", row(int64(2), 2.))
	wantRows(t, db, 0, "SELECT slots, expected_accepted FROM expected_accepted", row(int64(2), 2.))
}

func TestNothingScoredIsNULLNotZero(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", []int{-1, -1}, []int{-1, -1})
	querytest.Rounds(t, dir, "r", "d", schemas.MethodChain, 3, "s", -2)
	db := openDB(t, dir)
	wantRows(t, db, 0, "SELECT accuracy FROM slot_accuracy", row(nil), row(nil))
	wantRows(t, db, 0, "SELECT slots, eal FROM eal", row(int64(0), nil))
	wantRows(t, db, 0, "SELECT expected_accepted FROM expected_accepted", row(nil))
	wantRows(t, db, 0, "SELECT anchors, top8_streak FROM top8_streak", row(int64(0), nil))
	wantRows(t, db, 0, "SELECT sequences, rounds, truncated, accept_len_macro, accept_len_micro, accepted_macro, accepted_micro FROM accept_len",
		row(int64(0), int64(0), int64(1), nil, nil, nil, nil))
	wantRows(t, db, 0, "SELECT slots, loss FROM loss()", row(int64(0), nil))
	wantRows(t, db, 0, "SELECT DISTINCT count, mean FROM loss_means") // no scored slot, no row
}

func TestEALMultipliesMarginals(t *testing.T) {
	dir := t.TempDir()
	// .8, .6, .5 of ten anchors: .8 + .48 + .24.
	var blocks [][]int
	for a := range 10 {
		blocks = append(blocks, []int{b(a < 8), b(a >= 4), b(a%2 == 0)})
	}
	querytest.Slots(t, dir, "r", "d", "s", blocks...)
	wantRows(t, openDB(t, dir), 1e-12, "SELECT slots, eal FROM eal", row(int64(3), 1.52))
}

func b(v bool) int {
	if v {
		return 1
	}
	return 0
}

// vectors writes the two blocks of the published loss example: losses
// .5 1 2 and .2 .4 unscored.
func vectors(t *testing.T, dir string) {
	t.Helper()
	var rows []schemas.Slot
	for a, losses := range [][]float32{{.5, 1, 2}, {.2, .4, -1}} {
		for k, l := range losses {
			s := schemas.Slot{SeqID: "s", Anchor: int32(a), Slot: int32(k + 1)}
			if l >= 0 {
				s.Hit, s.CE, s.KL, s.LossMask = new(false), &l, &l, new(true)
			} else {
				s.CE = new(float32(99)) // a label may exist where the mask is 0
			}
			rows = append(rows, s)
		}
	}
	querytest.Write(t, dir, "slots/run=r/drafter=d/p.parquet", rows...)
}

func TestLossesEqualThePublishedVectors(t *testing.T) {
	dir := t.TempDir()
	vectors(t, dir)
	db := openDB(t, dir)
	for _, c := range []struct {
		args string
		want float64
	}{
		{"'ce', 'exp', 7, 'weight'", .7617405},
		{"'ce', 'exp', 7, 'count'", .6833154},
		{"'ce', 'exp', 7, 'batch'", 3.4165836},
		{"'ce', 'dpace', NULL, 'count'", .5909590},
		{"'ce', 'dpace', NULL, 'batch'", 2.9548011},
		{"'ce', 'plain', NULL, 'weight'", 4.1 / 5},
		{"'kl', 'exp', 7, 'weight'", .7617405},
		{"'kl', 'dpace', NULL, 'count'", .5909590},
		{"", .7617405},
		{"gamma := 7, normaliser := 'count'", .6833154},
		{"'ce', 'dpace', 7, 'batch', alpha := 1", 0.5*3 + 1*2 + 2*1 + .2*2 + .4*1},
	} {
		t.Run(c.args, func(t *testing.T) {
			wantRows(t, db, 5e-7, fmt.Sprintf("SELECT slots, loss FROM loss(%s)", c.args), row(int64(5), c.want))
		})
	}
	wantRows(t, db, 5e-7, "SELECT w FROM loss_terms('ce', 'dpace', 7, 0.5) ORDER BY anchor, slot",
		row(1.6645185), row(.8612532), row(.3118681), row(1.6688310), row(.7594656), row(0.))
	wantRows(t, db, 5e-7, "SELECT round(weighted, 7), round(weight, 7) FROM loss_by_sequence()", row(3.4165836, 4.4852331))
	wantRows(t, db, 5e-7, "SELECT recipe, loss FROM losses ORDER BY recipe LIMIT 2", row("ce, dpace, batch", 2.9548011), row("ce, dpace, count", .5909590))
}

func TestALossThatWasNotAskedForIsNULL(t *testing.T) {
	dir := t.TempDir()
	vectors(t, dir)
	db := openDB(t, dir)
	for _, o := range []string{"rkl", "jsd", "tv", "nla"} {
		wantRows(t, db, 0, fmt.Sprintf("SELECT slots, loss FROM loss('%s', 'plain')", o), row(int64(0), nil))
	}
	wantRows(t, db, 1e-6, "SELECT objective, count, mean FROM loss_means ORDER BY objective",
		row("ce", int64(5), .82), row("jsd", int64(0), nil), row("kl", int64(5), .82), row("nla", int64(0), nil), row("rkl", int64(0), nil), row("tv", int64(0), nil))
}

func TestWrongLossArgumentsAreNamed(t *testing.T) {
	dir := t.TempDir()
	vectors(t, dir)
	db := openDB(t, dir)
	for args, want := range map[string]string{
		"'mse'":                       "no objective mse: use ce, kl, rkl, jsd, tv or nla",
		"'ce', 'linear'":              "no weighting linear: use plain, exp or dpace",
		"'ce', 'exp', 0":              "gamma must be above 0",
		"'ce', 'exp', NULL":           "gamma must be above 0",
		"'ce', 'plain', NULL, 'mean'": "no normaliser mean: use weight, count or batch",
	} {
		if _, err := db.Query(t.Context(), "FROM loss("+args+")"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("loss(%s): error is %v, want %q", args, err, want)
		}
	}
}

func TestNLAIsClampedAtAnAlphaOf1e5(t *testing.T) {
	dir := t.TempDir()
	querytest.Write(t, dir, "slots/run=r/drafter=d/p.parquet",
		schemas.Slot{SeqID: "s", Slot: 1, Hit: new(true), CE: new(float32(0)), TV: new(float32(.5))},
		schemas.Slot{SeqID: "s", Slot: 2, Hit: new(true), CE: new(float32(0)), TV: new(float32(1))},
		schemas.Slot{SeqID: "s", Slot: 3, Hit: new(true), CE: new(float32(0))})
	wantRows(t, openDB(t, dir), 1e-9, "SELECT nla FROM slot_losses ORDER BY slot", row(math.Ln2), row(-math.Log(1e-5)), row(nil))
}

func TestTop8CountsRanksBelow8AndStopsAtTheUnscored(t *testing.T) {
	dir := t.TempDir()
	var rows []schemas.Slot
	for a, ranks := range [][]int32{{0, 7, 8, 0}, {0, 0, 0, 7}, {-1, 0, 0, 0}, {3, -2, 0, 0}, {-2, 0, 0, 0}} {
		for k, r := range ranks { // -1: past the stored top K, -2: unscored
			s := schemas.Slot{SeqID: "s", Anchor: int32(a), Slot: int32(k + 1)}
			if r != -2 {
				s.Hit = new(r == 0)
			}
			if r >= 0 {
				s.Rank = &r
			}
			rows = append(rows, s)
		}
	}
	querytest.Write(t, dir, "slots/run=r/drafter=d/p.parquet", rows...)
	// 2 + 4 + 0 + 1 over four anchors; the fifth has nothing scored in front.
	wantRows(t, openDB(t, dir), 0, "SELECT anchors, sum_streak, top8_streak FROM top8_streak", row(int64(4), int64(7), 1.75))
}

func TestMacroAndMicroDiffer(t *testing.T) {
	dir := t.TempDir()
	querytest.Rounds(t, dir, "r", "d", schemas.MethodChain, 7, "a", 1, 1, 1, 5, -8)
	querytest.Rounds(t, dir, "r", "d", schemas.MethodChain, 7, "b", 6)
	querytest.Rounds(t, dir, "r", "d", schemas.MethodChain, 7, "c", -3)
	querytest.Rounds(t, dir, "r", "d", schemas.MethodDDTree, 64, "a", 4, 2)
	db := openDB(t, dir)
	wantRows(t, db, 1e-12, "SELECT * FROM accept_len ORDER BY method",
		row("r", "d", "chain", int64(7), int64(2), int64(5), int64(2), int64(9), 4., 14./5, 3., 9./5),
		row("r", "d", "ddtree", int64(64), int64(1), int64(2), int64(0), int64(4), 3., 3., 2., 2.))
	wantRows(t, db, 0, "SELECT budget, accept_len_macro FROM ddtree_accept_len", row(int64(64), 3.))
	wantRows(t, db, 1e-12, "SELECT accept_len, rounds, share FROM accept_len_histogram WHERE method = 'chain' ORDER BY 1",
		row(int64(1), int64(3), .6), row(int64(5), int64(1), .2), row(int64(6), int64(1), .2))
}

func TestAgreementLooksAtTheNextTokensMask(t *testing.T) {
	dir := t.TempDir()
	// Positions 2..5 predict the generated tokens 3..6; 3 is wrong, so is 0,
	// whose next token is prompt.
	querytest.Sequence(t, dir, "r", "s", 3, []int32{5, 6, 7, 8, 9, 10, 11}, nil, 0, 3)
	wantRows(t, openDB(t, dir), 0, "SELECT positions, agreed, agreement FROM agreement", row(int64(4), int64(3), .75))
}

func TestALoopingTextIsFlagged(t *testing.T) {
	dir := t.TempDir()
	loop, fine := make([]int32, 60), make([]int32, 60)
	for i := range loop {
		loop[i], fine[i] = int32(i%3), int32(i)
	}
	querytest.Sequence(t, dir, "r", "loop", 5, loop, nil)
	querytest.Sequence(t, dir, "r", "fine", 5, fine, nil)
	querytest.Sequence(t, dir, "r", "short", 50, loop, nil)
	wantRows(t, openDB(t, dir), 0, "SELECT seq_id, grams, distinct_grams, looped FROM repetition ORDER BY seq_id",
		row("fine", int64(52), int64(52), false), row("loop", int64(52), int64(3), true), row("short", int64(7), int64(3), false))
}

func TestTagsAndLengthsSplitANumber(t *testing.T) {
	dir := t.TempDir()
	querytest.Sequence(t, dir, "r", "a", 2, make([]int32, 33), map[string]string{"task": "code", "lang": "go"})
	querytest.Sequence(t, dir, "r", "b", 2, make([]int32, 70), map[string]string{"task": "prose"})
	querytest.Rounds(t, dir, "r", "d", schemas.MethodChain, 3, "a", 2, 4)
	querytest.Rounds(t, dir, "r", "d", schemas.MethodChain, 3, "b", 1)
	querytest.Slots(t, dir, "r", "d", "a", []int{1, 0})
	querytest.Slots(t, dir, "r", "d", "b", []int{0, 1})
	db := openDB(t, dir)
	wantRows(t, db, 0, "SELECT tag, value, rounds, accept_len_macro FROM accept_len_by_tag ORDER BY ALL",
		row("lang", "go", int64(2), 3.), row("task", "code", int64(2), 3.), row("task", "prose", int64(1), 1.))
	wantRows(t, db, 0, "SELECT bucket, sequences, accept_len_micro FROM accept_len_by_length ORDER BY 1", row(int64(32), int64(1), 3.), row(int64(64), int64(1), 1.))
	wantRows(t, db, 0, "SELECT value, accuracy FROM slot_accuracy_by_tag WHERE slot = 1 AND tag = 'task' ORDER BY 1", row("code", 1.), row("prose", 0.))
}

func TestRunsAndDraftersAreNeverNumbers(t *testing.T) {
	// The dataset itself lies below a folder that looks like a partition.
	dir := filepath.Join(t.TempDir(), "run=parent", "ds")
	for _, name := range []string{"007", "2024-01-01", "1e3", "true", "a'b"} {
		querytest.Slots(t, dir, name, name, "s", []int{1})
	}
	querytest.Slots(t, dir, "a%2Fb", "x%20y", "s", []int{1})
	db := openDB(t, dir)
	wantRows(t, db, 0, "SELECT DISTINCT typeof(run), typeof(drafter) FROM slots", row("VARCHAR", "VARCHAR"))
	wantRows(t, db, 0, "SELECT run, drafter FROM slot_accuracy ORDER BY run",
		row("007", "007"), row("1e3", "1e3"), row("2024-01-01", "2024-01-01"), row("a'b", "a'b"), row("a/b", "x y"), row("true", "true"))
	wantRows(t, db, 0, "SELECT count(*) FROM slots WHERE run = '007'", row(int64(1)))
}

func TestEmptyTablesHaveTheColumnsOfFullOnes(t *testing.T) {
	empty, full := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(empty, "dataset.json"), []byte(`{"format_version": 1}`), 0o644); err != nil {
		t.Fatal(err)
	}
	querytest.Sequence(t, full, "r", "s", 1, []int32{1, 2}, map[string]string{"k": "v"})
	querytest.Slots(t, full, "r", "d", "s", []int{1})
	querytest.Rounds(t, full, "r", "d", "chain", 3, "s", 1)
	querytest.Write(t, full, "states/run=r/shard=00/p.parquet", schemas.State{SeqID: "s", Vec: []float32{1, 2}})
	querytest.Write(t, full, "drafts/run=r/drafter=d/p.parquet", schemas.Draft{SeqID: "s", DraftTokens: []int32{1}, TopIDs: []int32{1}, TopLogprobs: []float32{0}})
	querytest.Write(t, full, "faults/run=r/p.parquet", schemas.Fault{SeqID: "s", Check: "K1"})
	querytest.Write(t, full, "similarity/p.parquet", schemas.Similarity{RunA: "a", RunB: "b"})
	a, b := openDB(t, empty), openDB(t, full)
	for _, tb := range tables {
		sql := "SELECT column_name, column_type FROM (DESCRIBE " + tb.name + ")"
		wantRows(t, a, 0, sql, ask(t, b, sql)...)
		wantRows(t, a, 0, "FROM "+tb.name)
		wantRows(t, b, 0, "SELECT count(*) > 0 FROM "+tb.name, row(true))
	}
	wantRows(t, b, 0, "SELECT run, shard, vec FROM states", row("r", "00", []any{float32(1), float32(2)}))
	// Every named number can be asked for while there is nothing.
	for _, v := range ask(t, a, "SELECT view_name FROM duckdb_views() WHERE NOT internal") {
		wantRows(t, a, 0, fmt.Sprintf("FROM %s", v[0]))
	}
}

func TestFatesFollowTheRoundsOfTheChain(t *testing.T) {
	dir := t.TempDir()
	querytest.Sequence(t, dir, "r", "s", 2, []int32{5, 6, 10, 11, 12, 12, 14, 15}, nil)
	querytest.Write(t, dir, "rounds/run=r/drafter=d/x.parquet",
		schemas.Round{SeqID: "s", Method: schemas.MethodChain, Anchor: 2, Proposed: 3, Accepted: 2, AcceptLen: 3},
		schemas.Round{SeqID: "s", Method: schemas.MethodChain, Round: 1, Anchor: 5, Proposed: 1, Accepted: 1, AcceptLen: 2},
		schemas.Round{SeqID: "s", Method: schemas.MethodDDTree, Budget: 8, Anchor: 2, Proposed: 8, Accepted: 5, AcceptLen: 6})
	db := openDB(t, dir)
	wantRows(t, db, 0, "SELECT pos, fate, round, slot FROM fates ORDER BY pos",
		row(int64(0), "masked", nil, nil), row(int64(1), "masked", nil, nil), row(int64(2), "unscored", nil, nil),
		row(int64(3), "hit", int64(0), int64(1)), row(int64(4), "hit", int64(0), int64(2)), row(int64(5), "miss", int64(0), int64(3)),
		row(int64(6), "hit", int64(1), int64(1)), row(int64(7), "bonus", int64(1), int64(2)))
	wantRows(t, db, 0, "SELECT token_id, misses, drafted, miss_rate FROM misses WHERE drafted > 0 ORDER BY token_id",
		row(int64(11), int64(0), int64(1), 0.), row(int64(12), int64(1), int64(2), 0.5), row(int64(14), int64(0), int64(1), 0.))
}

func TestCostDistanceAndTimeCountWholeRounds(t *testing.T) {
	dir := t.TempDir()
	for i := range 4 {
		seq := fmt.Sprintf("s%d", i)
		querytest.Sequence(t, dir, "r", seq, 10, make([]int32, 30), nil) // all captured at one moment: by seq_id
		querytest.Rounds(t, dir, "r", "d", schemas.MethodChain, 7, seq, 1+i, 3, -5)
	}
	db := openDB(t, dir)
	wantRows(t, db, 1e-12, "SELECT rounds, verified, tokens, verified_per_round, verified_per_token FROM verify_cost",
		row(int64(8), int64(64), int64(22), 8., 64./22))
	// The anchors are 10, 11 and 12: the first draft is 2, 3 and 4 behind the prompt.
	wantRows(t, db, 1e-12, "SELECT bucket, sequences, rounds, truncated, sum_accepted, accept_len_micro FROM accept_len_by_distance ORDER BY bucket",
		row(int64(2), int64(4), int64(8), int64(0), int64(14), 22./8), row(int64(4), int64(4), int64(0), int64(4), int64(0), nil))
	wantRows(t, db, 1e-12, "SELECT part, sequences, rounds, accept_len_macro FROM accept_len_over_time(2) ORDER BY part",
		row(int64(1), int64(2), int64(4), 2.25), row(int64(2), int64(2), int64(4), 3.25))
	wantRows(t, db, 1e-12, "SELECT place, drafter, accept_len_macro FROM leaders", row(int64(1), "d", 2.75))
}

func TestTheMapOfSimilaritiesHasSoManyParts(t *testing.T) {
	dir := t.TempDir()
	var rows []schemas.Similarity
	for pos := range int32(10) {
		rows = append(rows, schemas.Similarity{RunA: "a", RunB: "b", SeqID: "s", Pos: pos, State: 2, Cosine: new(1 - float32(pos)/16)})
	}
	querytest.Write(t, dir, "similarity/a--b.parquet", rows...)
	db := openDB(t, dir)
	wantRows(t, db, 1e-6, "SELECT part, first_pos, last_pos, rows, mean_cosine, min_cosine::DOUBLE FROM similarity_map(4) ORDER BY part",
		row(int64(0), int64(0), int64(2), int64(3), 1-1./16, 1-2./16), row(int64(1), int64(3), int64(5), int64(3), 1-4./16, 1-5./16),
		row(int64(2), int64(6), int64(8), int64(3), 1-7./16, 1-8./16), row(int64(3), int64(9), int64(9), int64(1), 1-9./16, 1-9./16))
}
