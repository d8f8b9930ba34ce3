package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/draftscope/draftscope/cmd/demo"
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/pipeline"
	"github.com/draftscope/draftscope/schemas"
)

const runHelp = `usage: draftscope run [flags]

Runs a target on prompts (or given token ids), captures its hidden states,
streams them through JetStream, drafts on them with every drafter version,
scores the drafts, stores all of it as Parquet, and reports which drafter is
better, and where. Without flags it uses the shipped model and prompts.

Ctrl-C finishes what was begun and leaves a valid dataset; the same command
goes on from there. The first interrupt drains, a second one stops at once.

examples:
  draftscope run
  draftscope run --limit 4 --budgets 8,32 --out ds
  draftscope run --target ./qwen --drafter v1=./v1 --drafter v2=./v2 --prompts prompts.jsonl --out ds
  draftscope run --sequences sequences.jsonl --nats nats://host:4222 --out ds
`

const captureHelp = `usage: draftscope capture [flags]

Captures a target's hidden states into a dataset, without drafters; put
drafters on it later with "draftscope replay". With the shipped model the
default --states taps means the taps of the shipped drafters.

With --stream-only the captures go into the stream at --nats and no dataset is
written here: "draftscope serve" or "store" writes it, on any machine, and any
number of "draftscope draft" put drafters on it.

examples:
  draftscope capture --states all --out ds
  draftscope capture --target ./qwen --prompts prompts.jsonl --states 2,17,32,47,62,64 --dtype bf16 --out ds
  draftscope capture --stream-only --nats nats://host:4222 --run r1
  draftscope capture --stream-only --nats nats://host:4222 --run r2 --max-bytes 50000000000 --when-full shed
`

func cmdRun(ctx context.Context, args []string, out streams) error {
	var j jobFlags
	flags := newFlags("run", runHelp, out)
	j.captureFlags(flags)
	j.draftFlags(flags)
	j.commonFlags(flags)
	if err := parseNone(flags, args); err != nil {
		return err
	}
	return captureJob(ctx, newJob(j, out), true)
}

func cmdCapture(ctx context.Context, args []string, out streams) error {
	var j jobFlags
	flags := newFlags("capture", captureHelp, out)
	j.captureFlags(flags)
	j.commonFlags(flags)
	var s streamFlags
	streamOnly := flags.Bool("stream-only", false, "publish into the stream at --nats, and write no dataset")
	s.register(flags)
	s.sourceFlags(flags)
	if err := parseNone(flags, args); err != nil {
		return err
	}
	if *streamOnly && j.encoding.value != encodingLossless {
		return badUsage("--states-encoding goes with what stores the states: give it to \"draftscope serve\" or \"store\"")
	}
	if *streamOnly {
		return streamJob(ctx, newJob(j, out), s)
	}
	if s != (streamFlags{whenFull: s.whenFull}) || s.whenFull.value != "block" {
		return badUsage("--max-bytes, --max-age, --when-full, --replicas and --http go with --stream-only")
	}
	return captureJob(ctx, newJob(j, out), false)
}

// captureJob is run, and capture when it does not score.
func captureJob(ctx context.Context, j *job, score bool) (err error) {
	if err := j.validate(); err != nil {
		return err
	}
	rounding, err := roundingOf(j.encoding, schemas.DType(j.dtype.value))
	if err != nil {
		return err
	}
	ctx, stop := j.signals(ctx)
	defer stop()
	defer collectOften()()
	defer func() { err = errors.Join(err, j.opened.Close()) }()
	inputs, err := j.inputs()
	if err != nil {
		return err
	}
	if err := j.openTarget(j.target); err != nil {
		return err
	}
	if score {
		if err := j.scoreWith(); err != nil {
			return err
		}
	} else if err := j.demoTaps(); err != nil {
		return err
	}
	// The inputs are checked against the model before anything is written.
	source, err := j.newSource(inputs)
	if err != nil {
		return jobError(err)
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	if err := j.openDataset(j.jobFlags.out); err != nil {
		return err
	}
	states, err := j.chooseStates()
	if err != nil {
		return err
	}
	record := j.record(states)
	record.Rounding = rounding
	if record.Profile, err = j.profile(record, beginnings(source)); err != nil {
		return err
	}
	if err := j.ds.AddRun(record); err != nil {
		return dataError(err)
	}
	sum, err := j.capture(ctx, source, states, score)
	if err != nil {
		return err
	}
	return j.conclude(ctx, sum)
}

// capture moves what is not stored or scored yet.
func (j *job) capture(ctx context.Context, source *target.Source, states []int, score bool) (sum pipeline.Summary, err error) {
	stored, err := j.ds.Stored(j.run)
	if err != nil {
		return sum, dataError(err)
	}
	inputs := source.Beginnings()
	if err := j.sameInputs(inputs, stored); err != nil {
		return sum, err
	}
	wanted := map[string]bool{}
	for _, in := range inputs {
		wanted[in.ID] = true
	}
	if err := j.begin(wanted); err != nil {
		return sum, err
	}
	left := map[string]bool{} // stored and wanted, but not scored by all
	if score {
		if err := j.addDrafters(); err != nil {
			return sum, err
		}
		if left, err = j.unscored(stored); err != nil {
			return sum, err
		}
		maps.DeleteFunc(left, func(id string, _ bool) bool { return !wanted[id] })
	}
	// What is stored rounded would give other scores than what was captured:
	// such sequences go through the target again. Their captures are equal
	// repeats.
	again := map[string]bool{}
	if run, err := j.ds.Run(j.run); err != nil {
		return sum, dataError(err)
	} else if run.Rounding != data.Lossless {
		left, again = again, left
	}
	if err := source.Choose(states, func(id string) bool { _, ok := stored[id]; return ok && !again[id] }); err != nil {
		return sum, jobError(err)
	}
	if err := j.idle(source.Idle(), len(wanted)); err != nil {
		return sum, err
	}
	total := source.Remaining() + len(left)
	if total == 0 {
		j.say("run %s in %s is complete already: %d sequences", j.run, j.ds.Dir(), len(wanted))
		return sum, nil
	}
	if done := len(wanted) - total; done > 0 {
		j.say("resuming run %s in %s: %d of %d sequences are done already", j.run, j.ds.Dir(), done, len(wanted))
	}
	sources := chain{source}
	if len(left) > 0 {
		replay, err := j.ds.Replay(j.run, data.ReplayConfig{Want: func(id string) bool { return left[id] }, BatchRows: j.batchRows})
		if err != nil {
			return sum, dataError(err)
		}
		defer func() { err = errors.Join(err, replay.Close()) }()
		sources = chain{replay, source}
	}
	return j.move(ctx, flow{source: &sources, total: total, score: score, capture: true})
}

// newSource is the target's source of captures. Which states it records, of
// which of the inputs, is chosen later.
func (j *job) newSource(inputs []target.Input) (*target.Source, error) {
	if j.tok == nil && j.sequences == "" {
		return nil, badUsage("target %s has no tokenizer.json, which prompts need; put it beside config.json, or give token ids with --sequences", j.place.label)
	}
	return target.NewSource(target.SourceConfig{
		Model: j.model, Tokenizer: j.tok, Inputs: inputs, Run: j.run, DType: schemas.DType(j.dtype.value),
		BatchRows: j.batchRows, MaxNewTokens: j.maxNew, Temperature: float32(j.temp), Seed: uint64(j.seed), Redact: j.redact, LastTurn: j.lastTurn,
	})
}

// idle lists the sequences of which nothing is supervised. Where it is all of
// them, there is nothing to score.
func (j *job) idle(ids []string, of int) error {
	if len(ids) == 0 {
		return nil
	}
	if len(ids) == of {
		return badUsage("no label of the %d sequences is supervised: there is nothing to score; a loss mask is 1 at the tokens of replies, and token 0 is no label", of)
	}
	const most = 8
	j.say("unsupervised, and counted nowhere: %s (%d of %d sequences)", strings.Join(ids[:min(most, len(ids))], ", "), len(ids), of)
	return nil
}

// demoTaps reads the taps of the shipped drafters, which are what --states
// taps means to a capture of the shipped target.
func (j *job) demoTaps() error {
	if j.states.word != "taps" || j.place.label != demoTarget {
		return nil
	}
	if err := j.openDrafters(); err != nil {
		return err
	}
	j.names = nil
	return nil
}

// record says how the run's states come to be. How they are rounded is the
// affair of who stores them.
func (j *job) record(states []int) data.Run {
	c := j.model.Config()
	kind, _, _ := strings.Cut(j.dev.Name(), " (")
	prints := data.Fingerprints{Weights: j.model.Fingerprint()}
	if j.tok != nil {
		prints.Tokenizer, prints.Template = j.tok.Fingerprint(), "chatml"
	}
	options := map[string]string{
		"device": kind, "max_new": strconv.Itoa(j.maxNew), "temperature": fmt.Sprint(j.temp),
		"seed": strconv.FormatInt(j.seed, 10), "redact": strconv.FormatBool(j.redact),
	}
	if j.lastTurn {
		options["last_turn"] = "true"
	}
	if j.model.Chunk != 1 && slices.Contains(c.Attends, false) {
		options["delta_chunk"] = strconv.Itoa(j.model.Chunk)
	}
	return data.Run{
		Name: j.run, Target: j.place.label, States: states, Layers: c.Layers, Hidden: c.Hidden,
		FinalNorm: data.FinalPreNorm, DType: schemas.DType(j.dtype.value),
		Engine: "draftscope", EngineVersion: numerics,
		Fingerprints: prints,
		Options:      options,
	}
}

// inputs reads what is to be captured.
func (j *job) inputs() ([]target.Input, error) {
	read, name := target.ReadPrompts, j.prompts
	if j.sequences != "" {
		read, name = target.ReadSequences, j.sequences
	}
	var r io.ReadCloser
	var err error
	switch {
	case name != "":
		r, err = os.Open(name)
	case j.target == "" || j.target == demoTarget:
		name = "prompts.jsonl of the demo"
		r, err = demo.FS().Open("prompts.jsonl")
	default:
		return nil, badUsage("no input: give --prompts FILE.jsonl or --sequences FILE.jsonl")
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, badUsage("there is no file %s; give a JSONL file, one object a line", name)
	}
	if err != nil {
		return nil, badInput(fmt.Errorf("opening %s: %w", name, err))
	}
	defer r.Close()
	inputs, err := read(r, name)
	if err != nil {
		return nil, badInput(err)
	}
	if j.limit > 0 && j.limit < len(inputs) {
		inputs = inputs[:j.limit]
	}
	return slices.Clip(inputs), nil
}
