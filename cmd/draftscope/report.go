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

const reportHelp = `usage: draftscope report --dataset DIR [--run R] [--json] [--html FILE] [--target T]

Prints what a dataset says about its drafters: accuracy by slot, acceptance by
method and budget, losses, and drafter against drafter with 95 % intervals.
--html writes the same with plots, as one file that needs nothing else: the
leader board, slots, budgets against their cost, acceptance over time and by tag,
compared captures, and a few texts coloured by what became of each draft. Their
words need the target's tokenizer; without it they are numbers.

Exit status: 4 when files were left out of the numbers, which stderr names.

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
	target := flags.String("target", "", "the target's model `DIR`, for the words of the texts (default: where each run was captured from)")
	if err := parseNone(flags, args); err != nil {
		return err
	}
	if st, err := os.Stat(*html); err == nil && st.IsDir() {
		return badUsage("--html %s is a folder; name a file in it, such as %s", *html, filepath.Join(*html, "report.html"))
	}
	if *target != "" {
		if _, err := targetPlace(*target); err != nil {
			return err
		}
	}
	return writeReport(ctx, out, reportJob{dir: *dir, run: *run, json: *asJSON, html: *html, target: *target})
}

// reportJob is what a report is written of, and how.
type reportJob struct {
	dir, run string
	json     bool
	html     string // a file, "" for none
	target   string
}

// readTexts is how many sequences of a run a page reads token by token.
const readTexts = 3

func writeReport(ctx context.Context, out streams, r reportJob) error {
	db, err := openQuietly(ctx, r.dir) // what it leaves out is in the report
	if err != nil {
		return err
	}
	defer db.Close()
	opt := report.Options{Run: r.run}
	if r.html != "" {
		opt.Texts, opt.Decode = readTexts, decoder(r.dir, r.target)
	}
	built, err := report.Build(ctx, db, opt)
	if err != nil {
		if errors.Is(err, report.ErrNoRun) {
			return badInput(err)
		}
		return err
	}
	if r.html != "" {
		if err := writeFile(r.html, func(f *os.File) error { return report.WriteHTML(f, built) }); err != nil {
			return err
		}
		fmt.Fprintf(out.stderr, "wrote %s\n", r.html)
	}
	write := report.WriteText
	if r.json {
		write = report.WriteJSON
	}
	if err := write(out.stdout, built); err != nil {
		return err
	}
	return leftOut(db.Warnings())
}

// writeFile writes a file whole, or leaves what was there.
func writeFile(path string, write func(*os.File) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".draftscope-*")
	if err != nil {
		return placed(fmt.Errorf("writing %s: %w", path, err))
	}
	err = errors.Join(write(f), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(placed(fmt.Errorf("writing %s: %w", path, err)), os.Remove(f.Name()))
	}
	return nil
}

// report prints what the job's dataset says now. A program without DuckDB
// has done its work all the same, and says what it cannot do.
func (j *job) report(ctx context.Context) error {
	if ctx.Err() != nil {
		return exitError{exitPartial, errors.New("stopped; the same command goes on from here")}
	}
	err := writeReport(ctx, j.out, reportJob{dir: j.ds.Dir(), run: j.run, json: j.json})
	switch {
	case errors.Is(err, query.ErrNoDuckDB):
		return j.withoutReport(err)
	case err != nil && ctx.Err() != nil:
		return exitError{exitPartial, errors.New("stopped while reporting; everything is stored")}
	}
	if err == nil || partial(err) {
		j.say("dataset %s; next: draftscope report --dataset %s --html report.html", j.ds.Dir(), j.ds.Dir())
	}
	return err
}

// outcome is what --json prints of a job without DuckDB.
type outcome struct {
	Dataset   string         `json:"dataset"`
	Run       string         `json:"run"`
	Sequences int            `json:"sequences"` // stored
	Scored    map[string]int `json:"scored"`    // by drafter
	Faults    int            `json:"faults"`
	Report    *struct{}      `json:"report"` // null
	Missing   string         `json:"missing"`
}

// withoutReport says what a program without DuckDB can: the work is done, and
// counted. Whoever asked for the report's JSON did not get it.
func (j *job) withoutReport(missing error) error {
	if !j.json {
		j.say("no report: %v", missing)
		return nil
	}
	r, err := j.ds.Run(j.run)
	if err != nil {
		return dataError(err)
	}
	o := outcome{Dataset: j.ds.Dir(), Run: j.run, Scored: map[string]int{}, Missing: missing.Error()}
	stored, err := j.ds.Stored(j.run)
	if err != nil {
		return dataError(err)
	}
	o.Sequences = len(stored)
	for _, d := range r.Drafters {
		scored, err := j.ds.Scored(j.run, d.Name)
		if err != nil {
			return dataError(err)
		}
		o.Scored[d.Name] = len(scored)
	}
	faults, err := j.ds.Faults(j.run)
	if err != nil {
		return dataError(err)
	}
	o.Faults = len(faults)
	if err := writeJSON(j.out.stdout, o); err != nil {
		return err
	}
	return withCode(exitMissing, fmt.Errorf("everything is stored, and there is no report: %w", missing))
}
