package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/extract/tap"
	"github.com/draftscope/draftscope/pipeline"
	"github.com/draftscope/draftscope/schemas"
)

const tapHelp = `usage: draftscope tap --socket PATH [--target DIR] [flags]

Captures the hidden states of a running engine's own traffic. The engine loads
the Python package draftscope-tap, which connects to PATH and sends the states
of every request, prefill and decode; this command checks them, and stores them
as a dataset at --out, or puts them into the stream at --nats.

With --target, the folder of the model that the engine runs, it computes a few
rows itself and refuses an engine whose states are not what it calls them; and
--drafter puts drafters on the traffic as it comes. Without, nothing is known
of the states but what the engine says. --check-only checks and counts
everything, and stores nothing: what a tap costs the engine, by itself.

Requests that do not finish leave a fault that says why. The first interrupt
ends the capture after the sequence at hand, a second one stops at once; the
engine serves on. docs/tap.md has the protocol.

examples:
  draftscope tap --socket /tmp/tap.sock --target ./Qwen3-8B --states 2,10,18,26,34,36 --out ds
  draftscope tap --socket /tmp/tap.sock --target ./Qwen3-8B --drafter v1=./v1 --out ds
  draftscope tap --socket /tmp/tap.sock --target ./Qwen3-8B --states 2,18,36 --nats nats://host:4222 --run r1 --sample 0.01
`

// tapJob is tap at work.
type tapJob struct {
	*job
	streamFlags
	socket    string
	once      bool
	checkOnly bool
	every     int
	memory    int64
	prefix    int64
	index     int64
	policy    tap.Policy

	acceptance acceptance
}

// tagFlag collects --tag K=V.
type tagFlag map[string]string

func (t tagFlag) String() string { return "" }

func (t tagFlag) Set(s string) error {
	k, v, ok := strings.Cut(s, "=")
	if !ok || k == "" {
		return errors.New("want KEY=VALUE, for example tenant=a")
	}
	t[k] = v
	return nil
}

func cmdTap(ctx context.Context, args []string, out streams) error {
	t := &tapJob{job: newJob(jobFlags{maxNew: 1, batchRows: 1}, out), policy: tap.Policy{Tags: map[string]string{}}}
	flags := newFlags("tap", tapHelp, out)
	t.tapFlags(flags)
	if err := parseNone(flags, args); err != nil {
		return err
	}
	switch {
	case t.socket == "":
		return badUsage("tap needs --socket PATH, where the engine connects; for example /tmp/tap.sock")
	case t.target == "" && len(t.drafters) > 0:
		return badUsage("--drafter needs --target DIR, the folder of the model that the engine runs")
	case t.target == "" && t.states.word != "" && t.states.word != "all":
		return badUsage("--states taps needs --target and drafters to take the taps from; say --states all, or a list such as 2,4,8")
	case t.nats != pipeline.Embedded && len(t.drafters) > 0:
		return badUsage("--drafter goes with a dataset at --out; at --nats, \"draftscope draft\" puts drafters on the run")
	case t.checkOnly && (len(t.drafters) > 0 || t.nats != pipeline.Embedded):
		return badUsage("--check-only stores nothing; leave out --drafter and --nats")
	case t.every < 0, t.memory < 0, t.prefix < 0, t.index < 0:
		return badUsage("--probe-every, --memory, --prefix-memory and --prefix-index must not be negative")
	}
	if err := errors.Join(t.validate(), badInput(t.policy.Validate())); err != nil {
		return err
	}
	return t.run(ctx)
}

func (t *tapJob) tapFlags(fs *flag.FlagSet) {
	fs.StringVar(&t.socket, "socket", "", "the unix socket's `PATH`")
	fs.StringVar(&t.target, "target", "", "the model `DIR` of what the engine runs: tests what the engine says of its states")
	fs.StringVar(&t.jobFlags.out, "out", defaultOut, "the dataset's `DIR`")
	fs.StringVar(&t.jobFlags.run, "run", "r1", "the `NAME` of this capture")
	t.states = statesFlag{word: "taps"}
	fs.Var(&t.states, "states", "which states to record: taps, all, or a `LIST` such as 0,2,8 (state c = after c layers, before the final norm)")
	t.dtype = oneOfFlag(fs, "dtype", "engine", "capture states as `TYPE`: engine (as it has them), f32, or bf16 (rounded)", "f32", "bf16")
	t.encoding = encodingFlag(fs)
	fs.Float64Var(&t.policy.Sample, "sample", 1, "keep this `SHARE` of the requests")
	fs.IntVar(&t.policy.MinTokens, "min-tokens", 0, "drop requests with fewer than `N` tokens")
	fs.IntVar(&t.policy.MaxTokens, "max-tokens", 0, "drop requests with more than `N` tokens (0: none)")
	fs.Var(tagFlag(t.policy.Tags), "tag", "keep only requests with this tag, `KEY=VALUE`; may be given more than once")
	fs.BoolVar(&t.policy.Redact, "redact", false, "do not store the text")
	fs.Int64Var(&t.memory, "memory", 1<<30, "hold at most `N` bytes of states that are not published yet")
	fs.Int64Var(&t.prefix, "prefix-memory", 256<<20, "keep `N` bytes of the latest requests' states, to complete those whose prefix the engine has cached (0: such requests are faults)")
	fs.Int64Var(&t.index, "prefix-index", 64<<20, "complete such requests from the dataset, too: index `N` bytes of token ids of what was stored last, four a token (0: none)")
	fs.IntVar(&t.every, "probe-every", 1000, "with --target, test the first sequence of an engine and one in `N` after it")
	fs.BoolVar(&t.checkOnly, "check-only", false, "check and count what comes, and store nothing")
	fs.BoolVar(&t.once, "once", false, "end when the engine that came has gone")
	t.draftFlags(fs)
	t.commonFlags(fs)
	t.register(fs)
}

func (t *tapJob) run(ctx context.Context) (err error) {
	ctx, stop := t.signals(ctx)
	defer stop()
	defer func() { err = errors.Join(err, t.opened.Close()) }()
	if t.target != "" {
		if err := t.openTarget(t.target); err != nil {
			return err
		}
		if len(t.drafters) > 0 {
			err = t.scoreWith()
		} else {
			err = t.demoTaps()
		}
		if err == nil {
			_, err = t.chooseStates()
		}
		if err != nil {
			return err
		}
	}
	l, err := tap.Listen(t.socket)
	if err != nil {
		return withCode(exitMissing, err)
	}
	t.opened.add(l)
	if t.nats == pipeline.Embedded && !t.checkOnly {
		if err := t.openDataset(t.jobFlags.out); err != nil {
			return err
		}
	}
	t.say("waiting for an engine at %s", t.socket)
	first, err := t.waitFor(ctx, l)
	if err != nil {
		return err
	}
	h := first.Hello
	t.say("engine %s %s (pid %d): %s, %d layers, hidden %d, %s", h.Engine, h.Version, h.PID, h.Model.Label, h.Model.Layers, h.Model.Hidden, h.DType)
	return t.capture(ctx, l, first)
}

// waitFor waits for the first engine.
func (t *tapJob) waitFor(ctx context.Context, l *tap.Listener) (*tap.Engine, error) {
	wait, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(wait, func() {})()
	go func() {
		select {
		case <-t.drain:
			cancel()
		case <-wait.Done():
		}
	}()
	first, err := l.Accept(wait, func(err error) { t.say("refused: %v", err) })
	if err != nil && wait.Err() != nil {
		return nil, exitError{exitPartial, errors.New("stopped before an engine came")}
	}
	return first, err
}

// capture opens what the states go to, welcomes the engine, and moves them.
func (t *tapJob) capture(ctx context.Context, l *tap.Listener, first *tap.Engine) (err error) {
	refuse := func(err error) error {
		first.Refuse(err)
		return err
	}
	dtype := schemas.DType(t.dtype.value)
	if t.dtype.value == "engine" {
		if dtype, err = tap.Kept(first.Hello.DType); err != nil {
			return refuse(err)
		}
	}
	states, err := t.wanted(first.Hello)
	if err != nil {
		return refuse(err)
	}
	config := tap.Config{
		Run: t.jobFlags.run, States: states, DType: dtype, Policy: t.policy, Target: t.model, Tokenizer: t.tok,
		ProbeEvery: t.every, Memory: t.memory, PrefixMemory: t.prefix, Once: t.once, Log: t.log,
	}
	if t.checkOnly {
		return t.check(ctx, l, first, config)
	}
	var session *pipeline.Session
	if t.nats == pipeline.Embedded {
		session, err = pipeline.Open(ctx, pipeline.Config{
			Run: t.jobFlags.run, URL: t.nats, Dir: filepath.Join(t.ds.Dir(), "stream"), Partitions: t.parts,
			CommitIdle: commitIdle, OnFault: t.faults.add, Logger: t.log,
		})
	} else {
		cfg := t.config(t.job)
		cfg.Drain = nil // the source drains
		session, err = pipeline.Open(ctx, cfg)
	}
	if err != nil {
		return refuse(jobError(err))
	}
	t.opened.add(session)
	record := t.record(first.Hello, states, dtype)
	if record.Profile, err = t.profile(record, someTexts(t.tok)); err != nil {
		return refuse(err)
	}
	if t.ds == nil {
		err = t.describeRun(ctx, session, record)
	} else if record.Rounding, err = roundingOf(t.encoding, dtype); err == nil {
		if err = dataError(t.ds.AddRun(record)); err == nil {
			err = errors.Join(t.addDrafters(), t.begin(nil))
		}
	}
	if err != nil {
		return refuse(err)
	}
	if t.ds != nil && t.prefix > 0 && t.index > 0 {
		prefixes, err := t.ds.Prefixes(record.Name, t.index, func(r data.Run) bool { return lends(r, record) })
		if err != nil {
			return refuse(dataError(err))
		}
		config.Stored = prefixes
		defer t.indexing(ctx, prefixes)()
	}
	source, err := tap.NewSource(l, first, config)
	if err != nil {
		return tapError(err)
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	closeHTTP, err := t.serveStatus(newMonitor().with(t.jobFlags.run, session), source)
	if err != nil {
		return err
	}
	defer closeHTTP()
	return t.conclude(ctx, source, func() (pipeline.Summary, error) { return t.move(ctx, session, source) })
}

func (t *tapJob) serveStatus(mon *monitor, source *tap.Source) (closeHTTP func(), err error) {
	mon.more = func(w io.Writer) []metric {
		return append(tapMetrics(w, t.jobFlags.run, source.Status()), t.acceptance.metrics(w, t.jobFlags.run)...)
	}
	return serveHTTP(t.http, t.say, mon)
}

// check is a capture that stores nothing.
func (t *tapJob) check(ctx context.Context, l *tap.Listener, first *tap.Engine, config tap.Config) (err error) {
	defer collectOften()()
	source, err := tap.NewSource(l, first, config)
	if err != nil {
		return tapError(err)
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	closeHTTP, err := t.serveStatus(newMonitor(), source)
	if err != nil {
		return err
	}
	defer closeHTTP()
	return t.conclude(ctx, source, func() (sum pipeline.Summary, err error) {
		for {
			_, rec, _, err := source.Next(ctx)
			switch {
			case errors.Is(err, io.EOF):
				return sum, nil
			case err != nil:
				return sum, err
			}
			rec.Release()
		}
	})
}

// conclude moves the states until the end, and says what came of it.
func (t *tapJob) conclude(ctx context.Context, source *tap.Source, move func() (pipeline.Summary, error)) error {
	quiet := t.watch(source)
	stop := make(chan struct{})
	go func() {
		select {
		case <-t.drain:
			source.Drain()
		case <-stop:
		}
	}()
	sum, err := move()
	close(stop)
	quiet()
	c, what := source.Status().Counts, "stored"
	switch {
	case t.checkOnly:
		what = "checked and not stored,"
	case err != nil:
		what = "handed on, of which the last may not have been stored,"
	}
	fmt.Fprintf(t.out.stdout, "run %s: %d requests began, %d finished, %d aborted, %d shed by the engine; %d %s with %d tokens, %d not wanted, %d tombstones, %d faults\n",
		t.jobFlags.run, c.Begun, c.Finished, c.Aborted, c.Shed, c.Stored, what, c.StoredRows, c.Dropped, c.Tombstones, c.Faults)
	switch {
	case err != nil && ctx.Err() != nil:
		return exitError{exitPartial, fmt.Errorf("stopped: %w", err)}
	case err != nil:
		return tapError(err)
	case len(t.names) > 0:
		return t.job.conclude(ctx, sum)
	case t.ds != nil && !t.checkOnly && c.Faults+c.Tombstones == 0:
		return t.finish(sum)
	case c.Faults+c.Tombstones > 0:
		return exitError{exitPartial, fmt.Errorf("%d requests did not finish and %d were set aside; the table faults says why", c.Tombstones, c.Faults)}
	}
	return nil
}

func (t *tapJob) move(ctx context.Context, session *pipeline.Session, source pipeline.Source) (sum pipeline.Summary, err error) {
	if t.ds == nil {
		return session.Publish(ctx, source)
	}
	var newStage pipeline.NewStage
	if len(t.names) > 0 {
		newStage = t.newStage
	}
	sum, err = session.Run(ctx, source, newStage, func(stream string, partition int) (pipeline.Sink, error) {
		created, err := session.StreamCreated(ctx, stream)
		if err != nil {
			return nil, err
		}
		cfg := data.SinkConfig{Stream: pipeline.StreamName(t.jobFlags.run, stream), StreamCreated: created}
		if stream == pipeline.ResultsStream {
			sink, err := t.ds.ResultSink(t.jobFlags.run, partition, cfg)
			if err != nil {
				return nil, err
			}
			return acceptanceSink{sink, &t.acceptance}, nil
		}
		return t.ds.CaptureSink(t.jobFlags.run, partition, cfg)
	})
	return sum, errors.Join(err, t.ds.AddFaults(t.jobFlags.run, t.faults.list))
}

// watch says now and then how far the capture has come.
func (t *tapJob) watch(source *tap.Source) (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	say := func(last string) string {
		s := source.Status()
		line := fmt.Sprintf("%d engines, %d requests open, %d waiting, %d MiB held; %d stored, %d tokens, %d shed, %d tombstones, %d faults",
			s.Engines, s.Open, s.Waiting, s.Memory>>20, s.Stored, s.StoredRows, s.Shed, s.Tombstones, s.Faults)
		if line != last {
			t.say("%s", line)
		}
		return line
	}
	go func() {
		defer close(ended)
		tick := time.NewTicker(5 * time.Second)
		defer tick.Stop()
		last := ""
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				last = say(last)
			}
		}
	}()
	return func() { close(done); <-ended }
}

// wanted turns --states into numbers.
func (t *tapJob) wanted(h tap.Hello) ([]int, error) {
	if t.model != nil {
		return t.chooseStates()
	}
	if t.states.word == "all" {
		var all []int
		for c := range h.Model.Layers + 1 {
			all = append(all, c)
		}
		return all, nil
	}
	for _, c := range t.states.list {
		if c > h.Model.Layers {
			return nil, badUsage("--states names state %d, and the engine's model has states 0 to %d", c, h.Model.Layers)
		}
	}
	return t.states.list, nil
}

// record says how the run's states come to be.
func (t *tapJob) record(h tap.Hello, states []int, dtype schemas.DType) data.Run {
	r := data.Run{
		Name: t.jobFlags.run, Target: h.Model.Label, States: states, Layers: h.Model.Layers, Hidden: h.Model.Hidden,
		FinalNorm: data.FinalPreNorm, DType: dtype, Engine: h.Engine, EngineVersion: h.Version,
		Fingerprints: data.Fingerprints{Weights: h.Model.Fingerprint},
		Options: map[string]string{
			"engine_dtype": h.DType, "redact": strconv.FormatBool(t.policy.Redact), "sample": fmt.Sprint(t.policy.Sample),
			"tested": strconv.FormatBool(t.model != nil),
		},
	}
	if t.model != nil {
		r.Target, r.Fingerprints.Weights = t.place.label, t.model.Fingerprint()
	}
	if t.tok != nil {
		r.Fingerprints.Tokenizer = t.tok.Fingerprint()
	}
	return r
}

// indexing reads what is stored beside the capture. The capture goes on
// without what cannot be read.
func (t *tapJob) indexing(ctx context.Context, prefixes *data.Prefixes) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := prefixes.Index(ctx); err != nil && ctx.Err() == nil {
			t.log.Warn("the dataset's prefixes are not known", "reason", err)
		}
	}()
	return func() { cancel(); <-ended }
}

// lends says whether an engine computed the rows of another run as it does
// those of this one: it was the same, with the same weights, and was tested
// where this one is.
func lends(r, to data.Run) bool {
	same := func(option string) bool { return r.Options[option] == to.Options[option] }
	return to.Fingerprints.Weights != "" && r.Fingerprints.Weights == to.Fingerprints.Weights &&
		r.Engine == to.Engine && r.EngineVersion == to.EngineVersion && same("engine_dtype") && (same("tested") || r.Options["tested"] == "true")
}

// tapError gives an error of the tap its exit code.
func tapError(err error) error {
	if errors.Is(err, tap.ErrClaim) || errors.Is(err, tap.ErrConfig) || errors.Is(err, tap.ErrProtocol) {
		return badInput(err)
	}
	return jobError(err)
}

var _ io.Closer = (*tap.Listener)(nil)
