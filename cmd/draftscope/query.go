package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/data/query"
)

const queryHelp = `usage: draftscope query --dataset DIR [--format table|csv|json] SQL

Asks a dataset in SQL, through DuckDB. The tables are sequences, tokens,
states, drafts, slots, rounds, similarity and faults; every named number of
docs/metrics.md is a view.

Exit status: 4 when files were left out of the answer, which stderr names.

examples:
  draftscope query --dataset ds "SELECT * FROM slot_accuracy ORDER BY drafter, slot"
  draftscope query --dataset ds --format csv "FROM accept_len"
  draftscope query --dataset ds "SELECT table_name FROM information_schema.tables"
`

func cmdQuery(ctx context.Context, args []string, out streams) error {
	fs := newFlags("query", queryHelp, out)
	dir := fs.String("dataset", defaultOut, "the dataset's `DIR`")
	format := oneOfFlag(fs, "format", "table", "table, csv or json `NAME`", "csv", "json")
	rest, err := parse(fs, args)
	if err != nil {
		return err
	}
	if len(rest) != 1 {
		return badUsage("query wants one SQL statement in quotes, and got %d arguments; \"draftscope query --help\" shows examples", len(rest))
	}
	db, err := openDB(ctx, *dir, out)
	if err != nil {
		return err
	}
	defer db.Close()
	rows, err := db.Query(ctx, rest[0])
	if err != nil {
		return badInput(err)
	}
	if err := query.Write(out.stdout, rows, query.Format(format.value)); err != nil {
		return err
	}
	return leftOut(db.Warnings())
}

// leftOut is the error of an answer that does not count all of the dataset's
// files; it names them. What a writer has not committed, because it is at work
// or was stopped, was said and is no fault: it is written again.
func leftOut(warnings []query.Warning) error {
	damaged := slices.DeleteFunc(slices.Clone(warnings), func(w query.Warning) bool { return w.Reason == data.Uncommitted })
	if len(damaged) == 0 {
		return nil
	}
	return exitError{exitPartial, fmt.Errorf("files left out of every number: %d (%s); \"draftscope validate\" says what is wrong with them", len(damaged), named(damaged))}
}

// named lists the files to blame: what was left out with its group is counted
// only.
func named(warnings []query.Warning) string {
	var names []string
	for _, w := range warnings {
		if !strings.HasPrefix(w.Reason, data.WithGroup) {
			names = append(names, w.File)
		}
	}
	const most = 8
	if n := len(names) - most; n > 0 {
		names = append(names[:most], fmt.Sprintf("%d more", n))
	}
	if n := len(warnings) - len(names); len(names) < most && n > 0 {
		names = append(names, fmt.Sprintf("%d more of the same groups", n))
	}
	return strings.Join(names, ", ")
}

// openDB opens a dataset for SQL, and says which files it leaves out.
func openDB(ctx context.Context, dir string, out streams) (*query.DB, error) {
	db, err := openQuietly(ctx, dir)
	if err != nil {
		return nil, err
	}
	for _, line := range query.Lines(db.Warnings()) {
		fmt.Fprintf(out.stderr, "draftscope: leaving out %s\n", line)
	}
	return db, nil
}

// openQuietly is openDB for who names the files elsewhere.
func openQuietly(ctx context.Context, dir string) (*query.DB, error) {
	db, err := query.Open(ctx, dir, query.Options{})
	if err != nil {
		if errors.Is(err, query.ErrNoDuckDB) || errors.Is(err, query.ErrNoTemp) {
			return nil, withCode(exitMissing, err)
		}
		return nil, badInput(err)
	}
	return db, nil
}
