package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/draftscope/draftscope/data"
)

const compactHelp = `usage: draftscope compact [--run R] [--target-size SIZE] [--dry-run] [--json] DATASET

Joins the many small files of a dataset's captures into few large ones, which
a query opens faster. States are copied as they are, never encoded again, and
every byte is compared with its digest before its old file goes. What is
stored, and its digests, stay the same.

It takes the dataset's lock, so no run or store may be writing; reports and
queries may go on, and see every row once. Only programs that list the files
themselves should wait until compaction.json is gone. A crash loses nothing:
the same command, or the next writer, ends what was begun. For a moment it
needs as much free space as the largest file that it makes.

examples:
  draftscope compact ds
  draftscope compact --dry-run ds
  draftscope compact --run r1 --target-size 1GB ds
  draftscope compact --json ds | jq '.runs[].bytes_after'
`

// compacted is what was done, or with --dry-run what would be.
type compacted struct {
	Dataset string         `json:"dataset"`
	DryRun  bool           `json:"dry_run"`
	Ended   string         `json:"ended,omitempty"` // the run whose compaction had died
	Runs    []compactedRun `json:"runs"`
}

// compactedRun counts all files of a run's captures. What comes after is not
// known in a dry run.
type compactedRun struct {
	Run         string       `json:"run"`
	Merges      []data.Merge `json:"merges"`
	FilesBefore int          `json:"files_before"`
	FilesAfter  *int         `json:"files_after"`
	BytesBefore int64        `json:"bytes_before"`
	BytesAfter  *int64       `json:"bytes_after"`
}

func cmdCompact(ctx context.Context, args []string, out streams) error {
	flags := newFlags("compact", compactHelp, out)
	run := flags.String("run", "", "only the run of this `NAME`")
	target := sizeFlag(256 << 20)
	flags.Var(&target, "target-size", "how large a file of states may become, `SIZE`")
	dry := flags.Bool("dry-run", false, "say what would be joined, and change nothing")
	asJSON := flags.Bool("json", false, "print JSON")
	rest, err := parse(flags, args)
	if err != nil {
		return err
	}
	if len(rest) != 1 {
		return badUsage("compact wants one DATASET, and got %d", len(rest))
	}
	if target == 0 {
		return badUsage("--target-size must be more than 0")
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	done, err := compact(ctx, out, rest[0], *run, data.CompactConfig{TargetBytes: int64(target)}, *dry)
	if err != nil && ctx.Err() != nil {
		return exitError{exitPartial, errors.New("stopped; what was joined is joined, the rest is as it was; the same command goes on from here")}
	}
	if err != nil {
		return dataError(err)
	}
	if *asJSON {
		return writeJSON(out.stdout, done)
	}
	return done.write(out.stdout)
}

func compact(ctx context.Context, out streams, dir, only string, cfg data.CompactConfig, dry bool) (done *compacted, err error) {
	ds, err := data.Open(dir) // a folder that is no dataset must not become one
	if err != nil {
		return nil, err
	}
	if only != "" {
		if _, err := ds.Run(only); err != nil {
			return nil, err
		}
	}
	done = &compacted{Dataset: dir, DryRun: dry, Runs: []compactedRun{}}
	interrupted, groups, err := data.Interrupted(dir)
	if err != nil {
		return nil, err
	}
	if !dry {
		if ds, err = data.Create(dir, nil); err != nil {
			return nil, err
		}
		if done.Ended = interrupted; interrupted != "" {
			fmt.Fprintf(out.stderr, "ended a compaction of run %s, of %d groups, that had been cut short\n", interrupted, groups)
		}
	} else if interrupted != "" {
		fmt.Fprintf(out.stderr, "a compaction of run %s was cut short or is going on; without --dry-run it is ended first\n", interrupted)
	}
	defer func() { err = errors.Join(err, ds.Close()) }()
	for _, r := range ds.Runs() {
		if only != "" && r.Name != only {
			continue
		}
		one, err := compactRun(ctx, out, ds, r.Name, cfg, dry)
		if err != nil {
			return nil, err
		}
		done.Runs = append(done.Runs, one)
	}
	return done, nil
}

func compactRun(ctx context.Context, out streams, ds *data.Dataset, run string, cfg data.CompactConfig, dry bool) (one compactedRun, err error) {
	one.Run = run
	if one.FilesBefore, one.BytesBefore, err = ds.CaptureSize(run); err != nil {
		return one, err
	}
	if one.Merges, err = ds.PlanCompaction(run, cfg); err != nil || dry {
		return one, err
	}
	n := 0
	cfg.Merged = func(m data.Merge) {
		n++
		fmt.Fprintf(out.stderr, "run %s: %d of %d, %s\n", run, n, len(one.Merges), mergeWords(m))
	}
	if _, err := ds.Compact(ctx, run, cfg); err != nil {
		return one, err
	}
	files, bytes, err := ds.CaptureSize(run)
	one.FilesAfter, one.BytesAfter = &files, &bytes
	return one, err
}

func mergeWords(m data.Merge) string {
	return fmt.Sprintf("shard %02d, %d to %d: %d groups with %s of states into one", m.Shard, m.First, m.Last, m.Groups, megabytes(m.Bytes))
}

// megabytes is a size for people.
func megabytes(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }

func (c *compacted) write(w io.Writer) error {
	for _, r := range c.Runs {
		groups := 0
		for _, m := range r.Merges {
			groups += m.Groups
		}
		var err error
		switch {
		case groups == 0:
			_, err = fmt.Fprintf(w, "run %s: nothing to join, %d files of captures with %s\n", r.Run, r.FilesBefore, megabytes(r.BytesBefore))
		case c.DryRun:
			_, err = fmt.Fprintf(w, "run %s: %d groups would become %d, of %d files with %s\n", r.Run, groups, len(r.Merges), r.FilesBefore, megabytes(r.BytesBefore))
			for _, m := range r.Merges {
				_, werr := fmt.Fprintf(w, "  %s\n", mergeWords(m))
				err = errors.Join(err, werr)
			}
		default:
			_, err = fmt.Fprintf(w, "run %s: %d groups became %d; %d files with %s before, %d with %s after\n", r.Run, groups, len(r.Merges),
				r.FilesBefore, megabytes(r.BytesBefore), *r.FilesAfter, megabytes(*r.BytesAfter))
		}
		if err != nil {
			return err
		}
	}
	return nil
}
