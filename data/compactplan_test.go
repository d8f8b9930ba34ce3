package data

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

func TestAPlanSaysWhatACompactionDoes(t *testing.T) {
	dir := t.TempDir()
	d := mustCreate(t, dir)
	run := testRun("r1", 96, schemas.BF16)
	if err := d.AddRun(run); err != nil {
		t.Fatal(err)
	}
	manyParts(t, d, run, 0, 1, 4, SinkConfig{}, map[string]sample{})
	manyParts(t, d, run, 1, 21, 3, SinkConfig{}, map[string]sample{})
	r, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := r.PlanCompaction("r1", CompactConfig{})
	if err != nil {
		t.Fatal(err)
	}
	filesBefore, bytesBefore, err := r.CaptureSize("r1")
	if err != nil || filesBefore != 21 {
		t.Errorf("%d files (%v), want 21", filesBefore, err)
	}
	var groups [][]byte // every row group of states, as it is
	for _, path := range partsOf(t, d, "states") {
		o, err := openPart(path)
		if err != nil {
			t.Fatal(err)
		}
		all, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, rg := range o.Metadata().RowGroups {
			groups = append(groups, all[rg.FileOffset:rg.FileOffset+rg.TotalCompressedSize])
		}
		o.Close()
	}

	var done []Merge
	if _, err := d.Compact(t.Context(), "r1", CompactConfig{Merged: func(m Merge) { done = append(done, m) }}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(plan, done) || len(done) != 2 || done[0].Groups != 4 || done[0].First != 1 || done[0].Last != 4 || done[1].Shard != 1 {
		t.Errorf("planned %+v, done %+v", plan, done)
	}
	files, size, err := d.CaptureSize("r1")
	if err != nil || files != 6 || size <= 0 || size >= bytesBefore {
		t.Errorf("%d files of %d bytes (%v), want 6 of less than %d", files, size, err, bytesBefore)
	}
	var joined []byte
	for _, path := range partsOf(t, d, "states") {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		joined = append(joined, b...)
	}
	for i, g := range groups {
		if len(g) < 1000 || !bytes.Contains(joined, g) {
			t.Errorf("row group %d of %d bytes was not copied as it was", i, len(g))
		}
	}
	if plan, err := r.PlanCompaction("r1", CompactConfig{}); err != nil || len(plan) != 0 {
		t.Errorf("planned %+v (%v) after it was done", plan, err)
	}
	if _, err := r.PlanCompaction("r9", CompactConfig{}); err == nil {
		t.Error("a run that is not there was planned")
	}
}

// A new group that is not committed yet is no leftover of a crash to anybody
// who reads: the old ones count, and nothing is said of it.
func TestAHalfWrittenMergeIsInNoInventory(t *testing.T) {
	dir := t.TempDir()
	d := mustCreate(t, dir)
	run := testRun("r1", 16, schemas.BF16)
	if err := d.AddRun(run); err != nil {
		t.Fatal(err)
	}
	want := map[string]sample{}
	manyParts(t, d, run, 0, 1, 2, SinkConfig{}, want)
	// What a compaction leaves that dies before its marker.
	group := "part-00-000000000001-000000000002.parquet"
	tokens := filepath.Join(dir, "tokens", "run=r1")
	b, err := os.ReadFile(filepath.Join(tokens, "part-00-000000000001-000000000001.parquet"))
	if err == nil {
		err = os.WriteFile(filepath.Join(tokens, group), b, 0o600)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, journalName), []byte(`{"run":"r1","new":"`+group+`","old":["part-00-000000000001-000000000001.parquet","part-00-000000000002-000000000002.parquet"]}`), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	inv, err := Take(t.Context(), dir)
	if err != nil || len(inv.LeftOut) > 0 || len(inv.Files["tokens"]) != 2 || len(inv.Files["sequences"]) != 2 {
		t.Errorf("%+v, %v; want the two old groups and nothing left out", inv, err)
	}
	if run, groups, err := Interrupted(dir); run != "r1" || groups != 2 || err != nil {
		t.Errorf("interrupted: %q, %d, %v", run, groups, err)
	}
	r, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	compareReplay(t, r, "r1", want)
	d.Close()
	d = mustCreate(t, dir)
	compareReplay(t, d, "r1", want)
	if exists(filepath.Join(tokens, group)) || exists(filepath.Join(dir, journalName)) {
		t.Error("what was left of the compaction is still there")
	}
}
