package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/draftscope/draftscope/data"
	"github.com/rogpeppe/go-internal/testscript"
)

// split stores every sequence of a dataset anew, in a commit of its own:
// split FROM TO.
func split(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: split FROM TO")
	}
	ts.Check(splitDataset(context.Background(), ts.MkAbs(args[0]), ts.MkAbs(args[1])))
}

func splitDataset(ctx context.Context, from, to string) (err error) {
	src, err := data.Open(from)
	if err != nil {
		return err
	}
	dst, err := data.Create(to, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	for _, r := range src.Runs() {
		if err := dst.AddRun(r); err != nil {
			return err
		}
		sink, err := dst.CaptureSink(r.Name, 0, data.SinkConfig{})
		if err != nil {
			return err
		}
		replay, err := src.Replay(r.Name, data.ReplayConfig{})
		if err != nil {
			return err
		}
		for n := uint64(1); ; {
			seq, rec, last, err := replay.Next(ctx)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
			err = sink.Write(ctx, seq, rec)
			rec.Release()
			if err == nil && last {
				err = errors.Join(sink.End(ctx, seq, n), sink.Commit(ctx))
				n++
			}
			if err != nil {
				return err
			}
		}
		if err := errors.Join(sink.Close(), replay.Close()); err != nil {
			return err
		}
	}
	return nil
}

// While a compaction goes on in another process, is killed and goes on, every
// query sees every row once.
func TestReadersOfADatasetThatIsCompactedSeeEqualRows(t *testing.T) {
	dir := t.TempDir()
	whole, many := filepath.Join(dir, "whole"), filepath.Join(dir, "many")
	command := func(args ...string) string {
		t.Helper()
		var out, errs bytes.Buffer
		if code := run(t.Context(), args, &out, &errs); code != exitOK {
			t.Fatalf("%v: exit %d: %s", args, code, errs.String())
		}
		if args[0] == "query" && errs.Len() > 0 {
			t.Fatalf("files were left out: %s", errs.String())
		}
		return out.String()
	}
	command("capture", "--limit", "6", "--max-new", "12", "--states", "2,8", "--out", whole)
	if err := splitDataset(t.Context(), whole, many); err != nil {
		t.Fatal(err)
	}
	ask := func(ds string) string {
		t.Helper()
		return command("query", "--dataset", ds, "--format", "csv",
			"SELECT count(*), count(DISTINCT (seq_id, pos, state)), sum(hash(vec)::HUGEINT) FROM states JOIN tokens USING (run, seq_id, pos)")
	}
	want := ask(many)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	killed := 0
	for round := range 10 {
		ds := filepath.Join(dir, strconv.Itoa(round))
		if err := os.CopyFS(ds, os.DirFS(many)); err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), self, "compact", ds)
		cmd.Env = append(os.Environ(), asProgram+"=1")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() {
			if round > 0 { // the first is let live; there a journal appears within the first 20 ms or so
				for range 2000 {
					if _, err := os.Stat(filepath.Join(ds, "compaction.json")); err == nil {
						break
					}
					time.Sleep(100 * time.Microsecond)
				}
				time.Sleep(time.Duration(round-1) * time.Millisecond / 2)
				_ = cmd.Process.Kill() // it may have ended
			}
			ended <- cmd.Wait()
		}()
		for going := true; going; {
			if got := ask(ds); got != want {
				t.Fatalf("round %d: %q, want %q", round, got, want)
			}
			select {
			case err := <-ended:
				going = false
				if err != nil {
					killed++
				}
			default:
			}
		}
		if got := ask(ds); got != want {
			t.Fatalf("round %d, at its end: %q, want %q", round, got, want)
		}
		command("compact", ds)
		if got := ask(ds); got != want {
			t.Errorf("round %d, compacted: %q, want %q", round, got, want)
		}
		files, err := filepath.Glob(filepath.Join(ds, "states", "*", "*", "*"))
		if err != nil || len(files) != 1 || filepath.Ext(files[0]) != ".parquet" {
			t.Errorf("round %d: %q (%v), want one file", round, files, err)
		}
	}
	t.Logf("killed %d times of 9", killed)
	if killed == 0 {
		t.Error("no compaction was killed half-way: this showed nothing")
	}
}
