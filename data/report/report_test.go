//go:build cgo

package report

import (
	"os"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/data/query"
	"github.com/draftscope/draftscope/data/query/querytest"
)

func build(t *testing.T, dir string, opt Options) *Report {
	t.Helper()
	db, err := query.Open(t.Context(), dir, query.Options{Threads: 1})
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

func TestX(t *testing.T) {
	dir := t.TempDir()
	querytest.Random(t, dir, "demo", 3, 24, 16,
		querytest.Drafter{Name: "good", Skill: 0.9, Decay: 0.95},
		querytest.Drafter{Name: "shift", Skill: 0.15, Decay: 0.6},
		querytest.Drafter{Name: "early", Skill: 0.7, Decay: 0.9},
		querytest.Drafter{Name: "shortcut", Skill: 0.88, Decay: 0.95})
	r := build(t, dir, Options{})
	f, _ := os.Create("/tmp/r.html")
	if err := WriteHTML(f, r); err != nil {
		t.Fatal(err)
	}
	f.Close()
	var b strings.Builder
	WriteJSON(&b, r)
	os.WriteFile("/tmp/r.json", []byte(b.String()), 0o644)
}
