package pipeline

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sync/errgroup"
)

// Nobody reads, so that the second sequence, which begins while the stream is
// less than half full, never gets the room that it needs.
func TestASheddingSourceGivesUpWhatItHasBegunAndNeverStalls(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	cfg.ChunkBytes = 8000
	group(t, role(t, cfg), "a")
	shed := cfg
	shed.MaxBytes, shed.WhenFull = 500_000, Shed
	s := role(t, shed)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	const records, rows = 9, 150
	all := ids(6)
	sum, err := s.Publish(ctx, &testSource{mem: mem, ids: all, records: records, rows: rows})
	if err != nil {
		t.Fatal(err)
	}
	if sum.Published != 1 || sum.Rows != records*rows || sum.Shed != 5 || sum.ShedRows != 5*records*rows {
		t.Errorf("published %d with %d rows, shed %d with %d; want 1 and 5", sum.Published, sum.Rows, sum.Shed, sum.ShedRows)
	}
	if n, shedRows, err := s.Shed(ctx); err != nil || n != sum.Shed || shedRows != sum.ShedRows {
		t.Errorf("the server says %d of %d rows were shed: %v", n, shedRows, err)
	}
	if have, err := s.Published(ctx); err != nil || len(have) != 1 {
		t.Errorf("%v are whole in the stream: %v", have, err)
	}
	given := 0
	stream, err := s.js.Stream(ctx, StreamName(cfg.Run, CaptureStream))
	if err == nil {
		err = s.eachHeader(ctx, stream, "", func(h header, _ uint64) {
			if h.kind == kindGivenUp && h.seq == all[1] {
				given++
			}
		})
	}
	if err != nil || given != 1 {
		t.Errorf("%d markers say that sequence %s was given up: %v", given, all[1], err)
	}

	// Readers take the attempt for no fault and for no sequence.
	var kept shelves
	var faults atomic.Int64
	cfg.Once, cfg.OnFault = true, func(Fault) { faults.Add(1) }
	var g errgroup.Group
	g.Go(func() error { return role(t, cfg).Store(ctx, kept.sink) })
	g.Go(func() error { return role(t, cfg).Work(ctx, "a", stages(memory.NewGoAllocator(), nil)) })
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if n := faults.Load(); n != 0 {
		t.Errorf("%d faults", n)
	}
	capture, results := want(all[:1], records, rows)
	kept.of("").check(t, CaptureStream, capture)
	kept.of("a").check(t, ResultsStream, results)
}

// A reader lets go of a given-up attempt at once: held to the end of the run,
// it would hold the room of the stream too.
func TestAGivenUpAttemptIsLetGoOfWithoutAFault(t *testing.T) {
	a := newAssembler("n")
	if v, _, _, _ := a.accept(header{kind: kindData, seq: "s", attempt: "n.1", rows: 1, digest: 7}); v != process {
		t.Fatalf("the first chunk: %v", v)
	}
	v, s, replaced, fault := a.accept(header{kind: kindGivenUp, seq: "s", attempt: "n.1"})
	if v != skip || s != nil || fault != nil || replaced == nil || replaced.attempt != "n.1" || len(a.open) != 0 {
		t.Errorf("the marker: %v, %v, %v, %v, open %v", v, s, replaced, fault, a.open)
	}
	if v, _, replaced, _ = a.accept(header{kind: kindGivenUp, seq: "s", attempt: "n.1"}); v != skip || replaced != nil {
		t.Errorf("the marker again: %v, %v", v, replaced)
	}
	a.accept(header{kind: kindData, seq: "s", attempt: "n.2", rows: 1, digest: 7})
	if _, _, replaced, _ = a.accept(header{kind: kindGivenUp, seq: "s", attempt: "n.1"}); replaced != nil || len(a.open) != 1 {
		t.Error("a marker of an older attempt took out the newer one")
	}
	h := header{kind: kindGivenUp, seq: "a b", attempt: "n.3"}
	got, err := parseHeader(h.marshal("r", ""))
	if err != nil || got.kind != h.kind || got.seq != h.seq || got.attempt != h.attempt {
		t.Errorf("read back %+v: %v", got, err)
	}
}
