package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"
)

// Origin is one partition of one stream, as a sink sees it.
type Origin struct {
	Stream    string    // [CaptureStream] or [ResultsStream]
	Group     string    // of the workers, for results
	About     []byte    // what DescribeGroup was given
	Partition int       // number of the partition
	Name      string    // of the stream in JetStream
	Created   time.Time // when the server made the stream
}

// Store puts the run's captures, and the results of all groups of workers,
// into sinks. It waits for the run to begin, takes up groups as they appear,
// and goes on until [Config.Drain] is closed, ctx ends, a sink fails, or, with
// [Config.Once], until all that the source published, and every group's
// results of it, is stored. One process stores a run at a time, by a lease in
// the server; another one waits for its turn.
//
// newSink may refuse a group with an error that wraps [ErrDecline]: its
// results stay in the server.
func (s *Session) Store(ctx context.Context, newSink func(Origin) (Sink, error)) error {
	if n, err := s.await(ctx); n == 0 || err != nil {
		return err
	}
	if err := s.takeSoftBytes(ctx); err != nil {
		return err
	}
	id := newNonce()
	book, err := s.openLeases(ctx, id)
	if err != nil {
		return err
	}
	v := s.begin()
	for {
		v = s.invocation(v.progress) // its name is in the consumers' names
		held, err := s.turn(ctx, book)
		if held == nil || err != nil {
			return err
		}
		err = v.store(ctx, book, held, newSink)
		if !book.expired(held) {
			if rerr := book.release(context.WithoutCancel(ctx), held); rerr != nil {
				s.cfg.Logger.Debug("giving a lease back; it will run out", "key", held.key, "error", rerr)
			}
		}
		switch {
		case err == nil, errors.Is(err, errStopped):
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("store of run %s stopped: %w", s.cfg.Run, context.Cause(ctx))
		case errors.Is(err, errLeaseLost), errors.Is(err, ErrAnotherWriter):
			s.cfg.Logger.Warn("another process stores the run; waiting for it to end", "run", s.cfg.Run)
		default:
			return s.explain(ctx, err)
		}
	}
}

// turn waits for the lease; nil when told to drain before.
func (s *Session) turn(ctx context.Context, book *leases) (*lease, error) {
	waiting := false
	for {
		held, err := book.acquire(ctx, noteKey(s.cfg.Run, roleStore))
		if held != nil {
			return held, nil
		}
		if err != nil && !outage(err) && ctx.Err() == nil {
			return nil, err
		}
		if err := s.trouble.err(); err != nil {
			return nil, err
		}
		if s.outage() > s.cfg.OutageTimeout {
			return nil, fmt.Errorf("%w at %s for %s", ErrNoServer, redacted(s.cfg.URL), s.cfg.OutageTimeout)
		}
		if err == nil && !waiting {
			waiting = true
			s.cfg.Logger.Warn("another process stores the run, or did until a moment ago; waiting", "run", s.cfg.Run)
		}
		select {
		case <-time.After(s.cfg.LeaseTTL / 10):
		case <-s.cfg.Drain:
			return nil, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// storing is the set of readers of a store, which grows.
type storing struct {
	run     *invocation
	newSink func(Origin) (Sink, error)
	stop    chan struct{}

	mu      sync.Mutex
	readers []*reader
	sinks   []Sink
	known   map[string]bool // streams by name
}

func (v *invocation) store(ctx context.Context, book *leases, held *lease, newSink func(Origin) (Sink, error)) (err error) {
	st := &storing{run: v, newSink: newSink, stop: make(chan struct{}), known: map[string]bool{}}
	defer func() {
		for _, sink := range st.sinks {
			if cerr := sink.Close(); cerr != nil && err == nil {
				err = fmt.Errorf("closing a sink: %w", cerr)
			}
		}
	}()
	g, ctx := errgroup.WithContext(ctx)
	done := make(chan struct{})
	g.Go(func() error {
		return v.watch(ctx, done, func() []*reader {
			st.mu.Lock()
			defer st.mu.Unlock()
			return slices.Clone(st.readers)
		})
	})
	g.Go(func() error {
		tick := time.NewTicker(v.cfg.LeaseTTL / 10)
		defer tick.Stop()
		for {
			if book.due(held) {
				if err := book.renew(ctx, held); errors.Is(err, errLeaseLost) || book.expired(held) {
					return errLeaseLost
				}
			}
			select {
			case <-tick.C:
			case <-done:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	})
	g.Go(func() error {
		defer close(done)
		readers, reading := errgroup.WithContext(ctx)
		readers.Go(func() error { return st.recruit(reading, readers) })
		if err := readers.Wait(); err != nil {
			return err
		}
		return st.agedOut(ctx)
	})
	return g.Wait()
}

// recruit starts readers for the streams that there are, looks for new ones,
// and says when it is time to stop.
func (st *storing) recruit(ctx context.Context, g *errgroup.Group) error {
	v := st.run
	patience := waiting{log: v.log}
	for n := 0; ; n++ {
		err := st.look(ctx, g)
		if err == nil {
			err = st.press(ctx, n%4 == 3)
		}
		if err == nil && v.cfg.Once {
			var missing string
			if missing, err = v.toStore(ctx); missing == "" && err == nil {
				close(st.stop)
				return nil
			}
			patience.tell(missing)
		}
		if err != nil && !outage(err) {
			return err
		}
		if err != nil {
			patience.tell("the server to answer: " + err.Error())
		}
		wait := 500 * time.Millisecond
		if n < 10 {
			wait = 100 * time.Millisecond
		}
		select {
		case <-time.After(wait):
		case <-v.cfg.Drain:
			close(st.stop)
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// look starts a reader for each partition that has none.
func (st *storing) look(ctx context.Context, g *errgroup.Group) error {
	v := st.run
	capture := route{run: v.cfg.Run, stream: CaptureStream}
	if err := st.follow(ctx, g, capture, nil); err != nil {
		return err
	}
	groups, err := v.Groups(ctx)
	if err != nil {
		return err
	}
	for _, group := range groups {
		for p := range v.partitions {
			err := st.follow(ctx, g, route{v.cfg.Run, ResultsStream, group.Name, p}, group.About)
			if errors.Is(err, ErrDecline) {
				v.log.Warn("results of a group are left in the server", "group", group.Name, "why", err)
				for p := range v.partitions {
					st.known[GroupStreamName(v.cfg.Run, group.Name, p)] = true
				}
				break
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// press asks the readers of streams that fill up to commit: their publishers
// may be waiting, and cannot ask from where they are. Those that hold little
// are asked only now and then, or files would become small where another
// reader is the slow one.
func (st *storing) press(ctx context.Context, all bool) error {
	limits := map[string]bool{} // streams, and whether they fill up
	st.mu.Lock()
	readers := slices.Clone(st.readers)
	st.mu.Unlock()
	for _, r := range readers {
		full, seen := limits[r.route.name()]
		if !seen {
			stream, err := st.run.js.Stream(ctx, r.route.name())
			if err != nil {
				return fmt.Errorf("looking how full stream %s is: %w", r.route.name(), err)
			}
			info := stream.CachedInfo()
			limit := max(info.Config.MaxBytes, 0)
			if limit == 0 {
				limit = st.run.cfg.SoftBytes
			}
			full = limit > 0 && int64(info.State.Bytes) > limit/2
			limits[r.route.name()] = full
		}
		if full && (all || r.books.unacknowledged() >= pullBatch) {
			select {
			case r.urged <- struct{}{}:
			default:
			}
		}
	}
	return nil
}

// follow starts the readers of one stream, once it exists.
func (st *storing) follow(ctx context.Context, g *errgroup.Group, from route, about []byte) error {
	v := st.run
	if st.known[from.name()] {
		return nil
	}
	stream, err := v.js.Stream(ctx, from.name())
	if errors.Is(err, jetstream.ErrStreamNotFound) && from.group != "" {
		return nil // its workers have not got this partition yet
	}
	if err != nil {
		return fmt.Errorf("looking for stream %s: %w", from.name(), err)
	}
	partitions := []int{from.partition}
	if from.group == "" {
		if v.partitions, err = storedPartitions(ctx, v.js, v.cfg.Run, from.stream); err != nil {
			return err
		}
		partitions = partitions[:0]
		for p := range v.partitions {
			partitions = append(partitions, p)
		}
	}
	var started []*reader
	for _, p := range partitions {
		r, err := openReader(ctx, v, from, roleStore, p)
		if err != nil {
			return err
		}
		sink, err := st.newSink(Origin{
			Stream: from.stream, Group: from.group, About: about, Partition: p,
			Name: from.name(), Created: stream.CachedInfo().Created,
		})
		if err != nil {
			return fmt.Errorf("opening the sink of partition %d of %s: %w", p, from.name(), err)
		}
		st.sinks = append(st.sinks, sink)
		if err := r.compare(ctx, sink); err != nil {
			return fmt.Errorf("comparing partition %d of %s with what is stored: %w", p, from.name(), err)
		}
		r.foreign, r.stop = true, st.stop
		r.handler = &storeHandler{run: v, sink: sink, from: from, partition: p, books: r.books, noted: from.stream == CaptureStream, ended: map[string]*sequence{}, own: map[string]int64{}}
		started = append(started, r)
	}
	st.known[from.name()] = true
	st.mu.Lock()
	st.readers = append(st.readers, started...)
	st.mu.Unlock()
	for _, r := range started {
		g.Go(func() error {
			defer r.abandon()
			if err := r.read(ctx); !errors.Is(err, errStopped) {
				return err
			}
			return nil
		})
	}
	return nil
}
