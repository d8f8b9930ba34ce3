package main

import (
	"context"
	"errors"
	"fmt"
	"io"

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

States stand in ascending order and are all that the run has; the last one is
before the final norm. speculators and vllm count them as we do; for SpecForge,
state c is layer id c-1.

examples:
  draftscope export --dataset ds --format speculators --to ./for-speculators
  draftscope export --dataset ds --run tapped --format specforge --to ./cache
`

func cmdExport(ctx context.Context, args []string, out streams) (err error) {
	flags := newFlags("export", exportHelp, out)
	dataset := flags.String("dataset", defaultOut, "the dataset's `DIR`")
	name := flags.String("run", "", "the `NAME` of the run (default: the only one)")
	format := flags.String("format", "", "what is to read the files: vllm, speculators or specforge `NAME`")
	to := flags.String("to", "", "the `FOLDER` to write, empty or new")
	if err := parseNone(flags, args); err != nil {
		return err
	}
	if *to == "" || *format == "" {
		return badUsage("export needs --format (vllm, speculators or specforge) and --to FOLDER")
	}
	run, err := pickRun(*dataset, *name)
	if err != nil {
		return err
	}
	ds, err := data.Open(*dataset)
	if err != nil {
		return dataError(err)
	}
	defer func() { err = errors.Join(err, ds.Close()) }()
	w, err := files.NewWriter(*format, *to, schemas.CaptureSpec{
		Run: run.Name, Hidden: run.Hidden, Layers: run.Layers, States: run.States, DType: run.DType,
	})
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
	if err := exportAll(ctx, source, w); err != nil {
		return importError(err)
	}
	fmt.Fprintf(out.stdout, "%d sequences of run %s, states %v, written to %s for %s\n", w.Written(), run.Name, run.States, *to, *format)
	return nil
}

// exportAll writes what a replay gives.
func exportAll(ctx context.Context, source *data.ReplaySource, w *files.Writer) error {
	var tokens []schemas.Token
	var states [][]byte
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
			if states == nil {
				states = make([][]byte, len(c.States))
			}
			for i, raw := range c.States {
				states[i] = append(states[i], raw...)
			}
		}
		rec.Release()
		if !last {
			continue
		}
		if err := w.Write(seq, tokens, states); err != nil {
			return err
		}
		tokens, states = nil, nil
	}
}
