package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"time"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/pipeline"
)

// streamFlags are the flags of commands that do one part of a run.
type streamFlags struct {
	maxBytes int64
	maxAge   time.Duration
	whenFull *oneOf
	replicas int
	http     string
	ackWait  time.Duration
	lease    time.Duration
}

func (s *streamFlags) register(fs *flag.FlagSet) {
	fs.Int64Var(&s.maxBytes, "max-bytes", 0, "the stream's size limit, `N` bytes; with one, it forgets what the store and every group of workers have (0: no limit)")
	fs.DurationVar(&s.maxAge, "max-age", 0, "the stream forgets what is older, read or not, for example `72h`, at least 100ms (0: never)")
	fs.IntVar(&s.replicas, "replicas", 0, "copies that a cluster of servers keeps, `N` (default: 1, or what the run has)")
	fs.StringVar(&s.http, "http", "", "serve /metrics for Prometheus and a status page at `HOST:PORT`")
}

// checkAge refuses an age limit that no server takes.
func checkAge(d time.Duration) error {
	if d != 0 && d < 100*time.Millisecond {
		return badUsage("--max-age is %s, want 100ms or more, or 0 for never", d)
	}
	return nil
}

func (s *streamFlags) sourceFlags(fs *flag.FlagSet) {
	s.whenFull = oneOfFlag(fs, "when-full", "block", "while the stream is full: block, or shed (drop whole sequences, counted) `WHAT`", "shed")
}

// readerFlags are for what reads the stream.
func (s *streamFlags) readerFlags(fs *flag.FlagSet) {
	fs.DurationVar(&s.ackWait, "ack-wait", 5*time.Minute, "the server sends again what was not acknowledged for so long; signs of life are sent at a third of it (`D`)")
	fs.DurationVar(&s.lease, "lease", 5*time.Second, "after `D` without a sign of life another process takes over, at least 1s")
}

func (s *streamFlags) config(j *job) pipeline.Config {
	cfg := pipeline.Config{
		Run: j.run, URL: j.nats, Partitions: j.parts, Drain: j.drain, OnFault: j.faults.add, Logger: j.log,
		MaxBytes: s.maxBytes, SoftBytes: int64(j.stream.sizeFlag), MaxAge: s.maxAge, Replicas: s.replicas, AckWait: s.ackWait, LeaseTTL: s.lease,
	}
	if s.whenFull != nil && s.whenFull.value == "shed" {
		cfg.WhenFull = pipeline.Shed
	}
	return cfg
}

// drained says that an interrupt asked for an early end.
func (j *job) drained() bool {
	select {
	case <-j.drain:
		return true
	default:
		return false
	}
}

// needServer refuses the embedded server, which no other process reaches.
func needServer(nats string) error {
	if nats == pipeline.Embedded || nats == "" {
		return badUsage("this needs a server that other processes reach: give --nats URL, for example nats://127.0.0.1:4222 where \"draftscope serve\" runs")
	}
	return nil
}

// runRecord is the run as its source describes it on the server.
func runRecord(ctx context.Context, session *pipeline.Session) (r data.Run, ok bool, err error) {
	about, err := session.RunDescription(ctx)
	if about == nil || err != nil {
		return r, false, err
	}
	if err := json.Unmarshal(about, &r); err != nil {
		return r, false, fmt.Errorf("reading the run's description on the server: %w", err)
	}
	return r, true, nil
}

// streamJob is capture --stream-only.
func streamJob(ctx context.Context, j *job, s streamFlags) (err error) {
	if err := errors.Join(j.validate(), needServer(j.nats), checkAge(s.maxAge)); err != nil {
		return badInput(err)
	}
	ctx, stop := j.signals(ctx)
	defer stop()
	defer collectOften()()
	defer func() { err = errors.Join(err, j.opened.Close()) }()
	session, err := pipeline.Open(ctx, s.config(j))
	if err != nil {
		return jobError(err)
	}
	j.opened.add(session)
	inputs, err := j.inputs()
	if err != nil {
		return err
	}
	if err := j.openTarget(j.target); err != nil {
		return err
	}
	if err := j.demoTaps(); err != nil {
		return err
	}
	if have, ok, err := runRecord(ctx, session); err != nil {
		return jobError(err)
	} else if ok {
		j.remote = have
	}
	states, err := j.chooseStates()
	if err != nil {
		return err
	}
	source, err := j.newSource(inputs)
	if err != nil {
		return jobError(err)
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	record := j.record(states)
	if record.Profile, err = j.profile(record, beginnings(source)); err != nil {
		return err
	}
	if err := j.describeRun(ctx, session, record); err != nil {
		return err
	}
	published, err := session.Published(ctx)
	if err != nil {
		return jobError(err)
	}
	deleted, err := session.Deleted(ctx)
	if err != nil {
		return jobError(err)
	}
	for _, id := range deleted {
		published[id] = 0
	}
	if err := source.Choose(states, func(id string) bool { _, ok := published[id]; return ok }); err != nil {
		return jobError(err)
	}
	if err := j.idle(source.Idle(), len(inputs)); err != nil {
		return err
	}
	total := source.Remaining()
	if total < len(inputs) {
		j.say("resuming run %s on the server: %d of %d sequences are in the stream, or have been", j.run, len(inputs)-total, len(inputs))
	}
	closeHTTP, err := serveHTTP(s.http, j.say, newMonitor().with(j.run, session))
	if err != nil {
		return err
	}
	defer closeHTTP()
	meter := startMeter(j.out.stderr, total, false, func() tally {
		p := session.Progress()
		return tally{captured: p.Published + p.Shed, stored: p.Published, tokens: p.Rows}
	})
	sum, err := session.Publish(ctx, source)
	meter.close()
	switch {
	case err != nil && ctx.Err() != nil:
		return exitError{exitPartial, fmt.Errorf("stopped; the same command goes on from here: %w", err)}
	case err != nil:
		return jobError(err)
	}
	fmt.Fprintf(j.out.stdout, "run %s: %d sequences published, %d tokens, %d bytes, on %d partitions\n", j.run, sum.Published, sum.Rows, sum.Bytes, sum.Partitions)
	switch {
	case sum.Shed > 0:
		return exitError{exitPartial, fmt.Errorf("%d sequences with %d tokens were shed, the stream was full; the same command captures them", sum.Shed, sum.ShedRows)}
	case sum.Drained:
		return exitError{exitPartial, errors.New("stopped early, with everything so far in the stream; the same command goes on from here")}
	}
	return nil
}

// describeRun leaves the run's record on the server, or makes sure that the
// one there is the same.
func (j *job) describeRun(ctx context.Context, session *pipeline.Session, r data.Run) error {
	about, err := json.Marshal(r)
	if err != nil {
		return err
	}
	inForce, err := session.DescribeRun(ctx, about)
	if err != nil {
		return jobError(err)
	}
	var have data.Run
	if err := json.Unmarshal(inForce, &have); err != nil {
		return fmt.Errorf("reading the description of run %s on the server: %w", j.run, err)
	}
	if what := have.Difference(r); what != "" {
		return badUsage("run %s on the server was begun with another target or other settings: %s; give another --run, or the same ones", j.run, what)
	}
	return nil
}
