package data

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/schemas"
)

// ids are those of a sample.
func (s sample) ids() []int32 {
	var out []int32
	for _, t := range s.tokens {
		out = append(out, t.TokenID)
	}
	return out
}

// mustPrefixes indexes what run may have, from runs that fit.
func mustPrefixes(t *testing.T, d *Dataset, run string, bound int64, fit func(Run) bool) *Prefixes {
	t.Helper()
	p, err := d.Prefixes(run, bound, fit)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func everyRun(Run) bool { return true }

// finds looks for ids, and compares what it finds with the stored states, of
// numbers states in the sample. It returns "run/seq", empty without one.
func finds(t *testing.T, p *Prefixes, ids []int32, from map[string]sample, states ...int) string {
	t.Helper()
	run, seq, got, err := p.Prefix(t.Context(), ids, func(string, string) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	if seq == "" {
		return ""
	}
	want := from[seq]
	if len(got) != len(states) || !slices.Equal(want.ids()[:len(ids)], ids) {
		t.Fatalf("%d states of %s/%s, of %d", len(got), run, seq, len(states))
	}
	for i, slot := range states {
		if n := len(ids) * p.own.Hidden * p.own.DType.Size(); !bytes.Equal(got[i], want.states[slot][:n]) {
			t.Errorf("state %d of %s/%s is not what was stored", slot, run, seq)
		}
	}
	return run + "/" + seq
}

func TestAStoredPrefixOfAnyLengthIsFoundAndReadBitForBit(t *testing.T) {
	for _, dtype := range []schemas.DType{schemas.BF16, schemas.F32} {
		run, fewer := testRun("r1", 96, dtype), testRun("r2", 96, dtype)
		fewer.States = []int{0, 4}
		d := mustCreate(t, t.TempDir(), run, fewer)
		want := map[string]sample{}
		long := newSample(run, "long", 700)
		twin := newSample(run, "twin", 700) // begins as long does
		copy(twin.tokens, long.tokens[:100])
		for i := range twin.tokens {
			twin.tokens[i].SeqID = "twin"
		}
		want["long"], want["twin"] = long, twin
		manyParts(t, d, run, 0, 1, 3, SinkConfig{}, want)
		s := mustSink(t, d)
		for i, id := range []string{"long", "twin"} {
			feed(t, s, id, uint64(50+i), want[id].records(t, checked(t), 64))
		}
		own, other := mustPrefixes(t, d, "r1", 1<<20, everyRun), mustPrefixes(t, d, "r2", 1<<20, everyRun)
		if got := finds(t, own, long.ids(), want, 0, 1, 2); got != "" {
			t.Errorf("%s was found and not committed", got)
		}
		if err := s.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{1, 99, 100, 101, 256, 257, 700} {
			for _, id := range []string{"long", "twin"} {
				ids := want[id].ids()[:n]
				got := finds(t, own, ids, want, 0, 1, 2)
				if n > 100 && got != "r1/"+id || n <= 100 && got == "" {
					t.Errorf("the first %d of %s: %q", n, id, got)
				}
				if got := finds(t, other, ids, want, 0, 2); got == "" {
					t.Errorf("the first %d of %s for a run of fewer states: none", n, id)
				}
			}
		}
		for name, ids := range map[string][]int32{
			"more tokens":  append(long.ids(), 1),
			"other tokens": append(long.ids()[:99], 5000),
		} {
			if got := finds(t, own, ids, want, 0, 1, 2); got != "" {
				t.Errorf("%s: %s", name, got)
			}
		}
		if _, err := d.Compact(t.Context(), "r1", CompactConfig{}); err != nil {
			t.Fatal(err)
		}
		for id, s := range want {
			if finds(t, own, s.ids(), want, 0, 1, 2) == "" {
				t.Errorf("%s is not found after a compaction", id)
			}
		}
	}
}

func TestRowsThatAreNotTheRunsOwnAreNotFound(t *testing.T) {
	run := testRun("r1", 96, schemas.BF16)
	for name, change := range map[string]func(own *Run){
		"nothing but the name": func(*Run) {},
		"another dtype":        func(own *Run) { own.DType = schemas.F32 },
		"more states":          func(own *Run) { own.States = []int{0, 1, 2, 4} },
		"rounded":              func(own *Run) { own.Rounding = Int8 },
		"a run that does not fit": func(own *Run) {
			own.Fingerprints.Weights = "w2"
		},
	} {
		own := testRun("r2", 96, schemas.BF16)
		change(&own)
		d := mustCreate(t, t.TempDir(), run, own)
		want := map[string]sample{}
		manyParts(t, d, run, 0, 1, 1, SinkConfig{}, want)
		p := mustPrefixes(t, d, "r2", 1<<20, func(r Run) bool { return r.Fingerprints.Weights == own.Fingerprints.Weights })
		for id, s := range want {
			if got := finds(t, p, s.ids(), want, 0, 1, 2); (got == "r1/"+id) != (name == "nothing but the name") {
				t.Errorf("%s: %q", name, got)
			}
		}
	}
	if _, err := mustCreate(t, t.TempDir()).Prefixes("r1", 1, everyRun); err == nil {
		t.Error("a run that is not there has prefixes")
	}
}

func TestSequencesThatAreFaultyOrDamagedLendNoRows(t *testing.T) {
	run := testRun("r1", 96, schemas.BF16)
	d := mustCreate(t, t.TempDir(), run)
	want := map[string]sample{}
	manyParts(t, d, run, 0, 1, 2, SinkConfig{}, want)
	p := mustPrefixes(t, d, "r1", 1<<20, everyRun)
	for i := range 2 {
		id := fmt.Sprintf("p%04d", 9998-i)
		ids := want[id].ids()
		if got := finds(t, p, ids, want, 0, 1, 2); got != "r1/"+id {
			t.Fatalf("%s: %q", id, got)
		}
		if i == 0 { // found to be another's when it came again
			if err := d.AddFaults("r1", []schemas.Fault{{SeqID: id, Chunk: -1, Check: "K15", Detail: "it came again and differs"}}); err != nil {
				t.Fatal(err)
			}
		} else {
			spoilFile(t, partsOf(t, d, "states")[1], func(b []byte) []byte {
				for i := range len(b) / 2 {
					b[4+i] ^= 1
				}
				return b
			})
		}
		if got := finds(t, p, ids, want, 0, 1, 2); got != "" {
			t.Errorf("%s is found: fault or damage %d", got, i)
		}
	}
}

func TestThePrefixIndexForgetsWhatWasWrittenFirst(t *testing.T) {
	run := testRun("r1", 96, schemas.BF16)
	d := mustCreate(t, t.TempDir(), run)
	want := map[string]sample{}
	p := mustPrefixes(t, d, "r1", 4*150, everyRun)
	s := mustSink(t, d)
	for i := range 4 {
		id := fmt.Sprint("p", i)
		want[id] = newSample(run, id, 60)
		feed(t, s, id, uint64(i+1), want[id].records(t, memory.NewGoAllocator(), 64))
		if err := s.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := finds(t, p, want[id].ids(), want, 0, 1, 2); got != "r1/"+id {
			t.Errorf("%s: %q", id, got)
		}
	}
	for i, known := range []bool{false, false, true, true} {
		id := fmt.Sprint("p", i)
		if got := finds(t, p, want[id].ids(), want, 0, 1, 2); (got != "") != known {
			t.Errorf("%s: %q", id, got)
		}
	}
	// One who comes later begins with the latest, too.
	late := mustPrefixes(t, d, "r1", 4*150, everyRun)
	if finds(t, late, want["p3"].ids(), want, 0, 1, 2) == "" || finds(t, late, want["p0"].ids(), want, 0, 1, 2) != "" {
		t.Error("an index that is made later holds other sequences")
	}
}

// BenchmarkPrefix is a run of 128 commits of 32 sequences of 512 tokens, and
// one sequence of 2,048 tokens with six states of 4,096 values.
func BenchmarkPrefix(b *testing.B) {
	many, wide := testRun("many", 8, schemas.BF16), testRun("wide", 4096, schemas.BF16)
	wide.States, wide.Layers = []int{0, 2, 4, 6, 8, 10}, 10
	d := mustCreate(b, b.TempDir(), many, wide)
	for _, run := range []Run{many, wide} {
		s, err := d.CaptureSink(run.Name, 0, SinkConfig{})
		if err != nil {
			b.Fatal(err)
		}
		commits, each, length := 128, 32, 512
		if run.Name == "wide" {
			commits, each, length = 1, 1, 2048
		}
		for i := range commits {
			for j := range each {
				id := fmt.Sprintf("p%d-%d", i, j)
				feed(b, s, id, uint64(i*each+j+1), newSample(run, id, length).records(b, memory.NewGoAllocator(), 64))
			}
			if err := s.Commit(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	}
	ids := newSample(wide, "p0-0", 2048).ids()
	prefix := func(p *Prefixes, ids []int32, found bool) {
		_, seq, _, err := p.Prefix(b.Context(), ids, func(string, string) bool { return true })
		if err != nil || (seq != "") != found {
			b.Fatal(seq, err)
		}
	}
	mine := func(run string) *Prefixes {
		p, err := d.Prefixes(run, 1<<30, func(Run) bool { return false })
		if err != nil {
			b.Fatal(err)
		}
		return p
	}
	b.Run("index", func(b *testing.B) {
		for b.Loop() {
			prefix(mine("many"), ids, false)
		}
		b.ReportMetric(128*32*512*float64(b.N)/b.Elapsed().Seconds(), "tokens/s")
	})
	b.Run("miss", func(b *testing.B) {
		p := mine("many")
		prefix(p, ids, false)
		time.Sleep(1100 * time.Millisecond) // until the folders' times are believed
		for b.Loop() {
			prefix(p, ids, false)
		}
	})
	for _, n := range []int{64, 2048} {
		b.Run(fmt.Sprint("read ", n), func(b *testing.B) {
			p := mine("wide")
			for b.Loop() {
				prefix(p, ids[:n], true)
			}
		})
	}
}
