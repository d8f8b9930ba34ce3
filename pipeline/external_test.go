package pipeline

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
)

// external starts a NATS server on a loopback port, as a user would.
func external(t *testing.T, opts server.Options) *server.Server {
	t.Helper()
	opts.Host, opts.NoSigs, opts.NoLog = "127.0.0.1", true, true
	if opts.Port == 0 {
		opts.Port = server.RANDOM_PORT
	}
	srv, err := server.NewServer(&opts)
	if err != nil {
		t.Fatal(err)
	}
	go srv.Start()
	if !srv.ReadyForConnections(20 * time.Second) {
		t.Fatal("the server did not start")
	}
	t.Cleanup(func() { stop(srv) })
	return srv
}

func stop(srv *server.Server) {
	srv.Shutdown()
	srv.WaitForShutdown()
}

func TestAnUnreachableServerIsAClearErrorInBoundedTime(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for name, url := range map[string]string{"closed port": "nats://user:secret@127.0.0.1:1", "silent": "nats://" + silent.Addr().String()} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			_, err := Open(t.Context(), Config{Run: "r", URL: url, ConnectTimeout: 300 * time.Millisecond})
			if !errors.Is(err, ErrNoServer) || !strings.Contains(err.Error(), "start one with JetStream enabled, correct --nats, or, with run and capture, use --nats embedded") {
				t.Errorf("got %v", err)
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("the password is in %v", err)
			}
			if d := time.Since(start); d > 10*time.Second {
				t.Errorf("it took %s", d)
			}
		})
	}
}

func TestAServerWithoutJetStreamIsAClearError(t *testing.T) {
	srv := external(t, server.Options{})
	if _, err := Open(t.Context(), Config{Run: "r", URL: srv.ClientURL()}); !errors.Is(err, ErrNoJetStream) || !strings.Contains(err.Error(), "-js") {
		t.Errorf("got %v", err)
	}
}

func TestChunksLargerThanTheServerTakesAreRefusedAtStart(t *testing.T) {
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir(), MaxPayload: 16 << 10})
	if _, err := Open(t.Context(), Config{Run: "r", URL: srv.ClientURL(), ChunkBytes: 1 << 20}); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "max_payload") {
		t.Errorf("got %v", err)
	}
	sh, _ := openShelf("")
	mem := checked(t)
	src := &testSource{mem: mem, ids: []string{strings.Repeat("x", 200)}, records: 1, rows: 300}
	if _, err := Run(t.Context(), Config{Run: "r", URL: srv.ClientURL()}, src, nil, sh.sink); err != nil {
		t.Errorf("the default does not fit: %v", err)
	}
}

// TestARestartOfTheServerMidRunLosesNothing restarts it, once with the same
// limits and once with a smaller max_payload, so that what was cut for the
// old one has to be cut again.
func TestARestartOfTheServerMidRunLosesNothing(t *testing.T) {
	for name, limits := range map[string][2]int32{"same": {64 << 10, 64 << 10}, "smaller payload": {64 << 10, 8 << 10}} {
		t.Run(name, func(t *testing.T) {
			mem := checked(t)
			opts := server.Options{JetStream: true, StoreDir: t.TempDir(), MaxPayload: limits[0]}
			srv := external(t, opts)
			opts.Port = srv.Addr().(*net.TCPAddr).Port
			sh, _ := openShelf("")
			src := &testSource{mem: mem, ids: ids(24), records: 3, rows: 200}
			restarts := 0
			src.onNext = func(seq string, rec int) error {
				if (seq == ids(24)[6] || seq == ids(24)[15]) && rec == 1 {
					stop(srv) // with a window full of messages in flight
					opts.MaxPayload = limits[1]
					srv = external(t, opts)
					restarts++
				}
				return nil
			}
			cfg := Config{Run: "r", URL: srv.ClientURL(), Allocator: mem, CommitSequences: 4, CommitIdle: 50 * time.Millisecond, ConnectTimeout: time.Second}
			sum, err := Run(t.Context(), cfg, src, stages(mem, nil), sh.sink)
			if err != nil {
				t.Fatal(err)
			}
			capture, results := want(ids(24), 3, 200)
			sh.check(t, CaptureStream, capture)
			sh.check(t, ResultsStream, results)
			if restarts != 2 || sum.Stored < 24 || sum.Faults != 0 {
				t.Errorf("%d restarts, summary %+v", restarts, sum)
			}
		})
	}
}

func TestAServerThatStaysAwayEndsTheRun(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	sh, _ := openShelf("")
	src := &testSource{mem: mem, ids: ids(5), records: 2, rows: 5}
	src.onNext = func(seq string, rec int) error {
		if seq == ids(5)[3] && rec == 0 {
			stop(srv)
		}
		return nil
	}
	start := time.Now()
	_, err := Run(t.Context(), Config{Run: "r", URL: srv.ClientURL(), OutageTimeout: time.Second}, src, nil, sh.sink)
	if err == nil || time.Since(start) > 20*time.Second {
		t.Errorf("got %v after %s", err, time.Since(start))
	}
}

func TestOfTwoProcessesOnOneRunOneStops(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	cfg := Config{Run: "r", URL: srv.ClientURL(), Allocator: mem}
	sh, _ := openShelf("")
	other, _ := openShelf("")
	src := &testSource{mem: mem, ids: ids(10), records: 2, rows: 5}
	src.onNext = func(seq string, rec int) error {
		if seq == ids(10)[4] && rec == 1 {
			second := &testSource{mem: mem, ids: ids(10), records: 2, rows: 5}
			if _, err := Run(t.Context(), cfg, second, nil, other.sink); err != nil {
				t.Errorf("the second: %v", err)
			}
		}
		return nil
	}
	if _, err := Run(t.Context(), cfg, src, nil, sh.sink); !errors.Is(err, ErrAnotherWriter) {
		t.Errorf("the first: %v", err)
	}
	capture, _ := want(ids(10), 2, 5)
	other.check(t, CaptureStream, capture)
}

func TestAnExternalServerKeepsTheStreamsForOthersToRead(t *testing.T) {
	mem := checked(t)
	srv := external(t, server.Options{JetStream: true, StoreDir: t.TempDir()})
	s, err := Open(t.Context(), Config{Run: "r", URL: srv.ClientURL(), Partitions: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	sh, _ := openShelf("")
	src := &testSource{mem: mem, ids: ids(3), records: 2, rows: 5}
	if _, err := s.Run(t.Context(), src, stages(mem, nil), sh.sink); err != nil {
		t.Fatal(err)
	}
	stream, err := s.js.Stream(t.Context(), StreamName("r", CaptureStream))
	if err != nil {
		t.Fatal(err)
	}
	cons, err := stream.OrderedConsumer(t.Context(), jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var kinds []string
	for range 11 {
		m, err := cons.Next(jetstream.FetchContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		h, err := parseHeader(m.Headers())
		if err != nil {
			t.Fatal(err)
		}
		kinds = append(kinds, string(h.kind))
		if h.kind == kindData {
			if n := headerBytes(m.Headers()); n%64 != 0 {
				t.Errorf("a stored header has %d bytes", n)
			}
			rec, err := newDecoder(mem).decode(h, m.Data())
			if err != nil {
				t.Fatal(err)
			}
			rec.Release()
		}
	}
	if got := strings.Join(kinds, " "); got != "begin data data end data data end data data end end-of-run" {
		t.Errorf("stream holds %s", got)
	}
}
