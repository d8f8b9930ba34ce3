package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
)

// A run says in chunks of how many rows its linear layers went, and is not
// continued otherwise.
func TestARunRemembersTheChunksOfTheDeltaRule(t *testing.T) {
	dir := t.TempDir()
	hybrid, err := fs.Sub(demotest.FS(t), "hybrid")
	if err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(dir, "hybrid")
	if err := os.Mkdir(at, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"config.json", "model.safetensors"} {
		raw, err := fs.ReadFile(hybrid, name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(at, name), raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var lines bytes.Buffer
	for i, line := range strings.SplitN(string(demotest.Read(t, "sequences.jsonl")), "\n", 3)[:2] {
		var given struct {
			IDs []int32 `json:"input_ids"`
		}
		if err := json.NewDecoder(bufio.NewReader(strings.NewReader(line))).Decode(&given); err != nil {
			t.Fatal(err)
		}
		for j := range given.IDs {
			given.IDs[j] %= 512
		}
		raw, err := json.Marshal(given.IDs)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&lines, `{"id":"s%d","input_ids":%s,"prompt_len":1}`+"\n", i, raw)
	}
	in, ds := filepath.Join(dir, "in.jsonl"), filepath.Join(dir, "ds")
	if err := os.WriteFile(in, lines.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	capture := []string{"capture", "--target", at, "--sequences", in, "--states", "2,8", "--out", ds}
	mustRun(t, exitOK, append(capture, "--delta-chunk", "64")...)
	if out, _ := mustRun(t, exitOK, "inspect", ds); !strings.Contains(out, "option delta_chunk = 64") {
		t.Errorf("inspect does not say the chunk:\n%s", out)
	}
	mustRun(t, exitOK, append(capture, "--delta-chunk", "64")...)
	if _, errs := mustRun(t, exitUsage, capture...); !strings.Contains(errs, "options") {
		t.Errorf("a run went on with other chunks: %s", errs)
	}
	mustRun(t, exitOK, append(capture, "--run", "r2")...)
	if out, _ := mustRun(t, exitOK, "inspect", ds); strings.Count(out, "delta_chunk") != 1 {
		t.Errorf("a run row by row names a chunk:\n%s", out)
	}
}
