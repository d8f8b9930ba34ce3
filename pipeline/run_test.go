package pipeline

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/nats-io/nats.go"
)

func TestACaptureNeedsNoStage(t *testing.T) {
	mem := checked(t)
	sh, _ := openShelf("")
	src := &testSource{mem: mem, ids: ids(7), records: 2, rows: 9}
	sum, err := Run(t.Context(), Config{Run: "r", Dir: t.TempDir(), Allocator: mem}, src, nil, sh.sink)
	if err != nil {
		t.Fatal(err)
	}
	capture, _ := want(ids(7), 2, 9)
	sh.check(t, CaptureStream, capture)
	if sum.Stored != 7 || sum.Processed != 0 || len(sh.stored[ResultsStream]) != 0 {
		t.Errorf("summary %+v", sum)
	}
}

func TestARunOfNothingEnds(t *testing.T) {
	mem := checked(t)
	sh, _ := openShelf("")
	sum, err := Run(t.Context(), Config{Run: "r", Dir: t.TempDir(), Allocator: mem}, &testSource{mem: mem}, stages(mem, nil), sh.sink)
	if err != nil || sum.Published != 0 || sum.Stored != 0 {
		t.Errorf("summary %+v, %v", sum, err)
	}
}

func TestAnErrorStopsTheRunAndTheNextOneGoesOn(t *testing.T) {
	boom := errors.New("boom")
	for _, where := range []string{"source", "stage", "sink", "commit"} {
		t.Run(where, func(t *testing.T) {
			mem := checked(t)
			dir := t.TempDir()
			sh, _ := openShelf("")
			failing := true
			fail := func(at, seq string) error {
				if failing && at == where && (seq == "" || seq == ids(8)[5]) {
					return boom
				}
				return nil
			}
			cfg := Config{Run: "r", Dir: dir, Allocator: mem, CommitSequences: 2}
			once := func() error {
				src := &testSource{mem: mem, ids: ids(8), records: 2, rows: 9, onNext: func(seq string, rec int) error {
					if rec == 1 {
						return fail("source", seq)
					}
					return nil
				}}
				sink := func(stream string, p int) (Sink, error) {
					k, err := sh.sink(stream, p)
					return &failingSink{k, fail}, err
				}
				_, err := Run(t.Context(), cfg, src, stages(mem, func(seq string) error { return fail("stage", seq) }), sink)
				return err
			}
			if err := once(); !errors.Is(err, boom) {
				t.Fatalf("got %v", err)
			}
			failing = false
			if err := once(); err != nil {
				t.Fatal(err)
			}
			capture, results := want(ids(8), 2, 9)
			sh.check(t, CaptureStream, capture)
			sh.check(t, ResultsStream, results)
		})
	}
}

type failingSink struct {
	Sink
	fail func(at, seq string) error
}

func (k *failingSink) Write(ctx context.Context, seq string, rec arrow.Record) error {
	if err := k.fail("sink", seq); err != nil {
		return err
	}
	return k.Sink.Write(ctx, seq, rec)
}

func (k *failingSink) Commit(ctx context.Context) error {
	if err := k.fail("commit", ""); err != nil {
		return err
	}
	return k.Sink.Commit(ctx)
}

func TestASequenceThatTheStageFaultsIsSetAsideAlone(t *testing.T) {
	mem := checked(t)
	sh, _ := openShelf("")
	var faults []Fault
	bad := ids(6)[2]
	src := &testSource{mem: mem, ids: ids(6), records: 3, rows: 9}
	cfg := Config{Run: "r", Dir: t.TempDir(), Allocator: mem, OnFault: func(f Fault) { faults = append(faults, f) }}
	seen := 0
	sum, err := Run(t.Context(), cfg, src, stages(mem, func(seq string) error {
		if seq != bad {
			return nil
		}
		if seen++; seen < 2 { // the second record, when there are results in the stream
			return nil
		}
		return fmt.Errorf("scoring: %w", &Fault{Check: "finite", Detail: "row 3 has a NaN"})
	}), sh.sink)
	if err != nil {
		t.Fatal(err)
	}
	capture, results := want(ids(6), 3, 9)
	delete(results, bad)
	sh.check(t, CaptureStream, capture)
	sh.check(t, ResultsStream, results)
	if sum.Faults != 1 || len(faults) != 1 || faults[0] != (Fault{Stream: CaptureStream, Seq: bad, Chunk: 1, Check: "finite", Detail: "row 3 has a NaN"}) {
		t.Errorf("faults %+v, summary %+v", faults, sum)
	}
	if sh.drops != 1 {
		t.Errorf("the sink of results was told to drop %d times", sh.drops)
	}
}

func TestPoisonInTheStreamDoesNotStopARun(t *testing.T) {
	mem := checked(t)
	s, err := Open(t.Context(), Config{Run: "r", Dir: t.TempDir(), Partitions: 1, Allocator: mem})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var faults []string
	s.cfg.OnFault = func(f Fault) { faults = append(faults, f.Stream+"/"+f.Seq+"/"+f.Check) }
	if _, err := openStreams(t.Context(), s.js, s.cfg, []string{CaptureStream}); err != nil {
		t.Fatal(err)
	}
	h := header{kind: kindData, seq: "poison", attempt: "old.1", rows: 3, schema: "x", digest: 7}
	for _, m := range []*nats.Msg{
		{Data: []byte("not ours")},
		{Header: h.marshal("r", ""), Data: []byte("garbage")},
	} {
		m.Subject = Subject("r", CaptureStream, 0)
		if _, err := s.js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	sh, _ := openShelf("")
	src := &testSource{mem: mem, ids: ids(3), records: 2, rows: 4}
	sum, err := s.Run(t.Context(), src, stages(mem, nil), sh.sink)
	if err != nil {
		t.Fatal(err)
	}
	capture, results := want(ids(3), 2, 4)
	sh.check(t, CaptureStream, capture)
	sh.check(t, ResultsStream, results)
	if sum.Faults != 2 || strings.Join(faults, " ") != "capture//header capture/poison/frame" {
		t.Errorf("faults %v, summary %+v", faults, sum)
	}
}

func TestADrainedRunEndsWithTheSequenceAtHand(t *testing.T) {
	mem := checked(t)
	drain := make(chan struct{})
	dir := t.TempDir()
	cfg := Config{Run: "r", Dir: dir, Allocator: mem, Drain: drain}
	sh, _ := openShelf("")
	src := &testSource{mem: mem, ids: ids(50), records: 3, rows: 4, onNext: func(seq string, rec int) error {
		if seq == ids(50)[10] && rec == 1 {
			close(drain)
		}
		return nil
	}}
	sum, err := Run(t.Context(), cfg, src, stages(mem, nil), sh.sink)
	if err != nil {
		t.Fatal(err)
	}
	if !sum.Drained || sum.Published != 11 {
		t.Errorf("summary %+v", sum)
	}
	capture, results := want(ids(11), 3, 4)
	sh.check(t, CaptureStream, capture)
	sh.check(t, ResultsStream, results)
}

// waitingSource has nothing until it is told to stop.
type waitingSource struct{ asked chan struct{} }

func (s waitingSource) Next(ctx context.Context) (string, arrow.Record, bool, error) {
	close(s.asked)
	<-ctx.Done()
	return "", nil, false, context.Cause(ctx)
}

func TestDrainingDoesNotWaitForASourceThatHasNothing(t *testing.T) {
	drain, src := make(chan struct{}), waitingSource{make(chan struct{})}
	go func() { <-src.asked; close(drain) }()
	sh, _ := openShelf("")
	sum, err := Run(t.Context(), Config{Run: "r", Dir: t.TempDir(), Drain: drain}, src, nil, sh.sink)
	if err != nil || !sum.Drained {
		t.Errorf("summary %+v, %v", sum, err)
	}
}

func TestASourceThatMixesSequencesIsRefused(t *testing.T) {
	mem := checked(t)
	sh, _ := openShelf("")
	for name, src := range map[string]Source{
		"mixed":    scripted{mem, []string{"a", "b"}, new(int)},
		"cut off":  scripted{mem, []string{"a"}, new(int)},
		"nameless": scripted{mem, []string{""}, new(int)},
	} {
		if _, err := Run(t.Context(), Config{Run: "r", Dir: t.TempDir()}, src, nil, sh.sink); !errors.Is(err, ErrOrder) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// scripted gives one record each of the named sequences and never ends one.
type scripted struct {
	mem memory.Allocator
	ids []string
	at  *int
}

func (s scripted) Next(ctx context.Context) (string, arrow.Record, bool, error) {
	if *s.at == len(s.ids) {
		return (&testSource{}).Next(ctx)
	}
	seq := s.ids[*s.at]
	*s.at++
	return seq, testRecord(s.mem, seq, 0, 1), false, nil
}

func TestAStreamOfLimitedSizePassesManyTimesItsSize(t *testing.T) {
	mem := checked(t)
	sh, _ := openShelf("")
	cfg := Config{
		Run: "r", Dir: t.TempDir(), Allocator: mem, MaxBytes: 200_000, ChunkBytes: 8000,
		CommitSequences: 2, CommitIdle: 10 * time.Millisecond,
	}
	src := &testSource{mem: mem, ids: ids(30), records: 2, rows: 150}
	sum, err := Run(t.Context(), cfg, src, stages(mem, nil), sh.sink)
	if err != nil {
		t.Fatal(err)
	}
	if sum.Bytes < 3*cfg.MaxBytes {
		t.Fatalf("only %d bytes were published", sum.Bytes)
	}
	capture, results := want(ids(30), 2, 150)
	sh.check(t, CaptureStream, capture)
	sh.check(t, ResultsStream, results)
}

func TestASequenceLargerThanTheStreamIsAnErrorNotADeadlock(t *testing.T) {
	mem := checked(t)
	sh, _ := openShelf("")
	cfg := Config{Run: "r", Dir: t.TempDir(), Allocator: mem, MaxBytes: 100_000, ChunkBytes: 8000}
	src := &testSource{mem: mem, ids: ids(2), records: 10, rows: 150}
	if _, err := Run(t.Context(), cfg, src, nil, sh.sink); !errors.Is(err, ErrSequenceTooLarge) {
		t.Errorf("got %v", err)
	}
}

func TestAFullDiskIsAClearErrorAndTheRunGoesOnWhenThereIsRoom(t *testing.T) {
	mem := checked(t)
	dir := t.TempDir()
	sh, _ := openShelf(filepath.Join(dir, "shelf"))
	cfg := Config{Run: "r", Dir: filepath.Join(dir, "stream"), Allocator: mem, ChunkBytes: 8000, storeLimit: 150_000}
	source := func() Source { return &testSource{mem: mem, ids: ids(20), records: 2, rows: 150} }
	_, err := Run(t.Context(), cfg, source(), nil, sh.sink)
	if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "free some space") {
		t.Fatalf("got %v", err)
	}
	cfg.storeLimit = 0
	if _, err := Run(t.Context(), cfg, source(), nil, sh.sink); err != nil {
		t.Fatal(err)
	}
	capture, _ := want(ids(20), 2, 150)
	sh.check(t, CaptureStream, capture)
}

func TestTwoProcessesDoNotShareAStore(t *testing.T) {
	cfg := Config{Run: "r", Dir: t.TempDir()}
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), cfg); !errors.Is(err, ErrStoreInUse) {
		t.Errorf("got %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, err = Open(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	_ = s.Close()
}

func TestStreamsAreDeletedAfterSuccessUnlessKept(t *testing.T) {
	for keep, want := range map[Keep]bool{KeepDefault: false, KeepAlways: true, KeepNever: false} {
		mem := checked(t)
		sh, _ := openShelf("")
		cfg := Config{Run: "r", Dir: t.TempDir(), Keep: keep, Partitions: 3}
		s, err := Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // a second run over kept streams repeats nothing
			src := &testSource{mem: mem, ids: ids(4), records: 1, rows: 3}
			if _, err := s.Run(t.Context(), src, nil, sh.sink); err != nil {
				t.Fatal(err)
			}
		}
		n, err := storedPartitions(t.Context(), s.js, "r", CaptureStream)
		if err != nil || (n == 3) != want {
			t.Errorf("keep %d: %d partitions left, %v", keep, n, err)
		}
		if sh.repeats != 4 { // the source's own
			t.Errorf("keep %d: %d repeats", keep, sh.repeats)
		}
		_ = s.Close()
	}
}

func TestAConfigThatCannotWorkIsRefusedWithAllItsFaults(t *testing.T) {
	err := Config{Partitions: 1000, Window: -1}.Validate()
	for _, part := range []string{"run name", "directory", "1000 partitions", "window"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("no word of %q in %v", part, err)
		}
	}
	if err := (Config{Run: "r", Dir: "d"}).Validate(); err != nil {
		t.Error(err)
	}
}
