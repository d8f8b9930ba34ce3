//go:build !cgo

package main

import (
	"encoding/json"
	"path/filepath"
	"testing"
)

func TestWithoutDuckDBAJobPrintsWhatItKnows(t *testing.T) {
	ds := filepath.Join(t.TempDir(), "ds")
	args := []string{"run", "--limit", "1", "--max-new", "6", "--budgets", "8", "--out", ds}
	out, _ := mustRun(t, exitMissing, append(args, "--json")...)
	var got outcome
	if err := json.Unmarshal([]byte(out), &got); err != nil || got.Sequences != 1 || got.Scored["good"] != 1 || got.Missing == "" {
		t.Errorf("%v: %s", err, out)
	}
	mustRun(t, exitOK, args...)
}
