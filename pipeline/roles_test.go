package pipeline

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sync/errgroup"
)

// roleConfig is what the roles of one run share.
func roleConfig(url string) Config {
	return Config{
		Run: "r", URL: url, Partitions: 4, ChunkBytes: 2500, CommitSequences: 5, CommitIdle: 30 * time.Millisecond,
		LeaseTTL: time.Second, ConnectTimeout: 2 * time.Second, Once: true,
	}
}

// role opens a session and closes it at the end.
func role(t *testing.T, cfg Config) *Session {
	t.Helper()
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// shelves keeps what a store is given: one shelf for each group.
type shelves struct {
	mu  sync.Mutex
	all map[string]*shelf
}

func (s *shelves) of(group string) *shelf {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all == nil {
		s.all = map[string]*shelf{}
	}
	if s.all[group] == nil {
		s.all[group], _ = openShelf("")
	}
	return s.all[group]
}

func (s *shelves) sink(o Origin) (Sink, error) { return s.of(o.Group).sink(o.Stream, o.Partition) }

// group makes a group known, as a worker does before it works.
func group(t *testing.T, s *Session, name string) {
	t.Helper()
	if _, err := s.DescribeGroup(t.Context(), name, []byte("about "+name)); err != nil {
		t.Fatal(err)
	}
}

func TestRolesInSeparateSessionsDoWhatOneProcessDoes(t *testing.T) {
	for _, workers := range []int{1, 2, 4} {
		t.Run(strconv.Itoa(workers), func(t *testing.T) {
			mem := checked(t)
			srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
			cfg := roleConfig(srv.ClientURL())
			var kept shelves
			var g errgroup.Group
			var worked [4]int64
			first := role(t, cfg)
			group(t, first, "a")
			g.Go(func() error { return role(t, cfg).Store(t.Context(), kept.sink) })
			for i := range workers {
				s := role(t, cfg)
				g.Go(func() error {
					err := s.Work(t.Context(), "a", stages(mem, nil))
					worked[i] = s.Progress().Processed
					return err
				})
			}
			g.Go(func() error {
				src := &testSource{mem: mem, ids: ids(60), records: 3, rows: 40}
				src.onNext = func(string, int) error { time.Sleep(5 * time.Millisecond); return nil }
				sum, err := role(t, cfg).Publish(t.Context(), src)
				if err == nil && sum.Published != 60 {
					t.Errorf("published %d", sum.Published)
				}
				return err
			})
			if err := g.Wait(); err != nil {
				t.Fatal(err)
			}
			capture, results := want(ids(60), 3, 40)
			kept.of("").check(t, CaptureStream, capture)
			kept.of("a").check(t, ResultsStream, results)
			for i := range workers {
				if worked[i] == 0 {
					t.Errorf("worker %d of %d had nothing to do: %v", i, workers, worked)
				}
			}
		})
	}
}

func TestTwoGroupsOnOneRunDoNotDisturbEachOther(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	var kept shelves
	var g errgroup.Group
	groups := []string{"a", "a-1", "b_2"}
	for _, name := range groups {
		group(t, role(t, cfg), name)
		g.Go(func() error { return role(t, cfg).Work(t.Context(), name, stages(mem, nil)) })
	}
	g.Go(func() error {
		_, err := role(t, cfg).Publish(t.Context(), &testSource{mem: mem, ids: ids(20), records: 3, rows: 40})
		return err
	})
	g.Go(func() error {
		return role(t, cfg).Store(t.Context(), func(o Origin) (Sink, error) {
			if o.Group != "" && !bytes.Equal(o.About, []byte("about "+o.Group)) {
				return nil, fmt.Errorf("group %q is about %q", o.Group, o.About)
			}
			return kept.sink(o)
		})
	})
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	capture, results := want(ids(20), 3, 40)
	kept.of("").check(t, CaptureStream, capture)
	for _, name := range groups {
		kept.of(name).check(t, ResultsStream, results)
	}
}

// TestADeadWorkerIsReplacedAndAStoppedOneHandsOverAtOnce lets a worker vanish
// in the middle of a sequence (its connection ends, its leases stay), and
// another stop.
func TestADeadWorkerIsReplacedAndAStoppedOneHandsOverAtOnce(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	var kept shelves
	group(t, role(t, cfg), "a")
	if _, err := role(t, cfg).Publish(t.Context(), &testSource{mem: mem, ids: ids(30), records: 3, rows: 40}); err != nil {
		t.Fatal(err)
	}

	// The first one's process is taken for dead: it is cut off, and its
	// stages hang.
	dying := cfg
	dying.OutageTimeout = 200 * time.Millisecond
	stuck := make(chan struct{})
	cut := role(t, dying)
	var n atomic.Int32
	hang := stages(mem, func(string) error {
		if n.Add(1) == 8 {
			close(stuck)
			cut.nc.Close()
		}
		return nil
	})
	died := make(chan error, 1)
	go func() {
		one := cfg
		one.Partitions = 1
		died <- cut.Work(t.Context(), "a", hang)
	}()
	<-stuck
	if err := <-died; err == nil {
		t.Error("the worker without a server ended well")
	}

	drain := make(chan struct{})
	second := cfg
	second.Drain, second.Once, second.LeaseTTL = drain, false, 30*time.Second
	var once sync.Once
	start := time.Now()
	slow := stages(mem, func(string) error { once.Do(func() { close(drain) }); return nil })
	if err := role(t, second).Work(t.Context(), "a", slow); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("the dead one was replaced after %s", d)
	}
	cfg.LeaseTTL = 30 * time.Second
	start = time.Now()
	began := make(chan struct{})
	var begun sync.Once
	third := stages(mem, func(string) error { begun.Do(func() { close(began) }); return nil })
	var g errgroup.Group
	g.Go(func() error { return role(t, cfg).Work(t.Context(), "a", third) })
	<-began
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("the stopped one handed over after %s", d)
	}
	g.Go(func() error { return role(t, cfg).Store(t.Context(), kept.sink) })
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	capture, results := want(ids(30), 3, 40)
	kept.of("").check(t, CaptureStream, capture)
	kept.of("a").check(t, ResultsStream, results)
}

func TestAResumedSourceIsToldWhatIsPublished(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	broken := errors.New("broken")
	src := &testSource{mem: mem, ids: ids(10), records: 3, rows: 40}
	src.onNext = func(seq string, rec int) error {
		if seq == ids(10)[6] && rec == 2 {
			return broken
		}
		return nil
	}
	s := role(t, cfg)
	if _, err := s.Publish(t.Context(), src); !errors.Is(err, broken) {
		t.Fatal(err)
	}
	have, err := s.Published(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i, id := range ids(10) {
		if _, ok := have[id]; ok != (i < 6) {
			t.Errorf("sequence %s: published is %t", id, ok)
		}
	}
	if done, err := s.Stored(t.Context()); done || err != nil {
		t.Errorf("a run without its end counts as stored: %t, %v", done, err)
	}
}

func TestASourceThatIsStoppedEarlyHasNotEnded(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	var kept shelves
	drain := make(chan struct{})
	close(drain)
	early := cfg
	early.Drain = drain
	src := &testSource{mem: mem, ids: ids(10), records: 3, rows: 40}
	if sum, err := role(t, early).Publish(t.Context(), src); err != nil || !sum.Drained {
		t.Fatal(sum, err)
	}
	s := role(t, cfg)
	stored := make(chan error, 1)
	go func() { stored <- s.Store(t.Context(), kept.sink) }()
	select {
	case err := <-stored:
		t.Fatalf("the store ended before its source: %v", err)
	case <-time.After(time.Second):
	}
	if _, err := role(t, cfg).Publish(t.Context(), src); err != nil {
		t.Fatal(err)
	}
	if err := <-stored; err != nil {
		t.Fatal(err)
	}
	capture, _ := want(ids(10), 3, 40)
	kept.of("").check(t, CaptureStream, capture)
}

func TestAFullStreamShedsWholeSequencesAndCountsThem(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	cfg.MaxBytes, cfg.WhenFull = 400<<10, Shed
	s := role(t, cfg)
	sum, err := s.Publish(t.Context(), &testSource{mem: mem, ids: ids(60), records: 3, rows: 40})
	if err != nil {
		t.Fatal(err)
	}
	if sum.Shed == 0 || sum.Published+sum.Shed != 60 || sum.ShedRows != sum.Shed*120 {
		t.Errorf("published %d, shed %d with %d rows", sum.Published, sum.Shed, sum.ShedRows)
	}
	if n, rows, err := s.Shed(t.Context()); err != nil || n != sum.Shed || rows != sum.ShedRows {
		t.Errorf("the server says %d of %d rows were shed: %v", n, rows, err)
	}
	have, err := s.Published(t.Context())
	if err != nil || int64(len(have)) != sum.Published {
		t.Errorf("%d are whole in the stream, want %d: %v", len(have), sum.Published, err)
	}
}

func TestABlockedSourceGoesOnWhenAllReadersHaveRead(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	cfg.MaxBytes = 400 << 10
	var kept shelves
	var g errgroup.Group
	group(t, role(t, cfg), "a")
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	src := role(t, cfg)
	g.Go(func() error {
		_, err := src.Publish(ctx, &testSource{mem: mem, ids: ids(80), records: 3, rows: 40})
		return err
	})
	for p := int64(-1); p != src.Progress().Published; time.Sleep(300 * time.Millisecond) {
		p = src.Progress().Published // until it is blocked
	}
	if n := src.Progress().Published; n >= 80 || n == 0 {
		t.Fatalf("%d sequences fit without a reader", n)
	}
	g.Go(func() error { return role(t, cfg).Store(ctx, kept.sink) })
	time.Sleep(500 * time.Millisecond)
	if n := src.Progress().Published; n >= 80 {
		t.Errorf("the store alone made room, and the group had not read")
	}
	g.Go(func() error { return role(t, cfg).Work(ctx, "a", stages(memory.NewGoAllocator(), nil)) })
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	capture, results := want(ids(80), 3, 40)
	kept.of("").check(t, CaptureStream, capture)
	kept.of("a").check(t, ResultsStream, results)
}
