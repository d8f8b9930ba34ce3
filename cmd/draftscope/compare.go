package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/data/similar"
)

const compareHelp = `usage: draftscope compare A B [--json]

Compares two captures of the same ids, made by two engines, dtypes, devices or
quantisations: cosine, relative distance and largest difference of every state
that both record, row by row, and where the two part first. A and B are DATASET
or DATASET:RUN. The rows go into the table similarity of A's dataset, where
"draftscope query" finds them.

examples:
  draftscope compare ds:fp32 ds:bf16
  draftscope compare here there --json
`

// captureRef is one side of a comparison.
type captureRef struct {
	dir   string
	run   data.Run
	label string
}

func cmdCompare(ctx context.Context, args []string, out streams) error {
	flags := newFlags("compare", compareHelp, out)
	asJSON := flags.Bool("json", false, "print JSON")
	rest, err := parse(flags, args)
	if err != nil {
		return err
	}
	if len(rest) != 2 {
		return badUsage("compare wants two captures, A and B, and got %d", len(rest))
	}
	a, err := captureOf(rest[0])
	if err != nil {
		return err
	}
	b, err := captureOf(rest[1])
	if err != nil {
		return err
	}
	switch {
	case a.dir == b.dir && a.run.Name == b.run.Name:
		return badUsage("A and B are the same capture")
	case a.run.Hidden != b.run.Hidden:
		return badUsage("the states of %s have %d values and those of %s %d: they are not of one model", rest[0], a.run.Hidden, rest[1], b.run.Hidden)
	case a.label == b.label:
		a.label, b.label = filepath.Base(a.dir)+":"+a.label, filepath.Base(b.dir)+":"+b.label
	}
	c, path, err := compareCaptures(ctx, a, b)
	if err != nil {
		return err
	}
	fmt.Fprintf(out.stderr, "wrote %s\n", path)
	if *asJSON {
		return writeJSON(out.stdout, c)
	}
	_, err = io.WriteString(out.stdout, c.String())
	return err
}

// captureOf finds DATASET or DATASET:RUN.
func captureOf(ref string) (captureRef, error) {
	dir, run, _ := strings.Cut(ref, ":")
	r, err := pickRun(dir, run)
	return captureRef{filepath.Clean(dir), r, r.Name}, err
}

// compareCaptures goes through both captures side by side.
func compareCaptures(ctx context.Context, a, b captureRef) (_ *similar.Comparison, path string, err error) {
	w, err := similar.Create(a.dir, a.label, b.label)
	if err != nil {
		return nil, "", dataError(err)
	}
	defer func() {
		if w != nil {
			err = errors.Join(err, w.Abort())
		}
	}()
	c := similar.New(a.label, b.label, a.run.Hidden)
	c.OnlyA, c.OnlyB, err = eachPair(ctx, a, b, comparePassBytes, func(x, y similar.Sequence) error {
		return dataError(w.Write(c.Add(x, y)))
	})
	if err != nil {
		return nil, "", err
	}
	if c.Sequences == 0 {
		return nil, "", badUsage("%s and %s have no sequence in common", a.label, b.label)
	}
	path, err = w.Close()
	w = nil
	return c, path, dataError(err)
}
