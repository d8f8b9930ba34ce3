package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// NewStage makes the stage of one partition.
type NewStage = func(partition int) (Stage, error)

// NewSink makes the sink of one partition of a stream, [CaptureStream] or
// [ResultsStream].
type NewSink = func(stream string, partition int) (Sink, error)

// Run opens a [Session], runs it and closes it.
func Run(ctx context.Context, cfg Config, src Source, newStage NewStage, newSink NewSink) (Summary, error) {
	s, err := Open(ctx, cfg)
	if err != nil {
		return Summary{}, err
	}
	sum, err := s.Run(ctx, src, newStage, newSink)
	return sum, errors.Join(err, s.Close())
}

// invocation is one Run of a session.
type invocation struct {
	*Session
	log        *slog.Logger
	nonce      string
	attempts   atomic.Int64
	partitions int
	progress   *counters

	faultMu sync.Mutex
	faulted map[string]bool
}

// attempt names the next try at a sequence.
func (v *invocation) attempt() string {
	return v.nonce + "." + strconv.FormatInt(v.attempts.Add(1), 10)
}

// route is the stream of a job in one process.
func (v *invocation) route(stream string) route { return route{run: v.cfg.Run, stream: stream} }

// fault reports a sequence that was set aside, once, however many readers
// stumble over it.
func (v *invocation) fault(f Fault) {
	v.faultMu.Lock()
	defer v.faultMu.Unlock()
	key := f.Seq
	if key == "" {
		key = " " + f.Detail
	}
	if v.faulted[key] {
		return
	}
	v.faulted[key] = true
	v.progress.faults.Add(1)
	v.log.Warn("sequence set aside", "sequence", f.Seq, "chunk", f.Chunk, "stream", f.Stream, "check", f.Check, "detail", f.Detail)
	if v.cfg.OnFault != nil {
		v.cfg.OnFault(f)
	}
}

// begin starts an invocation with counts of its own.
func (s *Session) begin() *invocation {
	s.progress.Store(new(counters))
	return s.invocation(s.counters())
}

// invocation names one more, that counts in c.
func (s *Session) invocation(c *counters) *invocation {
	return &invocation{Session: s, log: s.cfg.Logger.With("run", s.cfg.Run), nonce: newNonce(), progress: c, faulted: map[string]bool{}}
}

// Run publishes what src gives, puts it through the stages and into the
// sinks, and returns when all of it is durable. newStage may be nil: then
// there is only the capture. What an earlier invocation of the same run left
// in the streams is worked off first.
//
// Cancelling ctx stops it hard, with nothing lost: the next Run of the same
// name goes on from there. An error of the source, a stage or a sink does the
// same. [Config.Drain] ends it well before the source does.
func (s *Session) Run(ctx context.Context, src Source, newStage NewStage, newSink NewSink) (Summary, error) {
	v := s.begin()
	drained, err := v.run(ctx, src, newStage, newSink)
	sum := Summary{Progress: v.progress.snapshot(), Drained: drained, Partitions: v.partitions}
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("run %s stopped before its end, run it again to go on: %w", s.cfg.Run, err)
		}
		return sum, s.explain(ctx, err)
	}
	if s.cfg.Keep == KeepNever || s.cfg.Keep == KeepDefault && s.srv != nil {
		return sum, s.DeleteStreams(ctx)
	}
	return sum, nil
}

func (v *invocation) run(ctx context.Context, src Source, newStage NewStage, newSink NewSink) (drained bool, err error) {
	names := []string{CaptureStream}
	if newStage != nil {
		names = append(names, ResultsStream)
	}
	if v.partitions, err = openStreams(ctx, v.js, v.cfg, names); err != nil {
		return false, err
	}
	publishers := map[string]*publisher{}
	for _, name := range names {
		if publishers[name], err = newPublisher(ctx, v.cfg, v.route(name), v.nc, v.js); err != nil {
			return false, err
		}
	}
	var sinks []Sink
	defer func() {
		for _, sink := range sinks {
			if cerr := sink.Close(); cerr != nil && err == nil {
				err = fmt.Errorf("closing a sink: %w", cerr)
			}
		}
	}()
	var readers []*reader
	for p := range v.partitions {
		for _, name := range names {
			r, err := openReader(ctx, v, v.route(name), "store", p)
			if err != nil {
				return false, err
			}
			sink, err := newSink(name, p)
			if err != nil {
				return false, fmt.Errorf("opening the sink of partition %d of %s: %w", p, name, err)
			}
			sinks = append(sinks, sink)
			r.handler = &storeHandler{run: v, sink: sink, from: r.route, partition: p, books: r.books, ended: map[string]*sequence{}, own: map[string]int64{}}
			readers = append(readers, r)
		}
		if newStage != nil {
			r, err := openReader(ctx, v, v.route(CaptureStream), "stage", p)
			if err != nil {
				return false, err
			}
			stage, err := newStage(p)
			if err != nil {
				return false, fmt.Errorf("opening the stage of partition %d: %w", p, err)
			}
			r.handler = &stageHandler{run: v, stage: stage, partition: p, results: publishers[ResultsStream], books: r.books}
			readers = append(readers, r)
		}
	}
	for _, r := range readers {
		if q := publishers[r.route.stream].quota; q != nil {
			q.attach(r)
		}
	}
	return v.work(ctx, src, publishers, readers)
}

// work runs everything side by side. Services end when the work has.
func (v *invocation) work(ctx context.Context, src Source, publishers map[string]*publisher, readers []*reader) (drained bool, err error) {
	g, ctx := errgroup.WithContext(ctx)
	done := make(chan struct{})
	for _, p := range publishers {
		g.Go(func() error { return p.serve(ctx, done) })
	}
	g.Go(func() error { return v.watch(ctx, done, func() []*reader { return readers }) })

	var busy sync.WaitGroup
	work := func(f func() error) {
		busy.Add(1)
		g.Go(func() error {
			defer busy.Done()
			return f()
		})
	}
	work(func() error {
		// A word of greeting on each partition: what earlier invocations
		// left unfinished there can be let go of.
		for name, p := range publishers {
			for i := range v.partitions {
				if err := p.control(ctx, kindBegin, v.nonce, i, 0); err != nil {
					return fmt.Errorf("opening %s: %w", name, err)
				}
			}
		}
		for _, r := range readers {
			work(func() error { return r.read(ctx) })
		}
		var err error
		drained, err = v.feed(ctx, src, publishers[CaptureStream])
		return err
	})
	g.Go(func() error {
		busy.Wait()
		close(done)
		return nil
	})
	err = g.Wait()
	return drained, err
}

// watch sends signs of life for what the readers hold and gives up on a
// server that stays away.
func (v *invocation) watch(ctx context.Context, done <-chan struct{}, readers func() []*reader) error {
	const beat = 200 * time.Millisecond
	tick := time.NewTicker(beat)
	defer tick.Stop()
	touched, seen := time.Now(), time.Now()
	for {
		select {
		case <-done:
			return nil
		case <-ctx.Done():
			return nil
		case now := <-tick.C:
			if err := v.trouble.err(); err != nil {
				return err
			}
			switch {
			case v.nc.IsConnected():
				seen = now
			case now.Sub(seen) > v.cfg.OutageTimeout:
				return fmt.Errorf("%w at %s for %s; what is stored is kept, run again when it is back", ErrNoServer, redacted(v.cfg.URL), v.cfg.OutageTimeout)
			}
			if now.Sub(touched) > v.cfg.AckWait/3 {
				touched = now
				for _, r := range readers() {
					r.books.touch()
				}
			}
		}
	}
}
