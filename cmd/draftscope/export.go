package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/extract/files"
	"github.com/draftscope/draftscope/schemas"
)

const exportHelp = `usage: draftscope export --dataset DIR [--run R] --format F --to FOLDER

Writes a run's states as another system reads them, into an empty folder.

  vllm         {seq_id}.safetensors: hidden_states [tokens, states, hidden] and token_ids
  speculators  hidden_states/hs_{n}.safetensors beside an Arrow data set of ids and
               loss masks; the run's last state must be the target's last
  specforge    rows_*/data_{n}.ckpt, samples for DFlash: input_ids, loss_mask, and
               hidden_states [1, tokens, states*hidden]
  specforge-eagle3
               rows_*/data_{n}.ckpt, samples for EAGLE3: input_ids, loss_mask,
               aux_hidden_state [1, tokens, 3*hidden], and the target's last state
               as hidden_state [1, tokens, hidden]; needs --target

States stand in ascending order and are all that the run has, or those of
--states. The last one is before the final norm, but in EAGLE3's samples, where
it is after it, as SpecForge's trainer wants it. speculators and vllm count them
as we do; for SpecForge, state c is layer id c-1.

examples:
  draftscope export --dataset ds --format speculators --to ./for-speculators
  draftscope export --dataset ds --run tapped --format specforge --to ./cache
  draftscope export --dataset ds --format specforge-eagle3 --states 2,18,33,36 --target ./Qwen3-8B --to ./cache
`

func cmdExport(ctx context.Context, args []string, out streams) (err error) {
	j := newJob(jobFlags{maxNew: 1, batchRows: 1, parts: 1, nats: "embedded"}, out)
	flags := newFlags("export", exportHelp, out)
	dataset := flags.String("dataset", defaultOut, "the dataset's `DIR`")
	name := flags.String("run", "", "the `NAME` of the run (default: the only one)")
	format := flags.String("format", "", "what is to read the files: vllm, speculators, specforge or specforge-eagle3 `NAME`")
	to := flags.String("to", "", "the `FOLDER` to write, empty or new")
	var chosen slotsFlag
	flags.Var(&chosen, "states", "which of the run's states to write, a `LIST` (default: all)")
	flags.StringVar(&j.target, "target", "", "for specforge-eagle3, the model `DIR` that the run is of")
	j.backendFlags(flags)
	if err := parseNone(flags, args); err != nil {
		return err
	}
	if *to == "" || *format == "" {
		return badUsage("export needs --format (vllm, speculators, specforge or specforge-eagle3) and --to FOLDER")
	}
	run, err := pickRun(*dataset, *name)
	if err != nil {
		return err
	}
	picked, err := pickStates(run, chosen)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.opened.Close()) }()
	if j.target != "" && *format == files.Eagle3 {
		if err := j.openTarget(j.target); err != nil {
			return err
		}
		if was, is := run.Fingerprints.Weights, j.model.Fingerprint(); was != "" && was != is {
			return badUsage("run %s is of a model with the fingerprint %.12s, and --target %s has %.12s", run.Name, was, j.target, is)
		}
	}
	ds, err := data.Open(*dataset)
	if err != nil {
		return dataError(err)
	}
	defer func() { err = errors.Join(err, ds.Close()) }()
	w, err := files.NewWriter(*format, *to, schemas.CaptureSpec{
		Run: run.Name, Hidden: run.Hidden, Layers: run.Layers, States: picked, DType: run.DType,
	}, j.model)
	if err != nil {
		return importError(err)
	}
	if run.Rounding != data.Lossless {
		fmt.Fprintf(out.stderr, "draftscope: run %s is stored rounded to %s, and so are the states that are written\n", run.Name, run.Rounding)
	}
	source, err := ds.Replay(run.Name, data.ReplayConfig{})
	if err != nil {
		return dataError(err)
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	if err := exportAll(ctx, source, picked, w); err != nil {
		return importError(err)
	}
	fmt.Fprintf(out.stdout, "%d sequences of run %s, states %v, written to %s for %s\n", w.Written(), run.Name, picked, *to, *format)
	return nil
}

// pickStates are those of the run's states that were chosen; all without a
// choice.
func pickStates(run data.Run, chosen []int) ([]int, error) {
	if len(chosen) == 0 {
		return run.States, nil
	}
	for i, c := range chosen {
		if !slices.Contains(run.States, c) {
			return nil, badUsage("--states names state %d, and run %s has %v", c, run.Name, run.States)
		} else if i > 0 && c <= chosen[i-1] {
			return nil, badUsage("--states %v is not ascending", chosen)
		}
	}
	return chosen, nil
}

// exportAll writes the picked states of what a replay gives.
func exportAll(ctx context.Context, source *data.ReplaySource, picked []int, w *files.Writer) error {
	var tokens []schemas.Token
	states := make([][]byte, len(picked))
	for {
		seq, rec, last, err := source.Next(ctx)
		if errors.Is(err, io.EOF) {
			return w.Close()
		}
		if err != nil {
			return err
		}
		if env, err := schemas.EnvelopeOf(rec); err == nil && env.Table == schemas.TableCapture {
			c, err := schemas.ReadCapture(rec)
			if err != nil {
				rec.Release()
				return err
			}
			tokens = append(tokens, c.Tokens...)
			for i, state := range picked {
				states[i] = append(states[i], c.States[slices.Index(c.Spec.States, state)]...)
			}
		}
		rec.Release()
		if !last {
			continue
		}
		if err := w.Write(seq, tokens, states); err != nil {
			return err
		}
		tokens, states = nil, make([][]byte, len(picked))
	}
}
