package main

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/data"
)

const replayHelp = `usage: draftscope replay --dataset DIR [--run R] --drafter NAME=DIR... [flags]

Puts a stored capture through drafters, through the same stream and stage as a
live one, and adds what they draft to the dataset. The states are not touched.
Without --drafter, a capture of the shipped target meets the shipped drafters.

A run whose states are stored rounded (--states-encoding) gives its drafters
rounded states: their names get its name behind them, such as v3.int8, and the
report shows each beside the one that read the states as they were captured.

examples:
  draftscope replay --dataset ds --drafter v3=./v3
  draftscope replay --dataset ds --run r2 --drafter v3=./v3 --budgets 8,16,32 --anchors rounds
`

func cmdReplay(ctx context.Context, args []string, out streams) error {
	var f jobFlags
	flags := newFlags("replay", replayHelp, out)
	dataset := flags.String("dataset", "", "the dataset's `DIR`")
	flags.StringVar(&f.run, "run", "", "the `NAME` of the run to replay (default: the only one)")
	flags.StringVar(&f.target, "target", "", "the target's model `DIR`, whose embedding and head drafters use (default: where the run was captured from)")
	flags.IntVar(&f.limit, "limit", 0, "only the first `N` stored sequences, by id")
	flags.IntVar(&f.batchRows, "batch-rows", 64, "tokens in a batch of the stream, `N`")
	f.draftFlags(flags)
	f.commonFlags(flags)
	if err := parseNone(flags, args); err != nil {
		return err
	}
	if *dataset == "" {
		return badUsage("replay needs --dataset DIR, the folder that run or capture wrote with --out")
	}
	f.maxNew = 1 // nothing is generated
	return replayJob(ctx, newJob(f, out), *dataset)
}

func replayJob(ctx context.Context, j *job, dataset string) (err error) {
	// A dataset that cannot be replayed is told before anything is opened
	// for writing.
	record, err := pickRun(dataset, j.run)
	if err != nil {
		return err
	}
	j.run = record.Name
	if err := j.validate(); err != nil {
		return err
	}
	ctx, stop := j.signals(ctx)
	defer stop()
	defer collectOften()()
	defer func() { err = errors.Join(err, j.opened.Close()) }()
	j.rounded = record.Rounding
	if err := j.openModelsOf(record); err != nil {
		return err
	}
	if err := j.openDataset(dataset); err != nil {
		return err
	}
	if err := j.addDrafters(); err != nil {
		return err
	}
	want, total, err := j.toReplay()
	if err != nil {
		return err
	}
	if len(want) == 0 {
		j.say("run %s in %s is scored already by %s: %d sequences", j.run, dataset, strings.Join(j.names, ", "), total)
		return j.report(ctx)
	}
	source, err := j.ds.Replay(j.run, data.ReplayConfig{Want: func(id string) bool { return want[id] }, BatchRows: j.batchRows})
	if err != nil {
		return dataError(err)
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	sum, err := j.move(ctx, flow{source: source, total: len(want), score: true})
	if err != nil {
		return err
	}
	return j.conclude(ctx, sum)
}

// toReplay is what some drafter has not scored, of the first --limit
// sequences, and their number.
func (j *job) toReplay() (map[string]bool, int, error) {
	stored, err := j.ds.Stored(j.run)
	if err != nil {
		return nil, 0, dataError(err)
	}
	if j.limit > 0 && j.limit < len(stored) {
		ids := make([]string, 0, len(stored))
		for id := range stored {
			ids = append(ids, id)
		}
		slices.Sort(ids)
		for _, id := range ids[j.limit:] {
			delete(stored, id)
		}
	}
	inputs := map[string]bool{}
	for id := range stored {
		inputs[id] = true
	}
	if err := j.begin(inputs); err != nil {
		return nil, 0, err
	}
	want, err := j.unscored(stored)
	return want, len(stored), err
}

// pickRun finds a run of a dataset; no name means the only one.
func pickRun(dataset, name string) (data.Run, error) {
	ds, err := data.Open(dataset)
	if err != nil {
		return data.Run{}, dataError(err)
	}
	defer ds.Close()
	runs := ds.Runs()
	if name == "" {
		switch len(runs) {
		case 0:
			return data.Run{}, badUsage("dataset %s holds no run; capture one with \"draftscope capture --out %s\"", dataset, dataset)
		case 1:
			return runs[0], nil
		}
		var names []string
		for _, r := range runs {
			names = append(names, r.Name)
		}
		return data.Run{}, badUsage("dataset %s holds the runs %s; choose one: --run NAME, or DATASET:RUN where the command takes that", dataset, strings.Join(names, ", "))
	}
	r, err := ds.Run(name)
	return r, dataError(err)
}
