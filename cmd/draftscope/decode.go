package main

import (
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/extract/tokenizer"
)

// decoder gives the words of a dataset's tokens, for a report's texts: by the
// tokenizer in path, or else in the folder that each run was captured from. It
// gives "" where that is not the tokenizer of the run, and where the run's text
// was redacted. It serves one goroutine.
func decoder(dataset, path string) func(run string, id int32) string {
	loaded := map[string]*tokenizer.Tokenizer{}
	return func(run string, id int32) string {
		tok, known := loaded[run]
		if !known {
			tok = tokenizerOf(dataset, run, path)
			loaded[run] = tok
		}
		if tok == nil || id < 0 || int(id) >= tok.Size() {
			return ""
		}
		return tok.Decode([]int32{id})
	}
}

// tokenizerOf is the tokenizer of a run, nil where there is none to be had.
func tokenizerOf(dataset, run, path string) *tokenizer.Tokenizer {
	ds, err := data.Open(dataset)
	if err != nil {
		return nil
	}
	defer ds.Close()
	r, err := ds.Run(run)
	if err != nil || r.Options["redact"] == "true" {
		return nil
	}
	if path == "" {
		if path = r.Target; path == "" {
			return nil
		}
	}
	p, err := targetPlace(path)
	if err != nil {
		return nil
	}
	tok, err := tokenizer.Load(p.fsys, p.dir)
	if err != nil {
		return nil
	}
	if want := r.Fingerprints.Tokenizer; want != "" && want != tok.Fingerprint() {
		return nil
	}
	return tok
}
