package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/pipeline"
)

// commitIdle is how long a quiet sink waits before it writes what it has. The
// stream keeps everything until then, so a long wait costs nothing but time
// after a crash, and makes fewer and larger files.
const commitIdle = 10 * time.Second

// collectOften makes Go collect garbage at a quarter of growth, unless GOGC is
// set: nearly all memory of the data plane is large blocks without pointers,
// whose collection costs little, and what would lie about is saved. The result
// ends it.
func collectOften() (end func()) {
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	before := debug.SetGCPercent(25)
	return func() { debug.SetGCPercent(before) }
}

// flow is what moves through the pipeline in one job.
type flow struct {
	source  pipeline.Source
	total   int  // sequences
	score   bool // whether there is a stage
	capture bool // whether captures are stored, or only what drafters made of them
}

// move runs the pipeline and says how it went.
func (j *job) move(ctx context.Context, f flow) (sum pipeline.Summary, err error) {
	soft := j.stream.of(j.nats == pipeline.Embedded)
	session, err := pipeline.Open(ctx, pipeline.Config{
		Run: j.run, URL: j.nats, Dir: filepath.Join(j.ds.Dir(), "stream"), Partitions: j.parts,
		SoftBytes: soft, CommitBytes: commitBytes(soft, j.parts), CommitIdle: commitIdle, Drain: j.drain, OnFault: j.faults.add, Logger: j.log,
	})
	if err != nil {
		return sum, jobError(err)
	}
	defer func() { err = errors.Join(err, session.Close()) }()

	var newStage pipeline.NewStage
	if f.score {
		newStage = j.newStage
	}
	newSink := func(stream string, partition int) (pipeline.Sink, error) {
		created, err := session.StreamCreated(ctx, stream)
		if err != nil {
			return nil, err
		}
		cfg := data.SinkConfig{Stream: pipeline.StreamName(j.run, stream), StreamCreated: created, EncodeWorkers: j.encoders}
		if stream == pipeline.ResultsStream {
			return j.ds.ResultSink(j.run, partition, cfg)
		}
		if !f.capture {
			return discard{}, nil
		}
		return j.ds.CaptureSink(j.run, partition, cfg)
	}
	meter := startMeter(j.out.stderr, f.total, f.score, func() tally {
		p := session.Progress()
		t := tally{captured: p.Published, scored: p.Processed, stored: p.Stored, tokens: p.Rows}
		if f.score {
			t.stored = p.ResultsStored
		}
		// What an earlier process left in the stream counts too, and may
		// come a second time.
		t.captured, t.scored, t.stored = min(t.captured, int64(f.total)), min(t.scored, int64(f.total)), min(t.stored, int64(f.total))
		return t
	})
	sum, err = session.Run(ctx, f.source, newStage, newSink)
	meter.close()
	if addErr := j.ds.AddFaults(j.run, j.faults.list); addErr != nil {
		err = errors.Join(err, addErr)
	}
	if err != nil && ctx.Err() != nil {
		return sum, exitError{exitPartial, fmt.Errorf("stopped; the same command goes on from here: %w", err)}
	}
	return sum, jobError(err)
}

// signals drains at the first interrupt and stops at the second.
func (j *job) signals(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	j.drain = make(chan struct{})
	caught := make(chan os.Signal, 2)
	signal.Notify(caught, os.Interrupt, syscall.SIGTERM)
	done := make(chan struct{})
	var wait sync.WaitGroup
	wait.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-done:
				return
			case <-caught:
				if n == 0 {
					j.say("\ndraining: finishing what was begun; interrupt again to stop at once")
					close(j.drain)
				} else {
					cancel()
				}
			}
		}
	})
	return ctx, func() {
		signal.Stop(caught)
		close(done)
		wait.Wait()
		cancel()
	}
}

// finish tells faults and what is left, as an exit code.
func (j *job) finish(sum pipeline.Summary) error {
	faults, err := j.mattering()
	if err != nil {
		return dataError(err)
	}
	all, byCheck := map[string]bool{}, map[string]map[string]bool{} // sequences
	for _, f := range faults {
		if byCheck[f.Check] == nil {
			byCheck[f.Check] = map[string]bool{}
		}
		all[f.SeqID], byCheck[f.Check][f.SeqID] = true, true
	}
	for _, check := range slices.Sorted(maps.Keys(byCheck)) {
		j.say("set aside by check %s, sequences: %d (draftscope query --dataset %s \"FROM faults\")", check, len(byCheck[check]), j.ds.Dir())
	}
	switch {
	case sum.Drained:
		return exitError{exitPartial, errors.New("stopped early, with everything so far stored; the same command goes on from here")}
	case len(faults) > 0:
		return exitError{exitPartial, fmt.Errorf("sequences set aside: %d, by %d faults; the rest is stored and scored", len(all), len(faults))}
	}
	return nil
}

// conclude reports, after all that was to be moved has been. What was set
// aside or left decides the exit code, unless the report fails.
func (j *job) conclude(ctx context.Context, sum pipeline.Summary) error {
	finishErr := j.finish(sum)
	switch err := j.report(ctx); {
	case partial(err):
		return errors.Join(finishErr, err)
	case err != nil:
		return err
	}
	return finishErr
}

// discard is the sink of captures that are stored already.
type discard struct{}

func (discard) Write(context.Context, string, arrow.Record) error { return nil }
func (discard) End(context.Context, string, uint64) error         { return nil }
func (discard) Drop(string)                                       {}
func (discard) Pending() int64                                    { return 0 }
func (discard) Commit(context.Context) error                      { return nil }
func (discard) Close() error                                      { return nil }

// chain yields one source after the other.
type chain []pipeline.Source

func (c *chain) Next(ctx context.Context) (seq string, rec arrow.Record, last bool, err error) {
	for len(*c) > 0 {
		seq, rec, last, err = (*c)[0].Next(ctx)
		if !errors.Is(err, io.EOF) {
			return seq, rec, last, err
		}
		*c = (*c)[1:]
	}
	return "", nil, false, io.EOF
}
