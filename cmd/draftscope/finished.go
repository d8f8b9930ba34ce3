package main

import (
	"context"
	"fmt"
	"time"

	"github.com/draftscope/draftscope/pipeline"
)

// finishedRuns says what becomes of the streams of runs that are over.
type finishedRuns struct {
	keep  bool
	grace time.Duration // for how long nothing may be left to read
}

// awaitFinish returns true once the run has ended and everything of it has
// been stored for as long as the grace: by then all groups of workers that
// have a name on the server have read all of it too. It returns false when
// ctx ends or stop is closed.
func (f finishedRuns) awaitFinish(ctx context.Context, session *pipeline.Session, stop <-chan struct{}) bool {
	var since time.Time
	tick := time.NewTicker(min(time.Second, max(f.grace/4, 50*time.Millisecond)))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-stop:
			return false
		case <-ctx.Done():
			return false
		}
		// An error is an outage, or streams that come and go: ask again.
		done, err := session.Stored(ctx)
		switch {
		case !done || err != nil:
			since = time.Time{}
		case since.IsZero():
			since = time.Now()
		case time.Since(since) >= f.grace:
			return true
		}
	}
}

// runEnd is how the storing of one run came to its end.
type runEnd struct {
	run     string
	deleted bool // its streams are gone: it may begin anew
	err     error
}

// storeUntilFinished runs store, which goes on until drain is closed, and
// deletes the run's streams when it is over.
func (s *storeJob) storeUntilFinished(ctx context.Context, run string, session *pipeline.Session, drain chan struct{}, store func(context.Context) error) (deleted bool, err error) {
	watching, stop := context.WithCancel(ctx)
	finished := make(chan bool, 1)
	go func() {
		over := !s.finished.keep && s.finished.awaitFinish(watching, session, s.drain)
		if !over {
			select {
			case <-s.drain:
			case <-watching.Done():
			}
		}
		close(drain)
		finished <- over
	}()
	err = store(ctx)
	stop()
	if over := <-finished; !over || err != nil {
		return false, err
	}
	// The source may have come back meanwhile.
	if done, err := session.Stored(ctx); !done || err != nil {
		return false, err
	}
	if err := session.DeleteStreams(ctx); err != nil {
		return false, fmt.Errorf("deleting the streams of run %s, which is over: %w", run, err)
	}
	s.say("run %s is over, and stored: its streams are deleted (--keep-streams keeps them)", run)
	return true, nil
}
