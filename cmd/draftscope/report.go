package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/draftscope/draftscope/data/query"
	"github.com/draftscope/draftscope/data/report"
)

const reportHelp = `usage: draftscope report --dataset DIR [--run R] [--json] [--html FILE]

Prints what a dataset says about its drafters: accuracy by slot, acceptance by
method and budget, losses, and drafter against drafter with 95 % intervals.
--html writes the same with plots, as one file that needs nothing else.

examples:
  draftscope report --dataset ds
  draftscope report --dataset ds --json | jq '.runs[0].drafters[].drafter'
  draftscope report --dataset ds --html report.html
`

func cmdReport(ctx context.Context, args []string, out streams) error {
	flags := newFlags("report", reportHelp, out)
	dir := flags.String("dataset", defaultOut, "the dataset's `DIR`")
	run := flags.String("run", "", "only the run of this `NAME`")
	asJSON := flags.Bool("json", false, "print JSON")
	html := flags.String("html", "", "also write an HTML `FILE`")
	if err := parseNone(flags, args); err != nil {
		return err
	}
	return writeReport(ctx, out, *dir, *run, *asJSON, *html)
}

func writeReport(ctx context.Context, out streams, dir, run string, asJSON bool, html string) error {
	db, err := openDB(ctx, dir, out)
	if err != nil {
		return err
	}
	defer db.Close()
	r, err := report.Build(ctx, db, report.Options{Run: run})
	if err != nil {
		if errors.Is(err, report.ErrNoRun) {
			return badInput(err)
		}
		return err
	}
	if html != "" {
		if err := writeFile(html, func(f *os.File) error { return report.WriteHTML(f, r) }); err != nil {
			return err
		}
		fmt.Fprintf(out.stderr, "wrote %s\n", html)
	}
	if asJSON {
		return report.WriteJSON(out.stdout, r)
	}
	return report.WriteText(out.stdout, r)
}

// writeFile writes a file whole, or leaves what was there.
func writeFile(path string, write func(*os.File) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".draftscope-*")
	if err != nil {
		return withCode(exitMissing, fmt.Errorf("writing %s: %w", path, err))
	}
	err = errors.Join(write(f), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(withCode(exitMissing, fmt.Errorf("writing %s: %w", path, err)), os.Remove(f.Name()))
	}
	return nil
}

// report prints what the job's dataset says now. A program without DuckDB
// has done its work all the same, and says what it cannot do.
func (j *job) report(ctx context.Context) error {
	if ctx.Err() != nil {
		return exitError{exitPartial, errors.New("stopped; the same command goes on from here")}
	}
	err := writeReport(ctx, j.out, j.ds.Dir(), j.run, j.json, "")
	switch {
	case errors.Is(err, query.ErrNoDuckDB):
		j.say("no report: %v", err)
		return nil
	case err != nil && ctx.Err() != nil:
		return exitError{exitPartial, errors.New("stopped while reporting; everything is stored")}
	}
	if err == nil {
		j.say("dataset %s; next: draftscope report --dataset %s --html report.html", j.ds.Dir(), j.ds.Dir())
	}
	return err
}
