// Package demotest holds what tests need beside the demo: the reference
// implementation's results on the demo's model (golden states, drafts, losses,
// speculative rounds), and a small hybrid target.
//
//	sequences.jsonl                  104 prompts with the target's greedy continuation
//	speculative_reference.jsonl      rounds of real speculative decoding
//	ddtree_vectors.json              six trees, candidates in and nodes out
//	golden/p0000..p0003.safetensors  states, drafts, labels, ce and kl
//	golden/training_metrics.*        losses of random logits by the speculators project
//	hybrid/                          a Qwen3.5 target and its states
package demotest

import (
	"embed"
	"io/fs"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo"
)

//go:embed files
var files embed.FS

// FS is the demo's files and the reference's together, under one root.
func FS(tb testing.TB) fs.FS {
	tb.Helper()
	sub, err := fs.Sub(files, "files")
	if err != nil {
		tb.Fatal(err)
	}
	return union{demo.Unpack(sub), demo.FS()}
}

type union struct{ a, b fs.FS }

func (u union) Open(name string) (fs.File, error) {
	f, err := u.a.Open(name)
	if err != nil {
		return u.b.Open(name)
	}
	return f, nil
}

// Read returns one file's content.
func Read(tb testing.TB, name string) []byte {
	tb.Helper()
	data, err := fs.ReadFile(FS(tb), name)
	if err != nil {
		tb.Fatal(err)
	}
	return data
}
