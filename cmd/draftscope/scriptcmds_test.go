package main

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/draftscope/draftscope/cmd/demo"
	"github.com/rogpeppe/go-internal/testscript"
)

// exits runs a command and checks its exit code: exits CODE COMMAND ARGS...
// Its output is left for the stdout and stderr commands.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND ARGS...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		got = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("running %v: %v", args[1:], err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// truncate cuts a file to the given number of bytes: truncate FILE BYTES.
func truncate(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: truncate FILE BYTES")
	}
	n, err := strconv.ParseInt(args[1], 10, 64)
	ts.Check(err)
	ts.Check(os.Truncate(ts.MkAbs(args[0]), n))
}

// unpackDemo writes the shipped models to a folder: demo DIR.
func unpackDemo(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: demo DIR")
	}
	ts.Check(os.CopyFS(ts.MkAbs(args[0]), unpackedNames{demo.FS()}))
}

// unpackedNames lists the demo's files by the names under which they open.
type unpackedNames struct{ fs.FS }

func (u unpackedNames) ReadDir(name string) ([]fs.DirEntry, error) {
	entries, err := fs.ReadDir(u.FS, name)
	for i, e := range entries {
		entries[i] = unpackedEntry{e}
	}
	return entries, err
}

type unpackedEntry struct{ fs.DirEntry }

func (e unpackedEntry) Name() string { return strings.TrimSuffix(e.DirEntry.Name(), ".zst") }

// replace changes every occurrence in a file: replace FILE OLD NEW.
func replace(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: replace FILE OLD NEW")
	}
	path := ts.MkAbs(args[0])
	b, err := os.ReadFile(path)
	ts.Check(err)
	if !strings.Contains(string(b), args[1]) {
		ts.Fatalf("%s does not contain %q", args[0], args[1])
	}
	ts.Check(os.WriteFile(path, []byte(strings.ReplaceAll(string(b), args[1], args[2])), 0o644))
}
