package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/pipeline"
	"github.com/draftscope/draftscope/schemas"
)

const serveHelp = `usage: draftscope serve [--listen HOST:PORT | --nats URL] [--out DIR] [flags]

Receives captures from other processes ("draftscope capture --stream-only"),
gives them to drafter workers ("draftscope draft"), and stores all of it as a
dataset. It runs a JetStream server of its own at --listen, or uses yours at
--nats, and serves metrics and a status page at --http; a browser finds the
report there, which follows what is stored.

The server has no passwords: let it listen where only friends are, or use a
NATS server of your own with --nats.

examples:
  draftscope serve --out ds
  draftscope serve --listen 0.0.0.0:4222 --http 127.0.0.1:9464 --out ds
  draftscope serve --nats nats://a:4222,nats://b:4222,nats://c:4222 --replicas 3 --out ds
`

const storeHelp = `usage: draftscope store --nats URL [--run R] [--out DIR] [flags]

Writes the dataset of the runs on a server: captures, and the results of every
group of workers, as Parquet. One process stores a run at a time; a second one
waits for its turn.

It waits for runs to begin and stores until it is interrupted, or with --once
until every run has ended and all of its groups are stored. It only knows of a
group once one of its workers has come: where workers may be later than the
end of the run, say with --groups N how many groups to wait for.

examples:
  draftscope store --nats nats://host:4222 --out ds
  draftscope store --nats nats://host:4222 --run r1 --once --groups 2 --out ds
`

// noGrace stands for a --grace that was not given.
const noGrace = -1

// storeJob stores runs into one dataset.
type storeJob struct {
	*job
	streamFlags
	server *pipeline.Server
	once   bool
	groups int
	idle   time.Duration // how long a quiet sink waits before it writes
	only   string        // the run to store; empty for all
	encode *oneOf        // how exactly states are stored
	mon    *monitor
	soft   int64 // how much a stream may hold

	finished finishedRuns

	mu       sync.Mutex
	declined []string // why something was left in the server
}

func cmdServe(ctx context.Context, args []string, out streams) error {
	s, flags := newStoreJob("serve", serveHelp, out)
	listen := flags.String("listen", "127.0.0.1:4222", "where the server listens, `HOST:PORT`")
	sync := flags.Bool("sync", false, "the server writes every message through to the disk: survives a crash of the machine, at about half the speed")
	s.stream.register(flags)
	flags.BoolVar(&s.finished.keep, "keep-streams", false, "streams keep all of a run, also when it is over and stored; without it, workers that come late find the rest in the dataset only (\"draftscope replay\")")
	flags.DurationVar(&s.finished.grace, "grace", noGrace, "the streams of a run that is over go when all of it has been stored, and read by every group of workers, for `D` (default 10m; with --nats they stay unless this is given)")
	flags.Lookup("grace").DefValue = ""
	s.http = "127.0.0.1:9464"
	flags.Lookup("http").DefValue = s.http
	if err := parseNone(flags, args); err != nil {
		return err
	}
	external := s.nats != ""
	if external && *listen != "127.0.0.1:4222" {
		return badUsage("--listen and --nats exclude each other: the one runs a server, the other uses yours")
	}
	if s.finished.grace == noGrace {
		s.finished.grace = 10 * time.Minute
		s.finished.keep = s.finished.keep || external
	}
	if s.finished.grace < 0 {
		return badUsage("--grace must not be negative, as %s is", s.finished.grace)
	}
	return s.run(ctx, func() (err error) {
		if external {
			return nil
		}
		s.server, err = pipeline.StartServer(pipeline.Config{Dir: filepath.Join(s.jobFlags.out, "stream"), SyncAlways: *sync, Logger: s.log}, *listen)
		if err != nil {
			return err
		}
		s.opened.add(s.server)
		s.nats = s.server.URL()
		s.say("NATS server at %s", s.nats)
		return nil
	})
}

func cmdStore(ctx context.Context, args []string, out streams) error {
	s, flags := newStoreJob("store", storeHelp, out)
	flags.StringVar(&s.only, "run", "", "store only the run of this `NAME`")
	flags.IntVar(&s.groups, "groups", 0, "with --once, wait for the results of at least `N` groups of workers")
	flags.BoolVar(&s.once, "once", false, "end when every run has ended and is stored")
	if err := parseNone(flags, args); err != nil {
		return err
	}
	if err := needServer(s.nats); err != nil {
		return err
	}
	s.finished.keep = true
	return s.run(ctx, func() error { return nil })
}

func newStoreJob(name, help string, out streams) (*storeJob, *flag.FlagSet) {
	s := &storeJob{job: newJob(jobFlags{parts: 1}, out), mon: newMonitor()}
	flags := newFlags(name, help, out)
	flags.StringVar(&s.jobFlags.out, "out", defaultOut, "the dataset's `DIR`")
	flags.StringVar(&s.nats, "nats", "", "the JetStream server's `URL`")
	flags.IntVar(&s.replicas, "replicas", 0, "copies that a cluster of servers keeps of what is noted here, `N`")
	s.encode = encodingFlag(flags)
	encodersFlag(flags, &s.encoders)
	s.readerFlags(flags)
	flags.DurationVar(&s.idle, "commit-idle", commitIdle, "write what there is when nothing has come for `D`; shorter makes more and smaller files")
	flags.StringVar(&s.http, "http", "", "serve /metrics for Prometheus and a status page at `HOST:PORT`")
	return s, flags
}

func (s *storeJob) run(ctx context.Context, startServer func() error) (err error) {
	ctx, stop := s.signals(ctx)
	defer stop()
	defer collectOften()()
	defer func() { err = errors.Join(err, s.opened.Close()) }()
	if err := s.openDataset(s.jobFlags.out); err != nil {
		return err
	}
	if err := startServer(); err != nil {
		return jobError(err)
	}
	s.jobFlags.run = "all-runs" // only a label of the connection
	if s.only != "" {
		s.jobFlags.run = s.only
	}
	board, err := pipeline.Open(ctx, s.session(s.jobFlags.run, s.drain))
	if err != nil {
		return jobError(err)
	}
	s.opened.add(board)
	// Sources and workers of this server keep to it.
	s.soft = s.stream.of(s.server != nil && !s.finished.keep)
	if s.server != nil || s.stream.given {
		if err := board.NoteSoftBytes(ctx, s.soft); err != nil {
			return jobError(err)
		}
	}
	if s.http != "" {
		s.mon.live = newLive(s.ds.Dir(), liveEvery, s.mon.commitCount, s.mon.now, liveReport(s.ds.Dir()))
	}
	closeHTTP, err := serveHTTP(s.http, s.say, s.mon)
	if err != nil {
		return err
	}
	defer closeHTTP()
	s.say("storing into %s", s.ds.Dir())
	s.forgetLost(ctx, board)
	stored, err := s.all(ctx, board)
	switch {
	case err != nil && ctx.Err() != nil:
		return exitError{exitPartial, fmt.Errorf("stopped; the same command goes on from here: %w", err)}
	case err != nil:
		return jobError(err)
	}
	if err := s.conclude(stored); err != nil {
		return err
	}
	if s.once && s.drained() {
		return exitError{exitPartial, errors.New("stopped early; the same command goes on from here")}
	}
	return nil
}

// conclude says what is in the dataset of the runs that were stored.
func (s *storeJob) conclude(runs []string) error {
	faults := 0
	for _, run := range runs {
		have, err := s.ds.Stored(run)
		if err != nil {
			return dataError(err)
		}
		list, err := s.ds.Faults(run)
		if err != nil {
			return dataError(err)
		}
		faults += len(list)
		fmt.Fprintf(s.out.stdout, "run %s: %d sequences stored, %d faults\n", run, len(have), len(list))
	}
	switch {
	case len(s.declined) > 0:
		return exitError{exitPartial, fmt.Errorf("some of it was left in the server: %s", strings.Join(s.declined, "; "))}
	case faults > 0:
		return exitError{exitPartial, fmt.Errorf("%d faults: what they concern was set aside, the rest is stored", faults)}
	}
	return nil
}

func (s *storeJob) session(run string, drain <-chan struct{}) pipeline.Config {
	return pipeline.Config{
		Run: run, URL: s.nats, Server: s.server, Replicas: s.replicas, Once: s.once, Groups: s.groups, Drain: drain,
		SoftBytes: s.soft, CommitBytes: commitBytes(s.soft, 2), AckWait: s.ackWait, LeaseTTL: s.lease, CommitIdle: s.idle, Logger: s.log, OnCommit: s.mon.committed,
		OnFault: func(f pipeline.Fault) {
			if err := s.ds.AddFaults(run, []schemas.Fault{faultRow(f)}); err != nil {
				s.log.Error("storing a fault", "run", run, "fault", f.Error(), "error", err)
			}
		},
	}
}

// all stores runs as they appear, each in goroutines of its own.
func (s *storeJob) all(ctx context.Context, board *pipeline.Session) (runs []string, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan runEnd)
	known := map[string]bool{} // runs that are stored, or were and are not over
	going, drain := 0, (<-chan struct{})(s.drain)
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	var errs []error
	draining := false
	look := func() {
		found, err := board.Runs(ctx)
		if err == nil && len(found) > 0 {
			var live []string // a run that is over has its description left
			live, err = board.Live(ctx)
			found = slices.DeleteFunc(found, func(run string) bool { return !slices.Contains(live, run) })
		}
		if err != nil {
			s.log.Warn("listing the runs on the server", "error", err)
			return
		}
		for _, run := range found {
			if known[run] || s.only != "" && run != s.only {
				continue
			}
			known[run] = true
			if !slices.Contains(runs, run) {
				runs = append(runs, run)
			}
			going++
			go func() { results <- s.keep(ctx, run) }()
		}
	}
	for {
		if !draining && ctx.Err() == nil {
			look()
		}
		if going == 0 && (draining || ctx.Err() != nil || s.once && len(runs) > 0) {
			if ctx.Err() != nil && len(errs) == 0 {
				errs = append(errs, context.Cause(ctx))
			}
			return runs, errors.Join(errs...)
		}
		select {
		case end := <-results:
			going--
			if end.deleted {
				delete(known, end.run)
			}
			if end.err != nil {
				errs = append(errs, end.err)
				cancel()
			}
		case <-tick.C:
		case <-drain:
			draining, drain = true, nil
		case <-ctx.Done():
			if going == 0 {
				continue
			}
			errs = append(errs, (<-results).err)
			going--
		}
	}
}

// keep stores one run. What is wrong with the run leaves it in the server,
// for the others to go on; what is wrong here, such as a full disk, is tried
// again.
func (s *storeJob) keep(ctx context.Context, run string) runEnd {
	for {
		deleted, err := s.storeRun(ctx, run)
		end := runEnd{run, deleted, err}
		if err == nil || ctx.Err() != nil {
			return end
		}
		var coded exitError
		if errors.As(jobError(err), &coded) && coded.code == exitUsage {
			s.decline(err)
			return runEnd{run: run}
		}
		if s.once || errors.Is(err, pipeline.ErrServerFailed) || errors.Is(err, data.ErrGone) {
			return end
		}
		s.say("storing run %s: %v; trying again in 5 s, the server keeps what is not stored", run, err)
		select {
		case <-time.After(5 * time.Second):
		case <-s.drain:
			return end
		case <-ctx.Done():
			return end
		}
	}
}

func (s *storeJob) decline(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say("left in the server: %v", err)
	s.declined = append(s.declined, err.Error())
}

func (s *storeJob) storeRun(ctx context.Context, run string) (deleted bool, err error) {
	drain := make(chan struct{})
	session, err := pipeline.Open(ctx, s.session(run, drain))
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, session.Close()) }()
	defer s.mon.with(run, session).without(session)
	record, ok, err := runRecord(ctx, session)
	if err != nil {
		return false, err
	}
	if !ok {
		return false, badUsage("run %s has lost its description on the server", run)
	}
	if record.Rounding, err = roundingOf(s.encode, record.DType); err != nil {
		return false, err
	}
	if err := s.ds.AddRun(record); err != nil {
		return false, err
	}
	s.say("storing run %s", run)
	return s.storeUntilFinished(ctx, run, session, drain, func(ctx context.Context) error {
		return session.Store(ctx, func(o pipeline.Origin) (pipeline.Sink, error) { return s.sink(run, o) })
	})
}

// sink opens the sink of one partition of one stream.
func (s *storeJob) sink(run string, o pipeline.Origin) (pipeline.Sink, error) {
	cfg := data.SinkConfig{Stream: o.Name, StreamCreated: o.Created, EncodeWorkers: s.encoders}
	if o.Stream == pipeline.CaptureStream {
		return s.ds.CaptureSink(run, o.Partition, cfg)
	}
	var drafters []data.Drafter
	if err := json.Unmarshal(o.About, &drafters); err != nil {
		return nil, fmt.Errorf("reading the description of group %s on the server: %w", o.Group, err)
	}
	for _, d := range drafters {
		if err := s.ds.AddDrafter(run, d); err != nil {
			s.decline(err)
			return nil, fmt.Errorf("%w: %w", pipeline.ErrDecline, err)
		}
	}
	sink, err := s.ds.ResultSink(run, o.Partition, cfg)
	if err != nil {
		return nil, err
	}
	return newGroupSink(sink, drafters), nil
}
