package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/schemas"
)

func addFaults(t *testing.T, dir string, faults ...schemas.Fault) {
	t.Helper()
	ds, err := data.Create(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer ds.Close()
	if err := ds.AddFaults("r1", faults); err != nil {
		t.Fatal(err)
	}
}

// A fault ends a job with 4 when the job has found it, or when something that
// the job was asked for is missing because of it.
func TestOldFaultsConcernAJobOnlyWhereSomethingIsMissing(t *testing.T) {
	ds := filepath.Join(t.TempDir(), "ds")
	capture := []string{"capture", "--limit", "2", "--max-new", "6", "--out", ds}
	mustRun(t, exitOK, capture...)
	addFaults(t, ds,
		schemas.Fault{SeqID: "p0001", Chunk: -1, Check: "K15", Detail: "came again"},
		schemas.Fault{SeqID: "p0077", Chunk: -1, Check: "K1", Detail: "state 2, row 1: NaN"},
		schemas.Fault{SeqID: "p0001", Chunk: -1, Check: "K1", Detail: "drafter other: slots.ce: 1 value not finite; results set aside"})
	mustRun(t, exitOK, capture...)
	mustRun(t, exitOK, "replay", "--dataset", ds, "--budgets", "8", "--limit", "1")
	mustRun(t, exitOK, "replay", "--dataset", ds, "--budgets", "8")

	addFaults(t, ds, schemas.Fault{SeqID: "p0002", Chunk: -1, Check: "K1", Detail: "state 2, row 1: NaN"})
	// This job stores p0002: the old fault is answered.
	mustRun(t, exitOK, "capture", "--limit", "3", "--max-new", "6", "--out", ds)
}

func TestAReportNamesADamagedGroupInFewLines(t *testing.T) {
	ds := filepath.Join(t.TempDir(), "ds")
	mustRun(t, exitOK, "run", "--limit", "1", "--max-new", "6", "--budgets", "8", "--out", ds)
	slots, err := filepath.Glob(filepath.Join(ds, "slots", "run=r1", "drafter=good", "*.parquet"))
	if err != nil || len(slots) != 1 {
		t.Fatalf("%q, %v", slots, err)
	}
	if err := os.Truncate(slots[0], 1000); err != nil {
		t.Fatal(err)
	}
	out, errs := mustRun(t, exitPartial, "report", "--dataset", ds)
	if strings.Count(out, "left out: ") != 2 || !strings.Contains(out, "left out: 2 more files of the same groups") || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, "slots/") {
		t.Errorf("the report: %s%s", out, errs)
	}
	if _, errs := mustRun(t, exitPartial, "query", "--dataset", ds, "SELECT 1"); strings.Count(errs, "\n") != 3 {
		t.Errorf("a query: %s", errs)
	}
	t.Setenv("TMPDIR", filepath.Join(ds, "nowhere"))
	if _, errs := mustRun(t, exitMissing, "report", "--dataset", ds); !strings.Contains(errs, "set TMPDIR") || strings.Contains(errs, "opening dataset") {
		t.Errorf("without a folder for temporary files: %s", errs)
	}
}
