package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// serverLog routes the embedded server's log. What it calls a notice is
// debug talk to us, and its errors are information: whoever they concern gets
// one of ours.
type serverLog struct {
	log     *slog.Logger
	trouble *trouble
}

// trouble is the first error after which a server takes nothing any more. It
// has no other way of saying it than its log.
type trouble struct{ said atomic.Pointer[string] }

// err is nil while all is well.
func (t *trouble) err() error {
	if t == nil || t.said.Load() == nil {
		return nil
	}
	return fmt.Errorf("%w: %s; if its disk is full, free some space, and start it again: what is stored is kept", ErrServerFailed, *t.said.Load())
}

func (l serverLog) Noticef(format string, v ...any) { l.log.Debug(fmt.Sprintf(format, v...)) }
func (l serverLog) Warnf(format string, v ...any)   { l.log.Info(fmt.Sprintf(format, v...)) }
func (l serverLog) Errorf(format string, v ...any)  { l.failed(fmt.Sprintf(format, v...)) }
func (l serverLog) Fatalf(format string, v ...any)  { l.log.Error(fmt.Sprintf(format, v...)) }
func (l serverLog) Debugf(string, ...any)           {}
func (l serverLog) Tracef(string, ...any)           {}

func (l serverLog) failed(text string) {
	l.log.Warn(text)
	if strings.Contains(text, "critical write error") || strings.Contains(text, "will be DISABLED") {
		l.trouble.said.CompareAndSwap(nil, &text)
	}
}

// Server is a JetStream server in this process that others can reach too.
type Server struct {
	srv     *server.Server
	trouble *trouble
	unlock  func() error
}

// StartServer runs a server that listens on host:port, port 0 for any free
// one. Of cfg it takes Dir, MaxPayload, SyncAlways and Logger.
func StartServer(cfg Config, listen string) (*Server, error) {
	cfg = cfg.withDefaults()
	host, port, err := net.SplitHostPort(listen)
	number, perr := strconv.Atoi(port)
	if err != nil || perr != nil || number < 0 || number > 65535 || cfg.Dir == "" {
		return nil, fmt.Errorf("%w: a server listens on HOST:PORT, such as 127.0.0.1:4222, and has a directory; not on %q", ErrConfig, listen)
	}
	if number == 0 {
		number = server.RANDOM_PORT
	}
	probe, err := net.Listen("tcp", listen) // the server would only log it
	if err != nil {
		return nil, fmt.Errorf("%w: listening on %s: %w", ErrNoServer, listen, err)
	}
	probe.Close()
	unlock, err := lockStore(cfg.Dir)
	if err != nil {
		return nil, err
	}
	srv, trouble, err := startServer(cfg, host, number)
	if err != nil {
		return nil, errors.Join(err, unlock())
	}
	return &Server{srv, trouble, unlock}, nil
}

// URL is where the server is reached.
func (s *Server) URL() string { return s.srv.ClientURL() }

// Close stops the server. What its streams hold stays in its store.
func (s *Server) Close() error {
	s.srv.Shutdown()
	s.srv.WaitForShutdown()
	if err := s.unlock(); err != nil {
		return fmt.Errorf("closing the stream store: %w", err)
	}
	return nil
}

// startServer runs a JetStream server in this process. Without a host it opens
// no port.
func startServer(cfg Config, host string, port int) (*server.Server, *trouble, error) {
	srv, err := server.NewServer(&server.Options{
		ServerName:         "draftscope",
		DontListen:         host == "",
		Host:               host,
		Port:               port,
		NoSigs:             true,
		JetStream:          true,
		StoreDir:           cfg.Dir,
		JetStreamMaxMemory: 64 << 20,
		JetStreamMaxStore:  cfg.storeLimit,
		SyncAlways:         cfg.SyncAlways,
		MaxPayload:         int32(cfg.MaxPayload),
		MaxPending:         64 << 20,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("setting up the embedded NATS server: %w", err)
	}
	log := serverLog{cfg.Logger.With("part", "nats-server"), new(trouble)}
	srv.SetLoggerV2(log, false, false, false)
	go srv.Start()
	if !srv.ReadyForConnections(30 * time.Second) {
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil, nil, fmt.Errorf("%w: the embedded one did not start on %s", ErrNoServer, cfg.Dir)
	}
	if !srv.JetStreamEnabled() {
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil, nil, fmt.Errorf("%w on the embedded server: its store %s could not be opened", ErrNoJetStream, cfg.Dir)
	}
	return srv, log.trouble, nil
}

// redacted is a list of server URLs without passwords.
func redacted(urls string) string {
	parts := strings.Split(urls, ",")
	for i, p := range parts {
		if u, err := url.Parse(strings.TrimSpace(p)); err == nil && u.User != nil {
			parts[i] = u.Redacted()
		}
	}
	return strings.Join(parts, ",")
}

// connect reaches a server, in this process when srv is set, and makes sure
// that it has JetStream.
func connect(ctx context.Context, cfg Config, srv *server.Server, reconnected func()) (*nats.Conn, jetstream.JetStream, error) {
	where := redacted(cfg.URL)
	opts := []nats.Option{
		nats.Name("draftscope " + cfg.Run),
		nats.Timeout(cfg.ConnectTimeout),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(200 * time.Millisecond),
		nats.ReconnectJitter(50*time.Millisecond, 50*time.Millisecond),
		// Nothing may be sent behind our back after an outage: what is to be
		// sent again, and in which cut, is decided by the publisher.
		nats.ReconnectBufSize(-1),
		nats.ReconnectHandler(func(*nats.Conn) { reconnected() }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				cfg.Logger.Warn("NATS server lost, trying again", "url", where, "error", err)
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			cfg.Logger.Debug("NATS connection", "error", err)
		}),
	}
	target := cfg.URL
	if srv != nil {
		target = ""
		opts = append(opts, nats.InProcessServer(srv))
	}
	nc, err := dial(ctx, cfg.ConnectTimeout, target, opts)
	if err != nil {
		return nil, nil, fmt.Errorf("%w at %s: %w; start one with JetStream enabled, correct --nats, or, with run and capture, use --nats embedded", ErrNoServer, where, err)
	}
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncTimeout(cfg.ackTimeout), jetstream.WithDefaultTimeout(cfg.ConnectTimeout))
	if err == nil {
		err = askJetStream(ctx, cfg, nc, js)
	}
	switch {
	case err == nil:
		return nc, js, nil
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount), errors.Is(err, nats.ErrNoResponders):
		err = fmt.Errorf("%w on the NATS server at %s; start it with -js (and a store_dir), or use --nats embedded", ErrNoJetStream, where)
	default:
		err = fmt.Errorf("asking the NATS server at %s for JetStream: %w", where, err)
	}
	nc.Close()
	return nil, nil, err
}

// askJetStream makes sure that JetStream answers. A cluster that is electing
// its leader is given time.
func askJetStream(ctx context.Context, cfg Config, nc *nats.Conn, js jetstream.JetStream) error {
	for start := time.Now(); ; {
		ask, cancel := context.WithTimeout(ctx, cfg.ConnectTimeout)
		_, err := js.AccountInfo(ask)
		cancel()
		electing := nc.ConnectedClusterName() != "" && (errors.Is(err, context.DeadlineExceeded) || apiCode(err) == codeClusterNotAvail)
		if !electing || ctx.Err() != nil || time.Since(start) > cfg.OutageTimeout {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// dial connects within the timeout, which nats.Connect alone does not promise
// for every address.
func dial(ctx context.Context, timeout time.Duration, target string, opts []nats.Option) (*nats.Conn, error) {
	type result struct {
		nc  *nats.Conn
		err error
	}
	done := make(chan result, 1)
	go func() {
		nc, err := nats.Connect(target, opts...)
		done <- result{nc, err}
	}()
	timer := time.NewTimer(timeout + time.Second)
	defer timer.Stop()
	abandon := func() { // the connection that may still come is closed
		go func() {
			if r := <-done; r.nc != nil {
				r.nc.Close()
			}
		}()
	}
	select {
	case r := <-done:
		return r.nc, r.err
	case <-timer.C:
		abandon()
		return nil, fmt.Errorf("no answer in %s", timeout)
	case <-ctx.Done():
		abandon()
		return nil, context.Cause(ctx)
	}
}
