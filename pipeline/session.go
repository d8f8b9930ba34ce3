package pipeline

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Session is a connection to the server of a run, and the server itself when
// it is the embedded one. Open it before anything expensive is started: it
// fails early. One Run at a time; Progress may be called from anywhere.
type Session struct {
	cfg     Config
	unlock  func() error
	srv     *server.Server
	trouble *trouble // of a server in this process; nil for another
	nc      *nats.Conn
	js      jetstream.JetStream
	closed  chan struct{} // the connection's last callback was made

	progress atomic.Pointer[counters]
	away     atomic.Int64 // since when the server was seen to be away, unix nanoseconds

	mu   sync.Mutex
	lost chan struct{} // closed at each reconnect, and replaced
}

// Open starts or reaches the server. The error wraps [ErrConfig],
// [ErrNoServer], [ErrNoJetStream] or [ErrStoreInUse].
func Open(ctx context.Context, cfg Config) (*Session, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Session{cfg: cfg.withDefaults(), unlock: func() error { return nil }, lost: make(chan struct{}), closed: make(chan struct{})}
	s.progress.Store(new(counters))
	local := s.cfg.Server
	if local == nil && s.cfg.URL == Embedded {
		unlock, err := lockStore(s.cfg.Dir)
		if err != nil {
			return nil, err
		}
		s.unlock = unlock
		if s.srv, s.trouble, err = startServer(s.cfg, "", 0); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	inProcess := s.srv
	if local != nil {
		inProcess, s.trouble = local.srv, local.trouble
	}
	var err error
	if s.nc, s.js, err = connect(ctx, s.cfg, inProcess, s.onReconnect); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	s.nc.SetClosedHandler(func(*nats.Conn) { close(s.closed) })
	limit := s.nc.MaxPayload()
	if limit < minPayload || int64(s.cfg.ChunkBytes) > limit {
		err := fmt.Errorf("%w: the server takes messages of %d bytes (max_payload), chunks of %d were asked for; raise the one or lower the other",
			ErrConfig, limit, max(s.cfg.ChunkBytes, minPayload))
		return nil, errors.Join(err, s.Close())
	}
	if s.cfg.ChunkBytes > 8<<20 {
		s.cfg.Logger.Warn("chunks above 8 MiB slow the server down; 1 MB is best", "chunk_bytes", s.cfg.ChunkBytes)
	}
	return s, nil
}

func (s *Session) onReconnect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.lost)
	s.lost = make(chan struct{})
}

// outage is how long the server has been away; 0 while it is there.
func (s *Session) outage() time.Duration {
	if s.nc.IsConnected() {
		s.away.Store(0)
		return 0
	}
	now := time.Now().UnixNano()
	if !s.away.CompareAndSwap(0, now) {
		return time.Duration(now - s.away.Load())
	}
	return 0
}

// patiently calls ask again while the server is away, or a cluster elects.
func (s *Session) patiently(ctx context.Context, ask func(context.Context) error) error {
	patience := waiting{log: s.cfg.Logger}
	for start := time.Now(); ; {
		err := ask(ctx)
		if err == nil || !outage(err) || ctx.Err() != nil || time.Since(start) > s.cfg.OutageTimeout {
			return explained(err)
		}
		if err := s.trouble.err(); err != nil {
			return err
		}
		patience.tell("the server to answer: " + err.Error())
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// reconnected returns a channel that the next reconnect closes.
func (s *Session) reconnected() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

// Progress says how far the current or last run is.
func (s *Session) Progress() Progress { return s.progress.Load().snapshot() }

func (s *Session) counters() *counters { return s.progress.Load() }

// explain says so when the run's capture stream is gone: its readers and
// publishers only see that nobody answers, or that a consumer is not theirs.
func (s *Session) explain(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil || errors.Is(err, ErrStreamGone) {
		return err
	}
	if !errors.Is(err, jetstream.ErrStreamNotFound) && !errors.Is(err, ErrRefused) && !errors.Is(err, ErrAnotherWriter) && !outage(err) {
		return err
	}
	ask, cancel := context.WithTimeout(ctx, s.cfg.ConnectTimeout)
	defer cancel()
	if _, gone := s.js.Stream(ask, StreamName(s.cfg.Run, CaptureStream)); !errors.Is(gone, jetstream.ErrStreamNotFound) {
		return err
	}
	return fmt.Errorf("%w (%w)", ErrStreamGone, err)
}

// DeleteStreams forgets all that the run left in the server. What is not in a
// sink by then is lost.
func (s *Session) DeleteStreams(ctx context.Context) error {
	return deleteStreams(ctx, s.js, s.cfg.Run)
}

// Close disconnects and stops the embedded server. What the streams hold
// stays in its store.
func (s *Session) Close() error {
	if s.nc != nil {
		s.nc.Close()
		<-s.closed
		s.nc = nil
	}
	if s.srv != nil {
		s.srv.Shutdown()
		s.srv.WaitForShutdown()
		s.srv = nil
	}
	unlock := s.unlock
	s.unlock = func() error { return nil }
	if err := unlock(); err != nil {
		return fmt.Errorf("closing the stream store: %w", err)
	}
	return nil
}
