package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/draftscope/draftscope/cmd/demo"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/extract/tokenizer"
)

// demoTarget is how the shipped model is called in datasets and on the
// command line.
const demoTarget = "demo"

// place is a model directory: a folder of its own or one of the demo's.
type place struct {
	fsys  fs.FS
	dir   string
	label string // what people call it
}

// placeOf is the model directory at path.
func placeOf(path string) (place, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return place{}, badUsage("there is no folder %s; give a folder with config.json and model.safetensors", path)
	case err != nil:
		return place{}, badInput(fmt.Errorf("opening %s: %w", path, err))
	case !info.IsDir():
		return place{}, badUsage("%s is a file; give the folder that holds config.json and model.safetensors", path)
	}
	return place{os.DirFS(path), ".", path}, plainFiles(path)
}

// plainFiles refuses a folder with a pipe or device among its files, whose
// reading might never end.
func plainFiles(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return badInput(fmt.Errorf("opening %s: %w", dir, err))
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		info, err := os.Stat(path) // what a link points to
		if err == nil && !info.IsDir() && !info.Mode().IsRegular() {
			return badUsage("%s is no regular file; put the file itself there", path)
		}
	}
	return nil
}

// targetPlace is where a target lies; "" and "demo" are the shipped one.
func targetPlace(path string) (place, error) {
	if path == "" || path == demoTarget {
		return place{demo.FS(), "target", demoTarget}, nil
	}
	return placeOf(path)
}

// drafterPlaces are where the drafters lie; none given with the demo's target
// are the demo's.
func drafterPlaces(refs []drafterRef, targetLabel string) (names []string, places []place, err error) {
	if len(refs) == 0 {
		if targetLabel != demoTarget {
			return nil, nil, badUsage("no drafter: give --drafter NAME=DIR for each version to compare, or use \"draftscope capture\" to store states alone")
		}
		for _, name := range demo.Drafters() {
			names = append(names, name)
			places = append(places, place{demo.FS(), "drafters/" + name, demoTarget})
		}
		return names, places, nil
	}
	for _, r := range refs {
		p, err := placeOf(r.dir)
		if err != nil {
			return nil, nil, err
		}
		names, places = append(names, r.name), append(places, p)
	}
	return names, places, nil
}

// closers closes what was opened, last first.
type closers []io.Closer

func (c *closers) add(x io.Closer) { *c = append(*c, x) }

func (c closers) Close() error {
	var errs []error
	for _, x := range slices.Backward(c) {
		errs = append(errs, x.Close())
	}
	return errors.Join(errs...)
}

type closeFunc func()

func (f closeFunc) Close() error { f(); return nil }

// openTarget loads a target and its tokenizer. The tokenizer is nil where the
// folder has none: given ids need none.
func openTarget(p place, dev cuda.Device) (*target.Model, *tokenizer.Tokenizer, error) {
	model, err := target.Open(p.fsys, p.dir, dev)
	if err != nil {
		return nil, nil, modelError(p, err)
	}
	if _, err := fs.Stat(p.fsys, pathIn(p, "tokenizer.json")); errors.Is(err, fs.ErrNotExist) {
		return model, nil, nil
	}
	tok, err := tokenizer.Load(p.fsys, p.dir)
	if err != nil {
		return nil, nil, errors.Join(modelError(p, err), model.Close())
	}
	if tok.Size() > model.Config().Vocab {
		err := badUsage("target %s: tokenizer.json has %d tokens and the model's vocabulary %d; the two do not belong together", p.label, tok.Size(), model.Config().Vocab)
		return nil, nil, errors.Join(err, model.Close())
	}
	return model, tok, nil
}

// modelError names the folder that a model error speaks of, since errors from
// below only know names within it.
func modelError(p place, err error) error {
	if errors.Is(err, cuda.ErrMemory) {
		return withCode(exitMissing, fmt.Errorf("%s: %w", p.label, err))
	}
	if _, ok := errors.AsType[*json.SyntaxError](err); ok {
		err = fmt.Errorf("%w; JSON has numbers, and no NaN or Infinity", err)
	}
	return badInput(fmt.Errorf("%s: %w", p.label, err))
}

// hostOf is what a target lends its drafters.
func hostOf(m *target.Model) drafter.Host {
	w, eps, gain := m.FinalNorm()
	c := m.Config()
	return drafter.Host{
		Embedding: m.Embedding(), Head: m.Head(), FinalNorm: w, Eps: eps, Gain: gain,
		Vocab: c.Vocab, Hidden: c.Hidden, Layers: c.Layers,
	}
}

// openDrafter loads a drafter and says what its files are.
func openDrafter(name string, p place, host drafter.Host, dev cuda.Device) (d *drafter.Drafter, fingerprint string, err error) {
	config, err := fs.ReadFile(p.fsys, pathIn(p, "config.json"))
	if err != nil {
		return nil, "", modelError(p, fmt.Errorf("reading config.json of drafter %s: %w", name, err))
	}
	weights, err := safetensors.Open(p.fsys, p.dir)
	if err != nil {
		return nil, "", modelError(p, fmt.Errorf("opening drafter %s: %w", name, err))
	}
	defer weights.Close()
	d, err = drafter.Open(name, config, weights, host, dev)
	if err != nil {
		return nil, "", modelError(p, err)
	}
	return d, fingerprintOf(config, weights.Fingerprint()), nil
}

// fingerprintOf hashes a model's configuration and weights' fingerprint.
func fingerprintOf(config []byte, weights string) string {
	sum := sha256.Sum256(append([]byte(weights), config...))
	return hex.EncodeToString(sum[:8])
}

func pathIn(p place, name string) string {
	if p.dir == "." {
		return name
	}
	return p.dir + "/" + name
}
