// Package demo is the model that draftscope ships: a small Qwen3 target
// trained on Go source, its tokenizer, 24 prompts, three DFlash drafters (good,
// early, shift), a fourth for the story of docs/case.md (shortcut), and the log
// of their training, compressed into the program so that it works anywhere.
//
//	target/{config.json,model.safetensors,tokenizer.json}
//	drafters/{good,early,shift,shortcut}/{config.json,model.safetensors}
//	prompts.jsonl
//	train_log.jsonl
package demo

import (
	"embed"
	"io/fs"
)

//go:embed files
var files embed.FS

// FS is the demo's files, decompressed as they are opened.
func FS() fs.FS {
	sub, err := fs.Sub(files, "files")
	if err != nil {
		panic(err) // a constant path in an embedded tree
	}
	return Unpack(sub)
}

// Drafters are the names of the shipped drafters, best first.
func Drafters() []string { return []string{"good", "early", "shift"} }
