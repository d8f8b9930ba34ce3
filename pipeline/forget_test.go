package pipeline

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sync/errgroup"
)

// faultsOf collects faults.
type faultsOf struct {
	mu   sync.Mutex
	list []Fault
}

func (f *faultsOf) add(fault Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = append(f.list, fault)
}

// readAll stores the run, and drafts on it as group a.
func readAll(t *testing.T, cfg Config, kept *shelves) []Fault {
	t.Helper()
	var faults faultsOf
	cfg.OnFault = faults.add
	var g errgroup.Group
	g.Go(func() error { return role(t, cfg).Store(t.Context(), kept.sink) })
	g.Go(func() error { return role(t, cfg).Work(t.Context(), "a", stages(memory.NewGoAllocator(), nil)) })
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	return faults.list
}

func TestADeletedSequenceIsNotCalledMissing(t *testing.T) {
	for _, when := range []string{"before it is read", "after it was read"} {
		t.Run(when, func(t *testing.T) {
			mem := checked(t)
			srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
			cfg := roleConfig(srv.ClientURL())
			cfg.Partitions = 2
			all := ids(8)
			s := role(t, cfg)
			group(t, s, "a")
			if _, err := s.Publish(t.Context(), &testSource{mem: mem, ids: all, records: 3, rows: 40}); err != nil {
				t.Fatal(err)
			}
			var kept shelves
			if when == "after it was read" {
				if faults := readAll(t, cfg, &kept); len(faults) > 0 {
					t.Fatalf("%+v", faults)
				}
			}
			d, err := s.Delete(t.Context(), all[3])
			if err != nil {
				t.Fatal(err)
			}
			left, streams := all, 2
			if when == "before it is read" {
				left, streams = slices.Delete(slices.Clone(all), 3, 4), 1
			}
			if len(d.Streams) != streams || d.Messages < 4*streams {
				t.Errorf("%+v, want messages of %d streams", d, streams)
			}
			if faults := readAll(t, cfg, &kept); len(faults) > 0 {
				t.Errorf("%+v", faults)
			}
			capture, results := want(left, 3, 40)
			kept.of("").check(t, CaptureStream, capture)
			kept.of("a").check(t, ResultsStream, results)

			if list, err := s.Deleted(t.Context()); err != nil || !slices.Equal(list, all[3:4]) {
				t.Errorf("deleted %q, %v", list, err)
			}
			published, err := s.Published(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			delete(published, all[3]) // a store may have had it
			if len(published) != 7 {
				t.Errorf("%d published", len(published))
			}
			if _, err := s.Delete(t.Context(), all[3]); !errors.Is(err, ErrNoSequence) {
				t.Errorf("again: %v", err)
			}
			if _, err := s.Delete(t.Context(), "nobody"); !errors.Is(err, ErrNoSequence) {
				t.Errorf("an unknown one: %v", err)
			}
		})
	}
}

// Another one that is missing still is.
func TestOneDeletedSequenceHidesNoOther(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	cfg.Partitions = 1
	all := ids(5)
	s := role(t, cfg)
	group(t, s, "a")
	if _, err := s.Publish(t.Context(), &testSource{mem: mem, ids: all, records: 1, rows: 10}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Delete(t.Context(), all[1]); err != nil {
		t.Fatal(err)
	}
	// Its messages go without a word, as by an age limit.
	stream, err := s.js.Stream(t.Context(), StreamName("r", CaptureStream))
	if err != nil {
		t.Fatal(err)
	}
	numbers, _, err := s.messagesOf(t.Context(), route{run: "r", stream: CaptureStream}, 0, all[2])
	if err != nil || len(numbers) != 2 {
		t.Fatalf("%v, %v", numbers, err)
	}
	for _, n := range numbers {
		if err := stream.DeleteMsg(t.Context(), n); err != nil {
			t.Fatal(err)
		}
	}
	var kept shelves
	faults := readAll(t, cfg, &kept)
	if len(faults) == 0 || faults[0].Check != "missing" {
		t.Errorf("%+v, want one that is missing", faults)
	}
}

// What a store has and the stream has not is still known to a source.
func TestAResumedSourceKnowsWhatWasStoredAndPurged(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	s := role(t, cfg)
	if _, err := s.Publish(t.Context(), &testSource{mem: mem, ids: ids(9), records: 2, rows: 20}); err != nil {
		t.Fatal(err)
	}
	var kept shelves
	if err := role(t, cfg).Store(t.Context(), kept.sink); err != nil {
		t.Fatal(err)
	}
	if live, err := s.Live(t.Context()); err != nil || !slices.Equal(live, []string{"r"}) {
		t.Errorf("live: %q, %v", live, err)
	}
	if err := s.DeleteStreams(t.Context()); err != nil {
		t.Fatal(err)
	}
	if live, err := s.Live(t.Context()); err != nil || len(live) > 0 {
		t.Errorf("live: %q, %v", live, err)
	}
	have, err := s.Published(t.Context())
	if err != nil || len(have) != 9 {
		t.Fatalf("%v, %v; want 9", have, err)
	}
	for id, p := range have {
		if p != Partition(id, 4) {
			t.Errorf("%s is said to be of partition %d", id, p)
		}
	}
}

// Somebody deletes a stream, or a server comes back without its store.
func TestAStreamThatIsGoneIsSaidInWords(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	cfg.OutageTimeout = 3 * time.Second
	s := role(t, cfg)
	src := &testSource{mem: mem, ids: ids(60), records: 3, rows: 40}
	src.onNext = func(seq string, rec int) error {
		if seq == src.ids[20] && rec == 0 {
			return s.DeleteStreams(context.Background())
		}
		return nil
	}
	if _, err := s.Publish(t.Context(), src); !errors.Is(err, ErrStreamGone) {
		t.Errorf("a source: %v", err)
	}
	sh, _ := openShelf("")
	src = &testSource{mem: checked(t), ids: ids(60), records: 3, rows: 40, onNext: src.onNext}
	if _, err := s.Run(t.Context(), src, stages(memory.NewGoAllocator(), nil), sh.sink); !errors.Is(err, ErrStreamGone) {
		t.Errorf("a job: %v", err)
	}
}

// A group whose workers never come back holds a run up until it is forgotten.
func TestAForgottenGroupIsNotWaitedFor(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	s := role(t, cfg)
	group(t, s, "a")
	group(t, s, "gone")
	if _, err := s.Publish(t.Context(), &testSource{mem: mem, ids: ids(6), records: 2, rows: 20}); err != nil {
		t.Fatal(err)
	}
	var kept shelves
	ended := make(chan error, 1)
	go func() { ended <- role(t, cfg).Store(t.Context(), kept.sink) }()
	if err := role(t, cfg).Work(t.Context(), "a", stages(memory.NewGoAllocator(), nil)); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		t.Fatalf("the store did not wait for a group: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	if err := s.ForgetGroup(t.Context(), "nobody"); !errors.Is(err, ErrNoGroup) {
		t.Errorf("an unknown group: %v", err)
	}
	if err := s.ForgetGroup(t.Context(), "gone"); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	capture, results := want(ids(6), 2, 20)
	kept.of("").check(t, CaptureStream, capture)
	kept.of("a").check(t, ResultsStream, results)
}
