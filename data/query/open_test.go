//go:build cgo

package query

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/parquet-go/parquet-go"

	"github.com/draftscope/draftscope/data/query/querytest"
	"github.com/draftscope/draftscope/schemas"
)

func TestABrokenFileIsNamedAndTheOthersAnswer(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "good", []int{1, 0})
	querytest.Slots(t, dir, "r", "d", "cut", []int{1, 1})
	part := func(name string) string { return filepath.Join(dir, "slots", "run=r", "drafter=d", name) }
	whole, err := os.ReadFile(part("cut.parquet"))
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(whole)
	for i := len(flipped) - 60; i < len(flipped)-40; i++ {
		flipped[i] ^= 0xff
	}
	for name, data := range map[string][]byte{
		"cut.parquet":       whole[:len(whole)-100],
		"empty.parquet":     {},
		"eight.parquet":     []byte("PAR1PAR1"),
		"flipped.parquet":   flipped,
		"huge.parquet":      []byte("PAR1\xff\xff\xff\x7fPAR1"),
		"unfinished.tmp":    whole[:50],
		"x.parquet.tmp":     whole[:50],
		"notes.parquet.txt": []byte("hello"),
	} {
		if err := os.WriteFile(part(name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	querytest.Write(t, dir, "slots/run=r/drafter=d/other.parquet", schemas.Fault{SeqID: "s"})
	querytest.Write(t, dir, "slots/outside.parquet", schemas.Slot{SeqID: "s"})
	querytest.Write(t, dir, "slots/drafter=d/run=r/swapped.parquet", schemas.Slot{SeqID: "s"})
	type wrongType struct {
		SeqID      string `parquet:"seq_id,dict"`
		Anchor     int64  `parquet:"anchor"`
		Slot       int32  `parquet:"slot"`
		DraftToken int32  `parquet:"draft_token"`
	}
	querytest.Write(t, dir, "slots/run=r/drafter=d/type.parquet", wrongType{})

	db := openDB(t, dir)
	wantRows(t, db, 0, "SELECT seq_id, count(*) FROM slots GROUP BY ALL", row("good", int64(2)))
	var named []string
	for _, w := range db.Warnings() {
		if w.Reason == "" || strings.Contains(w.Reason, "\n") {
			t.Errorf("%s: reason is %q, want one line", w.File, w.Reason)
		}
		named = append(named, strings.TrimPrefix(w.File, "slots/"))
	}
	want := []string{
		"drafter=d/run=r/swapped.parquet", "outside.parquet",
		"run=r/drafter=d/cut.parquet", "run=r/drafter=d/eight.parquet", "run=r/drafter=d/empty.parquet", "run=r/drafter=d/flipped.parquet",
		"run=r/drafter=d/huge.parquet", "run=r/drafter=d/other.parquet", "run=r/drafter=d/type.parquet",
	}
	if diff := cmp.Diff(want, named); diff != "" {
		t.Errorf("warnings (-want +got)\n%s", diff)
	}
}

func TestFilesOfAGroupThatWasNotCommittedAreLeftOut(t *testing.T) {
	dir := t.TempDir()
	const group, other = "part-00-000000000001-000000000009.parquet", "part-00-000000000010-000000000019.parquet"
	querytest.Write(t, dir, "tokens/run=r/"+group, schemas.Token{SeqID: "a"})
	querytest.Write(t, dir, "states/run=r/shard=00/part-000000000001-000000000009.parquet", schemas.State{SeqID: "a"})
	querytest.Write(t, dir, "sequences/run=r/"+group, schemas.Sequence{SeqID: "a"})
	querytest.Write(t, dir, "tokens/run=r/"+other, schemas.Token{SeqID: "b"})
	querytest.Write(t, dir, "states/run=r/shard=00/part-000000000010-000000000019.parquet", schemas.State{SeqID: "b"})
	querytest.Write(t, dir, "slots/run=r/drafter=d/"+group, schemas.Slot{SeqID: "a"})
	querytest.Write(t, dir, "drafts/run=r/drafter=d/"+group, schemas.Draft{SeqID: "a"})
	querytest.Write(t, dir, "rounds/run=r/drafter=d/"+group, schemas.Round{SeqID: "a"})
	querytest.Write(t, dir, "slots/run=r/drafter=d/"+other, schemas.Slot{SeqID: "b"})
	querytest.Write(t, dir, "drafts/run=r/drafter=d/"+other, schemas.Draft{SeqID: "b"})
	db := openDB(t, dir)
	for _, table := range []string{"sequences", "tokens", "states", "slots", "drafts", "rounds"} {
		wantRows(t, db, 0, "SELECT seq_id FROM "+table, row("a"))
	}
	if w := db.Warnings(); len(w) != 4 || !strings.Contains(w[0].Reason, "not committed") {
		t.Errorf("warnings: %v", w)
	}
}

func TestAnOlderFileLacksANewColumnAndANewerOneHasMore(t *testing.T) {
	dir := t.TempDir()
	type older struct { // before rkl, jsd and tv
		SeqID      string   `parquet:"seq_id,dict"`
		Anchor     int32    `parquet:"anchor"`
		Slot       int32    `parquet:"slot"`
		Label      *int32   `parquet:"label"`
		DataToken  *int32   `parquet:"data_token"`
		DraftToken int32    `parquet:"draft_token"`
		Hit        *bool    `parquet:"hit"`
		Rank       *int32   `parquet:"rank"`
		CE         *float32 `parquet:"ce"`
		KL         *float32 `parquet:"kl"`
		Logprob    float32  `parquet:"draft_logprob"`
		LossMask   *bool    `parquet:"loss_mask"`
		Surprise   string   `parquet:"surprise"`
	}
	querytest.Write(t, dir, "slots/run=r/drafter=d/old.parquet", older{SeqID: "old", Slot: 1, Hit: new(true), CE: new(float32(1))})
	querytest.Write(t, dir, "slots/run=r/drafter=d/new.parquet", schemas.Slot{SeqID: "new", Slot: 1, Hit: new(true), TV: new(float32(0))})
	db := openDB(t, dir)
	wantRows(t, db, 0, "SELECT seq_id, tv FROM slots ORDER BY seq_id", row("new", float32(0)), row("old", nil))
	if w := db.Warnings(); len(w) != 0 {
		t.Errorf("warnings: %v", w)
	}
}

func TestANewerFormatIsRefused(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "dataset.json"), []byte(`{"format_version": 2, "x": [1]}`), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := Open(t.Context(), dir, Options{})
	if !errors.Is(err, schemas.ErrFormat) || !strings.Contains(err.Error(), "newer") {
		t.Errorf("error is %v, want ErrFormat", err)
	}
}

func TestAFileOfANewerFormatIsLeftOut(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", []int{1})
	path := filepath.Join(dir, "slots", "run=r", "drafter=d", "new.parquet")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := parquet.Write(f, []schemas.Slot{{SeqID: "new"}}, parquet.KeyValueMetadata(keyFormat, "2")); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	db := openDB(t, dir)
	wantRows(t, db, 0, "SELECT DISTINCT seq_id FROM slots", row("s"))
	if w := db.Warnings(); len(w) != 1 || !strings.Contains(w[0].Reason, "newer format version") {
		t.Errorf("warnings: %v", w)
	}
}

func TestWhatIsNoDatasetIsSaid(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(dir, "bad")
	if err := os.MkdirAll(bad, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bad, "dataset.json"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{dir: ErrNotDataset, path: ErrNotDataset, bad: ErrNotDataset, filepath.Join(dir, "absent"): fs.ErrNotExist} {
		if _, err := Open(t.Context(), path, Options{}); !errors.Is(err, want) || !strings.Contains(err.Error(), path) {
			t.Errorf("Open(%s): %v, want %v", path, err, want)
		}
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for _, o := range []Options{{Threads: -1}, {MemoryLimit: "1GB'; DROP"}, {MemoryLimit: "many"}} {
		dir := t.TempDir()
		querytest.Slots(t, dir, "r", "d", "s", []int{1})
		if _, err := Open(t.Context(), dir, o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}

func TestTheDatasetCannotBeChangedOrLeft(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", []int{1})
	querytest.Slots(t, outside, "r", "d", "s", []int{1})
	db := openDB(t, dir)
	target := Literal(filepath.Join(dir, "x.parquet"))
	for _, sql := range []string{
		"COPY (SELECT 1 AS a) TO " + target,
		"EXPLAIN ANALYZE COPY (SELECT 1 AS a) TO " + target,
		"/* c */ -- d\n explain analyze COPY (SELECT 1 AS a) TO " + target,
		"EXPLAIN (ANALYZE, FORMAT json) COPY (SELECT 1 AS a) TO " + target,
		"EXPORT DATABASE " + target,
		"ATTACH " + target,
		"PREPARE p AS COPY (SELECT 1 AS a) TO " + target,
		"SET enable_external_access = true",
		"INSTALL httpfs", "LOAD httpfs",
		"DROP VIEW slots", "CREATE OR REPLACE VIEW slots AS SELECT 1 AS a",
		"SELEC 1",
		"SELECT 1; SELECT 2", "", "-- nothing",
		"CALL pragma_version()",
	} {
		if _, err := db.Query(t.Context(), sql); !errors.Is(err, ErrStatement) {
			t.Errorf("%s: error is %v, want ErrStatement", sql, err)
		}
	}
	for _, sql := range []string{
		"FROM read_parquet(" + Literal(outside+"/slots/*/*/*.parquet") + ")",
		"FROM read_csv('/etc/hostname')",
		"FROM read_parquet('https://example.invalid/x.parquet')",
		"SELECT content FROM read_text('/etc/hostname')",
	} {
		if _, err := db.Query(t.Context(), sql); err == nil {
			t.Errorf("%s was answered", sql)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("the dataset holds %v, %v; want slots alone", entries, err)
	}
	for _, sql := range []string{
		"FROM read_parquet(" + Literal(dir+"/slots/*/*/*.parquet") + ")",
		"EXPLAIN SELECT * FROM slots", "EXPLAIN ANALYZE SELECT * FROM slots", "SUMMARIZE slots", "DESCRIBE slots", "SHOW TABLES", "VALUES (1)", "SELECT 1;",
	} {
		ask(t, db, sql)
	}
}

func TestErrorsOfDuckDBAreOneLine(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", []int{1})
	db := openDB(t, dir)
	for sql, want := range map[string]string{
		"SELECT 1 FRM slots":                 `Parser Error: syntax error at or near "slots"`,
		"SELECT\n nope\nFROM slots":          `Referenced column "nope" not found`,
		"SELECT * FROM nope":                 "Table with name nope does not exist!",
		"SELECT CAST('x' AS INTEGER)":        "Could not convert string 'x' to INT32",
		"SELECT error('boom') FROM slots":    "boom",
		"SELECT nofunction(slot) FROM slots": "nofunction does not exist",
	} {
		_, err := db.Query(t.Context(), sql)
		if err == nil || strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), "LINE") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error is %q, want one line with %q", sql, err, want)
		}
	}
}

func TestACancelledQueryEnds(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", []int{1})
	db := openDB(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := db.Query(ctx, "SELECT count(*) FROM range(1000000000) a, range(1000) b"); !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v, want context.Canceled", err)
	}
}

func TestAPathOfGlobSignsIsAPath(t *testing.T) {
	root := t.TempDir()
	for _, name := range []string{"a[1]", "b*", "c?", "it's", "d x=1"} {
		dir := filepath.Join(root, name)
		querytest.Slots(t, dir, "r", "d", name, []int{1})
		wantRows(t, openDB(t, dir), 0, "SELECT seq_id FROM slots", row(name))
	}
}

func TestADatasetBehindALinkIsRead(t *testing.T) {
	dir, link := t.TempDir(), filepath.Join(t.TempDir(), "link")
	querytest.Slots(t, dir, "r", "d", "s", []int{1})
	if err := os.Symlink(dir, link); err != nil {
		t.Skipf("no links here: %v", err)
	}
	wantRows(t, openDB(t, link), 0, "SELECT seq_id FROM slots", row("s"))
}

func TestAFlippedPageIsAnErrorThatNamesItsFile(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", make([][]int, 0)...)
	var rows []schemas.Slot
	for i := range 5000 {
		rows = append(rows, schemas.Slot{SeqID: strconv.Itoa(i), Anchor: int32(i * 7919)})
	}
	path := querytest.Write(t, dir, "slots/run=r/drafter=d/flipped.parquet", rows...)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := 4; i < 400; i++ { // the first page's header and some of its body
		data[i] ^= 0xff
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	db := openDB(t, dir)
	if _, err := db.Query(t.Context(), "SELECT max(seq_id) FROM slots"); err == nil || !strings.Contains(err.Error(), "flipped.parquet") || strings.Contains(err.Error(), "\n") {
		t.Errorf("error is %v, want one line that names the file", err)
	}
	wantRows(t, db, 0, "SELECT 1", row(int64(1))) // the database lives on
}

func TestQueriesRunSideBySide(t *testing.T) {
	dir := t.TempDir()
	querytest.Slots(t, dir, "r", "d", "s", []int{1, 0, 1})
	db := openDB(t, dir)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 5 {
				rows, err := db.Query(t.Context(), "SELECT hits FROM slot_accuracy ORDER BY slot")
				if err != nil {
					t.Error(err)
					return
				}
				if all, err := rows.All(); err != nil || len(all) != 3 {
					t.Errorf("%v, %v", all, err)
				}
			}
		})
	}
	wg.Wait()
}
