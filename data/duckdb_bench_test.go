//go:build cgo

package data

import (
	"database/sql"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/data/statefile/statefiletest"
	"github.com/draftscope/draftscope/schemas"
)

// BenchmarkDuckDB asks DuckDB about two captures of five states: a scan of
// all vectors, a scan of one state, and the cosines of the two captures. The
// rounds take turns, and what is reported are ratios of their medians.
func BenchmarkDuckDB(b *testing.B) {
	const hidden, layers, tokens = 5120, 5, 1024
	d := mustCreate(b, b.TempDir())
	for i, name := range []string{"a", "b"} {
		run := testRun(name, hidden, schemas.BF16)
		run.Layers, run.States = layers, []int{0, 1, 2, 3, 4}
		if err := d.AddRun(run); err != nil {
			b.Fatal(err)
		}
		s, err := d.CaptureSink(name, 0, SinkConfig{})
		if err != nil {
			b.Fatal(err)
		}
		smp := newSample(testRun(name, 1, schemas.BF16), "p0000", tokens)
		smp.spec.Hidden, smp.spec.Layers, smp.spec.States = hidden, layers, run.States
		smp.states = statefiletest.Residual(uint64(i), layers, tokens, hidden, schemas.BF16)
		feed(b, s, "p0000", 1, smp.records(b, memory.NewGoAllocator(), 64))
		if err := s.Commit(b.Context()); err != nil {
			b.Fatal(err)
		}
		s.Close()
	}
	dbs := map[int]*sql.DB{} // by number of threads
	for _, threads := range []int{1, 2} {
		db, err := sql.Open("duckdb", fmt.Sprintf("?threads=%d", threads))
		if err != nil {
			b.Fatal(err)
		}
		defer db.Close()
		dbs[threads] = db
	}
	table := func(run string) string {
		return fmt.Sprintf("read_parquet('%s')", filepath.Join(d.Dir(), "states", "run="+run, "**", "*.parquet"))
	}
	scan := "select sum(list_sum(vec)) from " + table("a")
	queries := []struct {
		name    string
		threads int
		query   string
	}{
		{"scan/1", 1, scan},
		{"scan/2", 2, scan},
		{"state/1", 1, scan + " where state = 2"},
		{"position/1", 1, scan + " where pos = 100"},
		{"join/1", 1, "select sum(list_cosine_similarity(a.vec, b.vec)) from " + table("a") + " a join " + table("b") + " b using (seq_id, pos, state)"},
		{"join/2", 2, "select sum(list_cosine_similarity(a.vec, b.vec)) from " + table("a") + " a join " + table("b") + " b using (seq_id, pos, state)"},
	}
	took := map[string][]float64{}
	for b.Loop() {
		for _, q := range queries {
			start := time.Now()
			if got := queryRows(b, dbs[q.threads], q.query); len(got) != 1 {
				b.Fatalf("%s: %v", q.name, got)
			}
			took[q.name] = append(took[q.name], time.Since(start).Seconds())
		}
	}
	median := func(name string) float64 {
		s := slices.Sorted(slices.Values(took[name]))
		return s[len(s)/2]
	}
	for _, q := range queries {
		b.Logf("%-10s median %.3f s, best %.3f s", q.name, median(q.name), slices.Min(took[q.name]))
	}
	b.ReportMetric(median("state/1")/median("scan/1"), "state-of-scan")
	b.ReportMetric(median("join/1")/median("join/2"), "x-join")
	b.ReportMetric(slices.Min(took["join/1"])/slices.Min(took["join/2"]), "x-join-best")
	b.ReportMetric(0, "ns/op")
}
