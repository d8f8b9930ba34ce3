package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/draftscope/draftscope/cmd/demo"
)

const demoHelp = `usage: draftscope demo case [--out DIR] [--limit N]

Replays a story on the model that is part of the program: four drafters, of
which one learnt labels a token late, one reads the target's final state, one
was stopped early, and one is good. Their training logs look alike. It writes
the models to DIR, where no other files of their names may be, runs the commands that tell them apart, and shows each
command above what it printed: about 3 minutes on two cores. docs/case.md tells the story with its output.

examples:
  draftscope demo case
  draftscope demo case --out /tmp/case --limit 12
`

// caseFiles are what the story needs of the shipped files.
var caseFiles = []string{
	"target/config.json", "target/model.safetensors", "target/tokenizer.json", "train_log.jsonl",
	"drafters/good/config.json", "drafters/good/model.safetensors",
	"drafters/early/config.json", "drafters/early/model.safetensors",
	"drafters/shift/config.json", "drafters/shift/model.safetensors",
	"drafters/shortcut/config.json", "drafters/shortcut/model.safetensors",
}

// scene is a command of the story, and why it is given.
type scene struct {
	why  string
	args []string
}

func cmdDemo(ctx context.Context, args []string, out streams) error {
	flags := newFlags("demo", demoHelp, out)
	dir := flags.String("out", "draftscope-case", "the `DIR` to write")
	limit := flags.Int("limit", 24, "capture `N` sequences")
	rest, err := parse(flags, args)
	if err != nil {
		return err
	}
	if len(rest) != 1 || rest[0] != "case" {
		return badUsage("demo knows one story: draftscope demo case")
	}
	if *limit < 3 {
		return badUsage("--limit must be at least 3, not %d: fewer sequences confirm nothing", *limit)
	}
	if err := writeCase(*dir); err != nil {
		return err
	}
	for i, s := range theCase(*dir, *limit) {
		fmt.Fprintf(out.stdout, "\n%d. %s\n\n$ draftscope %s\n\n", i+1, s.why, strings.Join(s.args, " "))
		if code := run(ctx, s.args, out.stdout, out.stderr); code != exitOK {
			return exitError{code, fmt.Errorf("draftscope %s ended with %d", s.args[0], code)}
		}
	}
	return nil
}

// theCase lists the story's commands.
func theCase(dir string, limit int) []scene {
	at := func(name string) string { return filepath.Join(dir, "drafters", name) }
	ds := filepath.Join(dir, "dataset")
	capture := []string{"run", "--out", ds, "--states", "all", "--budgets", "8", "--limit", strconv.Itoa(limit)}
	for _, name := range []string{"good", "early", "shift", "shortcut"} {
		capture = append(capture, "--drafter", name+"="+at(name))
	}
	why := func(name string) []string {
		return []string{"diagnose", "--dataset", ds, "--drafter", at(name), "--reference", at("good"), "--train-log", filepath.Join(dir, "train_log.jsonl")}
	}
	return []scene{
		{"Serve all four on the same text. What their training logged as accuracy is not what they are accepted for.", capture},
		{"Is the capture itself at fault? Noise, rows, norm, answers: hold it against the target.", []string{"validate", ds, "--target", filepath.Join(dir, "target")}},
		{"The worst of them. Theories: too little training, another loss, a leak, a wrong layer, a mask.", why("shift")},
		{"The suspicious one: the state that gives the labels is among its taps. Is that why drafters are bad?", why("shortcut")},
		{"The slow one: a fault, or early?", why("early")},
		{"And the good one, by the same eyes.", why("good")[:5]},
	}
}

// writeCase writes the story's files, unpacked, and replaces none of another's.
func writeCase(dir string) error {
	for _, name := range caseFiles {
		data, err := fs.ReadFile(demo.FS(), name)
		if err != nil {
			return fmt.Errorf("unpacking the demo: %w", err)
		}
		path := filepath.Join(dir, filepath.FromSlash(name))
		switch there, err := os.ReadFile(path); {
		case err == nil && bytes.Equal(there, data):
			continue // from an earlier time
		case err == nil:
			return badUsage("%s is there already and is not the demo's; choose another --out", path)
		case !errors.Is(err, fs.ErrNotExist):
			return placed(fmt.Errorf("writing the demo: %w; choose another --out", err))
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			return dataError(fmt.Errorf("writing the demo to %s: %w", dir, err))
		}
		if err := writeFile(path, func(f *os.File) error { _, err := f.Write(data); return err }); err != nil {
			return err
		}
	}
	return nil
}
