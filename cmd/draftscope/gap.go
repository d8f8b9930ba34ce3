package main

import (
	"context"
	"slices"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/pipeline"
)

// groupSink stores the results of one group of workers, and can say which
// sequences it has by all of the group's drafters.
type groupSink struct {
	*data.ResultSink
	drafters []string
}

func newGroupSink(sink *data.ResultSink, drafters []data.Drafter) pipeline.Sink {
	if len(drafters) == 0 {
		return sink
	}
	g := groupSink{ResultSink: sink}
	for _, d := range drafters {
		g.drafters = append(g.drafters, d.Name)
	}
	return g
}

func (g groupSink) Held() (map[string]bool, error) { return g.HeldOf(g.drafters) }

// forgetLost sees to it that runs of this dataset whose streams are deleted can
// be captured again where the dataset has lost a part: the server's notes say
// that all is stored. Runs that have streams are looked at when they are stored.
func (s *storeJob) forgetLost(ctx context.Context, board *pipeline.Session) {
	live, err := board.Live(ctx)
	if err != nil {
		s.log.Warn("listing the runs on the server", "error", err)
		return
	}
	for _, r := range s.ds.Runs() {
		if slices.Contains(live, r.Name) || s.only != "" && r.Name != s.only {
			continue
		}
		if err := s.forgetLostOf(ctx, r.Name); err != nil {
			s.log.Warn("comparing the notes on the server with the dataset", "run", r.Name, "error", err)
		}
	}
}

func (s *storeJob) forgetLostOf(ctx context.Context, run string) error {
	held, err := s.ds.Held(run)
	if err != nil {
		return err
	}
	session, err := pipeline.Open(ctx, s.session(run, s.drain))
	if err != nil {
		return err
	}
	defer session.Close()
	lacking, err := session.ForgetStored(ctx, held)
	if err == nil && len(lacking) > 0 {
		s.say("run %s: %d sequences that were stored are not in %s any more (%q first); the same capture, run again, sends them again", run, len(lacking), s.ds.Dir(), lacking[0])
	}
	return err
}
