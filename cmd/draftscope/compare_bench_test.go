//go:build cgo

package main

import (
	"flag"
	"fmt"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/draftscope/draftscope/cuda/cpu"
	"github.com/draftscope/draftscope/data/query"
)

var compareTokens = flag.Int("compare.tokens", 64, "tokens of each of the 8 sequences of BenchmarkCompare")

// BenchmarkCompare compares two captures of six states of 5120 values in bf16,
// in turn with DuckDB's own scan of the same vectors on two threads. Reported
// are medians: MB of bf16 of both captures a second, by the clock and by
// processor time, and the ratio of the two by each.
//
//	go test -run '^$' -bench Compare -benchtime 5x ./cmd/draftscope -compare.tokens 256
func BenchmarkCompare(b *testing.B) {
	const hidden, states = 5120, 6
	var ids []string
	for i := range 8 {
		ids = append(ids, fmt.Sprintf("s%d", i))
	}
	x, y := capture(b, "a", *compareTokens, hidden, states, ids...), capture(b, "b", *compareTokens, hidden, states, ids...)
	var dbs []*query.DB
	for _, ref := range []captureRef{x, y} {
		db, err := query.Open(b.Context(), ref.dir, query.Options{Threads: 2})
		if err != nil {
			b.Fatal(err)
		}
		defer db.Close()
		dbs = append(dbs, db)
	}
	mb := float64(2*2*len(ids)**compareTokens*hidden*states) / 1e6
	dev, err := cpu.New(cpu.Config{})
	if err != nil {
		b.Fatal(err)
	}
	rows := measure{dev: dev}
	defer rows.close()
	var ours, theirs, ourCPU, theirCPU []float64
	for b.Loop() {
		clock, cpu := timeOf(func() {
			if _, path, err := compareCaptures(b.Context(), x, y, rows.rows, nil); err != nil || filepath.Base(path) != "a--b.parquet" {
				b.Fatalf("%s: %v", path, err)
			}
		})
		ours, ourCPU = append(ours, clock), append(ourCPU, cpu)
		clock, cpu = timeOf(func() {
			for _, db := range dbs {
				rows, err := db.Query(b.Context(), "SELECT sum(list_sum(vec)) FROM states")
				if err != nil {
					b.Fatal(err)
				}
				if all, err := rows.All(); err != nil || len(all) != 1 {
					b.Fatalf("%v, %v", all, err)
				}
			}
		})
		theirs, theirCPU = append(theirs, clock), append(theirCPU, cpu)
	}
	median := func(v []float64) float64 { slices.Sort(v); return v[len(v)/2] }
	b.ReportMetric(mb/median(ours), "MB/s")
	b.ReportMetric(mb/median(theirs), "duckdb-MB/s")
	b.ReportMetric(median(theirs)/median(ours), "of-duckdb")
	b.ReportMetric(1000*median(ourCPU)/mb, "cpu-s/GB")
	b.ReportMetric(median(theirCPU)/median(ourCPU), "of-duckdb-by-cpu")
	b.ReportMetric(0, "ns/op")
}

// timeOf is the clock's and the processors' time of f, in seconds.
func timeOf(f func()) (clock, cpu float64) {
	used := func() float64 {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			panic(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
	}
	begun, before := time.Now(), used()
	f()
	return time.Since(begun).Seconds(), used() - before
}
