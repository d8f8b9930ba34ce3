//go:build cgo

package report

import (
	"testing"

	"github.com/draftscope/draftscope/data/query"
	"github.com/draftscope/draftscope/data/query/querytest"
)

// A run of 500 sequences, three drafters and 700,000 slots.
func BenchmarkBuild(b *testing.B) {
	dir := b.TempDir()
	slots, _ := querytest.Random(b, dir, "r", 1, 500, 16,
		querytest.Drafter{Name: "a", Skill: .9, Decay: .95}, querytest.Drafter{Name: "b", Skill: .8, Decay: .95}, querytest.Drafter{Name: "c", Skill: .4, Decay: .9})
	db, err := query.Open(b.Context(), dir, query.Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer db.Close()
	for b.Loop() {
		if _, err := Build(b.Context(), db, Options{}); err != nil {
			b.Fatal(err)
		}
	}
	rows := 0
	for _, s := range slots {
		rows += len(s)
	}
	b.ReportMetric(float64(rows), "slots")
}
