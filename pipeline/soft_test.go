package pipeline

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sync/errgroup"
)

// The sinks would never commit by themselves: a full stream asks them to.
func TestASoftLimitHoldsAndCommitsOnDemand(t *testing.T) {
	mem := checked(t)
	sh, _ := openShelf("")
	cfg := Config{
		Run: "r", Dir: t.TempDir(), Allocator: mem, SoftBytes: 200_000, ChunkBytes: 8000, Keep: KeepAlways,
		CommitBytes: 1 << 40, CommitSequences: 1 << 30, CommitIdle: time.Hour,
	}
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var most uint64
	src := &testSource{mem: mem, ids: ids(40), records: 2, rows: 150, onNext: func(string, int) error {
		info, err := s.js.Stream(context.Background(), StreamName("r", CaptureStream))
		if err == nil {
			most = max(most, info.CachedInfo().State.Bytes)
		}
		return err
	}}
	sum, err := s.Run(t.Context(), src, stages(mem, nil), sh.sink)
	if err != nil {
		t.Fatal(err)
	}
	if sum.Bytes < 4*cfg.SoftBytes || most > uint64(cfg.SoftBytes) {
		t.Errorf("%d bytes went through, the stream held %d at most", sum.Bytes, most)
	}
	if sh.commits >= 80 {
		t.Errorf("%d commits of 40 sequences in two streams", sh.commits)
	}
	capture, results := want(ids(40), 2, 150)
	sh.check(t, CaptureStream, capture)
	sh.check(t, ResultsStream, results)
}

func TestASequenceLargerThanASoftLimitPasses(t *testing.T) {
	mem := checked(t)
	sh, _ := openShelf("")
	cfg := Config{Run: "r", Dir: t.TempDir(), Allocator: mem, SoftBytes: 50_000, ChunkBytes: 8000, CommitIdle: time.Hour}
	sum, err := Run(t.Context(), cfg, &testSource{mem: mem, ids: ids(5), records: 10, rows: 150}, stages(mem, nil), sh.sink)
	if err != nil {
		t.Fatal(err)
	}
	if sum.Bytes < 15*cfg.SoftBytes {
		t.Errorf("only %d bytes were published", sum.Bytes)
	}
	capture, results := want(ids(5), 10, 150)
	sh.check(t, CaptureStream, capture)
	sh.check(t, ResultsStream, results)
}

// What a server's note says is what sources and workers keep to, and a store
// commits for a source that waits elsewhere.
func TestRolesKeepToTheSoftLimitOfTheirServer(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	cfg.ChunkBytes = 8000
	if err := role(t, cfg).NoteSoftBytes(t.Context(), 200_000); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	group(t, role(t, cfg), "a")
	var kept shelves
	var g errgroup.Group
	var most uint64
	src := role(t, cfg)
	g.Go(func() error {
		_, err := src.Publish(ctx, &testSource{mem: mem, ids: ids(12), records: 3, rows: 150, onNext: func(string, int) error {
			info, err := src.js.Stream(ctx, StreamName(cfg.Run, CaptureStream))
			if err == nil {
				most = max(most, info.CachedInfo().State.Bytes)
			}
			return err
		}})
		return err
	})
	store := cfg
	store.CommitBytes, store.CommitSequences, store.CommitIdle = 1<<40, 1<<30, time.Hour
	store.Once = true
	g.Go(func() error { return role(t, store).Store(ctx, kept.sink) })
	work := cfg
	work.Once = true
	g.Go(func() error { return role(t, work).Work(ctx, "a", stages(memory.NewGoAllocator(), nil)) })
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if most == 0 || most > 250_000 {
		t.Errorf("the stream held %d bytes", most)
	}
	capture, results := want(ids(12), 3, 150)
	kept.of("").check(t, CaptureStream, capture)
	kept.of("a").check(t, ResultsStream, results)
}

func TestAnUnreadableNoteOfTheSoftLimitIsSaid(t *testing.T) {
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	s := role(t, roleConfig(srv.ClientURL()))
	kv, err := s.notes(t.Context())
	if err == nil {
		_, err = kv.Put(t.Context(), softKey, []byte("much"))
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Publish(t.Context(), &testSource{}); !errors.Is(err, ErrConfig) {
		t.Errorf("got %v", err)
	}
}
