package data

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/data/statefile/statefiletest"
	"github.com/draftscope/draftscope/schemas"
)

// testRun is a small run; hidden and dtype as given.
func testRun(name string, hidden int, dtype schemas.DType) Run {
	return Run{
		Name: name, Target: "demo", States: []int{0, 2, 4}, Layers: 4, Hidden: hidden,
		FinalNorm: FinalPreNorm, DType: dtype, Engine: "native", EngineVersion: "1",
		Fingerprints: Fingerprints{Weights: "w1", Tokenizer: "t1", Template: "c1"},
		Options:      map[string]string{"max_new": "16"},
	}
}

// sample is one captured sequence in memory.
type sample struct {
	spec     schemas.CaptureSpec
	tokens   []schemas.Token
	states   [][]byte
	sequence schemas.Sequence
}

func newSample(run Run, id string, n int) sample {
	var seed uint64
	for _, b := range []byte(id) {
		seed = seed*31 + uint64(b)
	}
	rng := rand.New(rand.NewPCG(seed, uint64(n)))
	s := sample{spec: schemas.CaptureSpec{Run: run.Name, Hidden: run.Hidden, Layers: run.Layers, States: run.States, DType: run.DType}}
	for i := range n {
		tok := schemas.Token{SeqID: id, Pos: int32(i), TokenID: rng.Int32N(4096), LossMask: i >= n/2, Turn: int32(2 * i / n), Role: []string{"user", "assistant"}[2*i/n]}
		arg, lp := rng.Int32N(4096), -rng.Float32()
		tok.TargetArgmax = &arg
		if i < n-1 {
			tok.TargetLogprob = &lp
		}
		s.tokens = append(s.tokens, tok)
	}
	for range run.States {
		s.states = append(s.states, run.DType.AppendBytes(nil, statefiletest.Like(rng, n*run.Hidden, run.DType == schemas.BF16)))
	}
	text := "text of " + id
	s.sequence = schemas.Sequence{
		SeqID: id, PromptLen: int32(n / 2), Length: int32(n), FinishReason: "stop",
		Tags: map[string]string{"kind": "test", "n": strconv.Itoa(n)}, Text: &text, CreatedAt: time.Now().UTC().Truncate(time.Microsecond),
	}
	return s
}

// records cuts the sample into capture records of at most rows rows, followed
// by its row of the table sequences.
func (s sample) records(t testing.TB, mem memory.Allocator, rows int) []arrow.Record {
	t.Helper()
	var recs []arrow.Record
	width := s.spec.Hidden * s.spec.DType.Size()
	for lo := 0; lo < len(s.tokens); lo += rows {
		hi := min(lo+rows, len(s.tokens))
		c := schemas.Capture{Spec: s.spec, Tokens: s.tokens[lo:hi]}
		for _, st := range s.states {
			c.States = append(c.States, st[lo*width:hi*width])
		}
		rec, err := schemas.CaptureRecord(mem, c)
		if err != nil {
			t.Fatal(err)
		}
		recs = append(recs, rec)
	}
	env := schemas.Envelope{Table: schemas.TableSequences, Run: s.spec.Run}
	return append(recs, schemas.Record(mem, env, []schemas.Sequence{s.sequence}))
}

// What the pipeline asks of sinks and sources, spelled here since the two
// packages do not know each other.
type (
	port interface {
		Write(ctx context.Context, seq string, rec arrow.Record) error
		End(ctx context.Context, seq string, streamSeq uint64) error
		Drop(seq string)
		Pending() int64
		Commit(ctx context.Context) error
		Close() error
	}
	sourcePort interface {
		Next(ctx context.Context) (seq string, rec arrow.Record, last bool, err error)
	}
)

var (
	_ port       = (*CaptureSink)(nil)
	_ port       = (*ResultSink)(nil)
	_ sourcePort = (*ReplaySource)(nil)
)

// feed writes records and ends the sequence.
func feed(t testing.TB, s port, seq string, streamSeq uint64, recs []arrow.Record) {
	t.Helper()
	for _, rec := range recs {
		if err := s.Write(t.Context(), seq, rec); err != nil {
			t.Fatal(err)
		}
		rec.Release()
	}
	if err := s.End(t.Context(), seq, streamSeq); err != nil {
		t.Fatal(err)
	}
}

// mustCreate makes a dataset with some runs, closed when the test ends.
func mustCreate(t testing.TB, dir string, runs ...Run) *Dataset {
	t.Helper()
	d, err := Create(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	for _, run := range runs {
		if err := d.AddRun(run); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// mustSink takes the captures of partition 0 of r1.
func mustSink(t testing.TB, d *Dataset) *CaptureSink {
	t.Helper()
	s, err := d.CaptureSink("r1", 0, SinkConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// checked is an allocator that fails the test when something is left of it.
func checked(t *testing.T) memory.Allocator {
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	t.Cleanup(func() { mem.AssertSize(t, 0) })
	return mem
}

// partsOf lists the Parquet files of a table, relative to the dataset.
func partsOf(t testing.TB, d *Dataset, table string) []string {
	t.Helper()
	var out []string
	for _, depth := range []string{"*", "*/*"} {
		m, err := filepath.Glob(filepath.Join(d.dir, table, depth, "*.parquet"))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, m...)
	}
	slices.Sort(out)
	return out
}

func TestACaptureComesBackBitForBit(t *testing.T) {
	for _, dtype := range []schemas.DType{schemas.BF16, schemas.F32} {
		t.Run(string(dtype), func(t *testing.T) {
			mem := checked(t)
			run := testRun("r1", 96, dtype)
			d := mustCreate(t, t.TempDir(), run)
			s, err := d.CaptureSink("r1", 1, SinkConfig{RowGroupBytes: 96 * 4 * 10})
			if err != nil {
				t.Fatal(err)
			}
			want := map[string]sample{}
			for i, n := range []int{33, 1, 120, 7} {
				id := fmt.Sprintf("p%04d", 9-i)
				want[id] = newSample(run, id, n)
				feed(t, s, id, uint64(10*i+5), want[id].records(t, mem, 16))
				if i == 1 {
					if err := s.Commit(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := s.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := s.Counts(); got != (Counts{Stored: 4}) || s.Pending() != 0 {
				t.Errorf("counts %+v and %d bytes pending, want 4 stored", got, s.Pending())
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			compareReplay(t, d, "r1", want)
		})
	}
}

func TestSinksWorkAtOnce(t *testing.T) {
	mem := checked(t)
	run := testRun("r1", 16, schemas.BF16)
	d := mustCreate(t, t.TempDir(), run)
	if err := d.AddDrafter("r1", Drafter{Name: "good"}); err != nil {
		t.Fatal(err)
	}
	want := map[string]sample{}
	for i := range 24 {
		id := fmt.Sprintf("p%04d", i)
		want[id] = newSample(run, id, 10+i)
	}
	// Six workers on two shards, all with the same stream numbers; each also
	// sees a fault.
	var workers sync.WaitGroup
	for worker := range 6 {
		workers.Go(func() {
			c, err := d.CaptureSink("r1", worker%2, SinkConfig{})
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			r, err := d.ResultSink("r1", worker%2, SinkConfig{})
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Close()
			for i := range 4 {
				id := fmt.Sprintf("p%04d", 4*worker+i)
				feed(t, c, id, uint64(i+1), want[id].records(t, mem, 7))
				bad := newSample(run, "bad-"+id, 5)
				bad.sequence.Length = 6
				feed(t, c, bad.sequence.SeqID, uint64(i+1), bad.records(t, mem, 7))
				feed(t, r, id, uint64(i+1), sampleResults(id, "good").records(mem, "r1"))
				if err := errors.Join(c.Commit(t.Context()), r.Commit(t.Context())); err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
	compareReplay(t, d, "r1", want)
	if got := stored[schemas.Round](t, d, "rounds"); len(got) != 3*24 {
		t.Errorf("%d rounds, want %d", len(got), 3*24)
	}
	if faults, err := d.Faults("r1"); err != nil || len(faults) != 24 {
		t.Errorf("%d faults (%v), want 24", len(faults), err)
	}
}

func BenchmarkCommit(b *testing.B) {
	for _, bc := range []struct {
		name         string
		hidden, rows int
	}{{"5120", 5120, 256}, {"256", 256, 4096}} {
		run := testRun("r1", bc.hidden, schemas.BF16)
		smp := newSample(run, "p0", bc.rows)
		recs := smp.records(b, memory.NewGoAllocator(), 64)
		raw := float64(len(run.States) * len(smp.states[0]))
		b.Run("capture/"+bc.name, func(b *testing.B) {
			d := mustCreate(b, b.TempDir())
			if err := d.AddRun(run); err != nil {
				b.Fatal(err)
			}
			s, err := d.CaptureSink("r1", 0, SinkConfig{})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			for b.Loop() {
				for _, rec := range recs {
					if err := s.Write(b.Context(), "p0", rec); err != nil {
						b.Fatal(err)
					}
				}
				if err := s.End(b.Context(), "p0", 1); err != nil {
					b.Fatal(err)
				}
				if err := s.Commit(b.Context()); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				d.settle("r1", []seqKey{{seq: "p0"}}, false) // so that it is no repeat
				for _, table := range []string{"states", "tokens", "sequences"} {
					for _, path := range partsOf(b, d, table) {
						if err := os.Remove(path); err != nil {
							b.Fatal(err)
						}
					}
				}
				b.StartTimer()
			}
			b.ReportMetric(raw*float64(b.N)/1e6/b.Elapsed().Seconds(), "rawMB/s")
		})
		b.Run("replay/"+bc.name, func(b *testing.B) {
			d := mustCreate(b, b.TempDir())
			if err := d.AddRun(run); err != nil {
				b.Fatal(err)
			}
			s, err := d.CaptureSink("r1", 0, SinkConfig{})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			feed(b, s, "p0", 1, smp.records(b, memory.NewGoAllocator(), 64))
			if err := s.Commit(b.Context()); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				src, err := d.Replay("r1", ReplayConfig{})
				if err != nil {
					b.Fatal(err)
				}
				replayAll(b, src)
				src.Close()
			}
			b.ReportMetric(raw*float64(b.N)/1e6/b.Elapsed().Seconds(), "rawMB/s")
		})
	}
}

// A fault may quote a file's name. A reader of the table takes UTF-8 only.
func TestFaultsAreUTF8WhateverTheyQuote(t *testing.T) {
	d := mustCreate(t, t.TempDir(), testRun("r1", 8, schemas.F32))
	f := schemas.Fault{SeqID: "a\xff", Chunk: -1, Check: "K21", Detail: "\xff\xfe\xe9.safetensors: no é"}
	for range 2 {
		if err := d.AddFaults("r1", []schemas.Fault{f}); err != nil {
			t.Fatal(err)
		}
	}
	parts := partsOf(t, d, schemas.TableFaults)
	if len(parts) != 1 {
		t.Fatalf("%d files, want 1: it is the same fault", len(parts))
	}
	rows, err := readRows[schemas.Fault](parts[0])
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 1 || rows[0].SeqID != "a\ufffd" || rows[0].Detail != "\ufffd.safetensors: no é" {
		t.Errorf("%+q", rows)
	}
}
