package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"sync"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/pipeline"
)

const draftHelp = `usage: draftscope draft --nats URL [--run R] [--drafter NAME=DIR...] [flags]

Puts the captures of a run on a server through drafters, as one of any number
of workers, on any machine. The workers of a group share the run's partitions;
when one dies, another goes on from its last complete sequence within seconds.
Workers with the same drafters and options are one group by themselves.

It waits for the run to begin and works until it is interrupted, or with
--once until the run has ended and its group has drafted on all of it.

examples:
  draftscope draft --nats nats://host:4222 --run r1
  draftscope draft --nats nats://host:4222 --run r1 --target ./qwen --drafter v1=./v1 --once
`

func cmdDraft(ctx context.Context, args []string, out streams) error {
	var f jobFlags
	flags := newFlags("draft", draftHelp, out)
	flags.StringVar(&f.run, "run", "r1", "the `NAME` of the run")
	flags.StringVar(&f.target, "target", "", "the target's model `DIR`, whose embedding and head drafters use (default: where the run was captured from)")
	f.draftFlags(flags)
	f.backendFlags(flags)
	flags.StringVar(&f.nats, "nats", "", "the JetStream server's `URL`")
	flags.IntVar(&f.parts, "parallel", 1, "`N` partitions at once, each with a copy of the drafters")
	group := flags.String("group", "", "the group's `NAME` (default: one for each set of drafters and options)")
	once := flags.Bool("once", false, "end when the run has ended and the group is through")
	var s streamFlags
	s.register(flags)
	s.readerFlags(flags)
	if err := parseNone(flags, args); err != nil {
		return err
	}
	f.maxNew, f.batchRows = 1, 1 // nothing is captured
	return draftJob(ctx, newJob(f, out), s, *group, *once)
}

func draftJob(ctx context.Context, j *job, s streamFlags, group string, once bool) (err error) {
	if err := needServer(j.nats); err != nil {
		return err
	}
	if j.parts < 1 || j.parts > maxPartitions {
		return badUsage("--parallel must be 1 to %d, not %d", maxPartitions, j.parts)
	}
	if err := j.validate(); err != nil {
		return err
	}
	if group != "" && !safeName.MatchString(group) {
		return badUsage("--group %q may only hold letters, digits, dot, dash and underscore", group)
	}
	ctx, stop := j.signals(ctx)
	defer stop()
	defer collectOften()()
	defer func() { err = errors.Join(err, j.opened.Close()) }()
	cfg := s.config(j)
	cfg.Once = once
	session, err := pipeline.Open(ctx, cfg)
	if err != nil {
		return jobError(err)
	}
	j.opened.add(session)
	record, err := j.awaitRun(ctx, session)
	if ctx.Err() != nil || err == nil && record == nil {
		return exitError{exitPartial, errors.New("stopped before the run began")}
	}
	if err != nil {
		return err
	}
	j.remote = *record
	if err := j.openModelsOf(*record); err != nil {
		return err
	}
	if group, err = j.joinGroup(ctx, session, group); err != nil {
		return err
	}
	mon := newMonitor().with(j.run, session)
	if s.http != "" {
		if j.effort, err = measureEffort(j.run, j.devs[0]); err != nil {
			return err
		}
		mon.more = j.effort.metrics
	}
	closeHTTP, err := serveHTTP(s.http, j.say, mon)
	if err != nil {
		return err
	}
	defer closeHTTP()
	j.say("drafting on run %s as a worker of group %s", j.run, group)
	shared := sharedStages{job: j, stages: map[int]pipeline.Stage{}, locks: make([]sync.Mutex, j.parts)}
	err = session.Work(ctx, group, shared.of)
	if err != nil && ctx.Err() != nil {
		return exitError{exitPartial, fmt.Errorf("stopped; other workers, or the same command, go on from here: %w", err)}
	}
	if err != nil {
		return jobError(err)
	}
	fmt.Fprintf(j.out.stdout, "run %s, group %s: %d sequences drafted on here\n", j.run, group, session.Progress().Processed)
	if once && j.drained() {
		return exitError{exitPartial, errors.New("stopped early; other workers, or the same command, go on from here")}
	}
	return nil
}

// awaitRun waits until the run's source has described it; nil when told to
// stop before.
func (j *job) awaitRun(ctx context.Context, session *pipeline.Session) (*data.Run, error) {
	r, ok, err := runRecord(ctx, session)
	if err == nil && !ok {
		j.say("waiting for run %s to begin on %s", j.run, j.nats)
		if ok, err = session.AwaitDescription(ctx); ok {
			r, ok, err = runRecord(ctx, session)
		}
	}
	if err != nil || !ok {
		return nil, jobError(err)
	}
	return &r, nil
}

// joinGroup says on the server what the group drafts with, and makes sure that
// its other workers do the same.
func (j *job) joinGroup(ctx context.Context, session *pipeline.Session, group string) (string, error) {
	drafters := j.drafterRecords()
	for i := range drafters {
		drafters[i].Source = "" // another machine's folder may be another
	}
	key, err := json.Marshal(drafters)
	if err != nil {
		return "", err
	}
	if group == "" {
		h := fnv.New32a()
		h.Write(key)
		group = fmt.Sprintf("auto-%08x", h.Sum32())
	}
	about, err := json.Marshal(j.drafterRecords())
	if err != nil {
		return "", err
	}
	inForce, err := session.DescribeGroup(ctx, group, about)
	if err != nil {
		return "", jobError(err)
	}
	var have []data.Drafter
	if err := json.Unmarshal(inForce, &have); err != nil {
		return "", fmt.Errorf("reading the description of group %s on the server: %w", group, err)
	}
	for i := range have {
		have[i].Source = ""
	}
	if haveKey, err := json.Marshal(have); err != nil || !bytes.Equal(haveKey, key) {
		return "", badUsage("the other workers of group %s of run %s draft with other drafters or options; give another --group", group, j.run)
	}
	return group, nil
}

// sharedStages hands out a stage for each partition. Partitions that share a
// device and its drafters take turns.
type sharedStages struct {
	job    *job
	mu     sync.Mutex
	stages map[int]pipeline.Stage
	locks  []sync.Mutex // by set of drafters
}

func (s *sharedStages) of(partition int) (pipeline.Stage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if stage := s.stages[partition]; stage != nil {
		return stage, nil
	}
	set := partition % len(s.locks)
	stage, err := s.job.newStage(set)
	if err != nil {
		return nil, err
	}
	s.stages[partition] = &turnStage{stage, &s.locks[set]}
	return s.stages[partition], nil
}

// turnStage works while it holds the lock.
type turnStage struct {
	stage pipeline.Stage
	turn  *sync.Mutex
}

func (t *turnStage) Process(ctx context.Context, seq string, rec arrow.Record, emit func(arrow.Record) error) error {
	t.turn.Lock()
	defer t.turn.Unlock()
	return t.stage.Process(ctx, seq, rec, emit)
}

func (t *turnStage) End(ctx context.Context, seq string, emit func(arrow.Record) error) error {
	t.turn.Lock()
	defer t.turn.Unlock()
	return t.stage.End(ctx, seq, emit)
}

func (t *turnStage) Drop(seq string) {
	t.turn.Lock()
	defer t.turn.Unlock()
	t.stage.Drop(seq)
}
