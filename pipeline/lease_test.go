package pipeline

import (
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sync/errgroup"
)

// TestAWorkerThatLostItsPartitionIsRefusedByTheServer holds a worker in the
// middle of a sequence, as if it were frozen, and lets it go on after another
// has drafted on everything: no lease stops it, only the server.
func TestAWorkerThatLostItsPartitionIsRefusedByTheServer(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	cfg.Partitions = 1
	var kept shelves
	group(t, role(t, cfg), "a")
	if _, err := role(t, cfg).Publish(t.Context(), &testSource{mem: mem, ids: ids(12), records: 3, rows: 40}); err != nil {
		t.Fatal(err)
	}
	frozen, thaw := make(chan struct{}), make(chan struct{})
	n := 0
	stage, err := stages(mem, func(string) error {
		if n++; n == 8 { // the second record of the third sequence
			close(frozen)
			<-thaw
		}
		return nil
	})(0)
	if err != nil {
		t.Fatal(err)
	}
	old := &crew{Session: role(t, cfg), group: "a", partitions: 1}
	result := make(chan error, 1)
	go func() { result <- old.work(t.Context(), nil, 0, stage) }()
	<-frozen
	if err := role(t, cfg).Work(t.Context(), "a", stages(mem, nil)); err != nil {
		t.Fatal(err)
	}
	close(thaw)
	if err := <-result; !errors.Is(err, ErrAnotherWriter) {
		t.Errorf("the old worker ended with %v", err)
	}
	if err := role(t, cfg).Store(t.Context(), kept.sink); err != nil {
		t.Fatal(err)
	}
	capture, results := want(ids(12), 3, 40)
	kept.of("").check(t, CaptureStream, capture)
	kept.of("a").check(t, ResultsStream, results)
}

func TestALeaseIsOnesAtATime(t *testing.T) {
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	var books [2]*leases
	for i, id := range []string{"one", "two"} {
		var err error
		if books[i], err = role(t, cfg).openLeases(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	take := func(b *leases, want bool) *lease {
		t.Helper()
		l, err := b.acquire(t.Context(), "r.part")
		if err != nil || (l != nil) != want {
			t.Fatalf("taken: %t, want %t: %v", l != nil, want, err)
		}
		return l
	}
	first := take(books[0], true)
	take(books[1], false)
	take(books[0], true) // its own: the answer may have been lost
	for range 6 {
		time.Sleep(cfg.LeaseTTL / 4)
		if err := books[0].renew(t.Context(), first); err != nil {
			t.Fatal(err)
		}
	}
	take(books[1], false)
	if names, err := books[1].holders(t.Context(), "r"); err != nil || len(names) != 1 || names[0] != "part" {
		t.Errorf("holders %v, %v", names, err)
	}
	if err := books[0].release(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	second := take(books[1], true)
	if err := books[0].renew(t.Context(), first); !errors.Is(err, errLeaseLost) {
		t.Errorf("a lease that was given up is renewed: %v", err)
	}
	if err := books[0].release(t.Context(), first); err == nil {
		t.Error("another's lease was given up")
	}
	start := time.Now() // the second one dies
	for time.Since(start) < 4*cfg.LeaseTTL {
		if l, err := books[0].acquire(t.Context(), "r.part"); err == nil && l != nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if d := time.Since(start); d > 3*cfg.LeaseTTL || d < cfg.LeaseTTL/2 {
		t.Errorf("a dead one's lease ran out after %s", d)
	}
	if err := books[1].renew(t.Context(), second); !errors.Is(err, errLeaseLost) {
		t.Errorf("an expired lease is renewed: %v", err)
	}
}

func TestTwoStoresOfOneRunTakeTurns(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := roleConfig(srv.ClientURL())
	var g errgroup.Group
	var kept shelves // of both: it knows what it has
	for range 2 {
		g.Go(func() error { return role(t, cfg).Store(t.Context(), kept.sink) })
	}
	g.Go(func() error {
		_, err := role(t, cfg).Publish(t.Context(), &testSource{mem: mem, ids: ids(12), records: 3, rows: 40})
		return err
	})
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	capture, _ := want(ids(12), 3, 40)
	kept.of("").check(t, CaptureStream, capture)
	if n := kept.of("").repeats; n > 0 {
		t.Errorf("%d sequences were stored by both", n)
	}
}
