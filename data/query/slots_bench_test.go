//go:build cgo

package query

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/parquet-go/parquet-go"

	"github.com/draftscope/draftscope/data/query/querytest"
	"github.com/draftscope/draftscope/schemas"
)

var slotRows = flag.Int("slots", 150_000, "rows of the table slots in BenchmarkSlots")

// slotQuestions are the questions that a person has about slots.
var slotQuestions = []struct{ name, sql string }{
	{"slot_accuracy", "FROM slot_accuracy"},
	{"slot_accuracy of one drafter", "FROM slot_accuracy WHERE drafter = 'b'"},
	{"slot_accuracy by sequence", "SELECT count(*) FROM slot_accuracy_by_sequence"},
	{"slot_accuracy by tag", "FROM slot_accuracy_by_tag"},
	{"slot 1 by anchor, 64 tokens a part", "SELECT drafter, anchor // 64 AS part, avg(hit::INT) FROM slots WHERE slot = 1 GROUP BY ALL"},
	{"ce by slot", "SELECT drafter, slot, avg(ce), count(ce) FROM slots WHERE hit IS NOT NULL GROUP BY ALL"},
	{"rank by slot", "SELECT drafter, slot, rank, count(*) FROM slots WHERE hit IS NOT NULL GROUP BY ALL"},
	{"the tokens most missed", "SELECT label, count(*) FILTER (NOT hit) AS misses, count(hit) FROM slots GROUP BY label ORDER BY misses DESC LIMIT 20"},
	{"eal", "FROM eal"},
	{"prefix_rate", "FROM prefix_rate"},
	{"conditional_rate", "FROM conditional_rate"},
	{"expected_accepted", "FROM expected_accepted"},
	{"top8_streak", "FROM top8_streak"},
	{"loss_means", "FROM loss_means"},
	{"loss ce, exp", "FROM loss('ce', 'exp', 7, 'weight')"},
	{"loss kl, plain", "FROM loss('kl', 'plain', NULL, 'count')"},
	{"loss ce, dpace", "FROM loss('ce', 'dpace', NULL, 'count')"},
}

// BenchmarkSlots asks all of them over -slots rows on two threads, in
// turn, and reports the median of each in seconds; the log has
// median, best, and the least processor time. Ten million rows take 200 MB of
// disk:
//
//	go test -run '^$' -bench Slots -benchtime 3x ./data/query -slots 10000000
func BenchmarkSlots(b *testing.B) {
	dir := b.TempDir()
	size := writeSlots(b, dir, *slotRows)
	db, err := Open(b.Context(), dir, Options{Threads: 2})
	if err != nil {
		b.Fatal(err)
	}
	defer db.Close()
	run := func(sql string) [][]any {
		rows, err := db.Query(b.Context(), sql)
		if err != nil {
			b.Fatalf("%s: %v", sql, err)
		}
		all, err := rows.All()
		if err != nil || len(all) == 0 {
			b.Fatalf("%s: %d rows, %v", sql, len(all), err)
		}
		return all
	}
	took, cpu := make([][]time.Duration, len(slotQuestions)), make([]time.Duration, len(slotQuestions))
	for b.Loop() {
		for i, q := range slotQuestions {
			start, before := time.Now(), processor(b)
			run(q.sql)
			took[i] = append(took[i], time.Since(start))
			if used := processor(b) - before; cpu[i] == 0 || used < cpu[i] {
				cpu[i] = used
			}
		}
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%d slots in %d MB of Parquet\n", *slotRows, size>>20)
	for i, q := range slotQuestions {
		slices.Sort(took[i])
		n := len(took[i])
		b.ReportMetric(took[i][n/2].Seconds(), strings.ReplaceAll(q.name, " ", "_")+"_s")
		fmt.Fprintf(&out, "| %s | %.2f | %.2f | %.2f |\n", q.name, took[i][n/2].Seconds(), took[i][0].Seconds(), cpu[i].Seconds())
	}
	if *slotRows >= 1_000_000 {
		fmt.Fprintln(os.Stderr, out.String()) // Log cuts it short
		fmt.Fprintln(os.Stderr, run("EXPLAIN FROM slot_accuracy WHERE drafter = 'b'")[0][1])
	}
}

// processor is the time that this process has used of the processors.
func processor(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// writeSlots writes the slots of two drafters in files as the writer of a
// dataset makes them, blocks of 16, and their sequences.
func writeSlots(b *testing.B, dir string, n int) (size int64) {
	b.Helper()
	const block, files, length = 16, 8, 400
	rng := rand.New(rand.NewPCG(1, 2))
	var sequences []schemas.Sequence
	for d, name := range []string{"a", "b"} {
		folder := filepath.Join(dir, "slots", "run=r", "drafter="+name)
		if err := os.MkdirAll(folder, 0o755); err != nil {
			b.Fatal(err)
		}
		seq := 0
		for f := range files {
			path := filepath.Join(folder, fmt.Sprintf("part-%d.parquet", f))
			out, err := os.Create(path)
			if err != nil {
				b.Fatal(err)
			}
			w := parquet.NewGenericWriter[schemas.Slot](out, parquet.Compression(&parquet.Zstd), parquet.PageBufferSize(64<<10), parquet.WriteBufferSize(0))
			for left := n / 2 / files; left > 0; left -= length * (block - 1) {
				id := fmt.Sprintf("seq-%07d", seq)
				seq++
				if d == 0 {
					sequences = append(sequences, schemas.Sequence{SeqID: id, PromptLen: 20, Length: length, Tags: map[string]string{"set": strconv.Itoa(seq % 5)}})
				}
				rows := make([]schemas.Slot, 0, length*(block-1))
				for a := range length {
					p := 0.8
					for k := 1; k < block && len(rows) < left; k++ {
						rows = append(rows, randomSlot(rng, id, a, k, p, a+k < length))
						p *= 0.9
					}
				}
				if _, err := w.Write(rows); err != nil {
					b.Fatal(err)
				}
			}
			if err := w.Close(); err != nil {
				b.Fatal(err)
			}
			info, err := out.Stat()
			if err != nil {
				b.Fatal(err)
			}
			size += info.Size()
			out.Close()
		}
	}
	querytest.Write(b, dir, "sequences/run=r/p.parquet", sequences...)
	return size
}

func randomSlot(rng *rand.Rand, id string, anchor, k int, p float64, scored bool) schemas.Slot {
	s := schemas.Slot{SeqID: id, Anchor: int32(anchor), Slot: int32(k), DraftToken: rng.Int32N(32000), DraftLogprob: -rng.Float32()}
	if !scored {
		return s
	}
	label, hit := s.DraftToken, rng.Float64() < p
	rank := int32(0)
	if !hit {
		label, rank = rng.Int32N(32000), 1+rng.Int32N(30)
	}
	if rank < 16 {
		s.Rank = &rank
	}
	ce, kl := rng.Float32()*5, rng.Float32()*4
	s.Label, s.DataToken, s.Hit, s.CE, s.KL, s.LossMask = &label, &label, &hit, &ce, &kl, new(true)
	return s
}
