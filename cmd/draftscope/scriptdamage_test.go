package main

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/rogpeppe/go-internal/testscript"
)

// copyDir copies a folder with all in it: copydir FROM TO.
func copyDir(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: copydir FROM TO")
	}
	ts.Check(os.CopyFS(ts.MkAbs(args[1]), os.DirFS(ts.MkAbs(args[0]))))
}

// firstParquet is the first Parquet file in a folder, by path.
func firstParquet(ts *testscript.TestScript, dir string) (first string) {
	ts.Check(filepath.WalkDir(ts.MkAbs(dir), func(path string, _ fs.DirEntry, err error) error {
		if err == nil && first == "" && filepath.Ext(path) == ".parquet" {
			first = path
		}
		return err
	}))
	if first == "" {
		ts.Fatalf("no Parquet file in %s", dir)
	}
	return first
}

// flipBody flips a bit of the rows of the first Parquet file: flipbody DIR.
func flipBody(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: flipbody DIR")
	}
	path := firstParquet(ts, args[0])
	b, err := os.ReadFile(path)
	ts.Check(err)
	b[len(b)/4] ^= 1
	ts.Check(os.WriteFile(path, b, 0o644))
}

// flipFooter flips a bit in the last place where the first Parquet file has a
// word, which its footer does: flipfooter DIR WORD.
func flipFooter(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: flipfooter DIR WORD")
	}
	path := firstParquet(ts, args[0])
	b, err := os.ReadFile(path)
	ts.Check(err)
	at := bytes.LastIndex(b, []byte(args[1]))
	if at < 0 {
		ts.Fatalf("%s does not contain %q", path, args[1])
	}
	b[at] ^= 1
	ts.Check(os.WriteFile(path, b, 0o644))
}

// removeFirst removes the first Parquet file: removefirst DIR.
func removeFirst(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: removefirst DIR")
	}
	ts.Check(os.Remove(firstParquet(ts, args[0])))
}
