package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/gpu"
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/data/similar"
	"github.com/draftscope/draftscope/drafter/diagnose"
	"github.com/draftscope/draftscope/schemas"
)

const compareHelp = `usage: draftscope compare A B [--backend cpu|cuda|auto] [--json]

Compares two captures of the same ids, made by two engines, dtypes, devices or
quantisations: cosine, relative distance and largest difference of every state
that both record, row by row, and where the two part first. A and B are DATASET
or DATASET:RUN. The rows go into the table similarity of A's dataset, where
"draftscope query" finds them.

examples:
  draftscope compare ds:fp32 ds:bf16
  draftscope compare here there --json
`

// captureRef is one side of a comparison.
type captureRef struct {
	dir   string
	run   data.Run
	label string
}

func cmdCompare(ctx context.Context, args []string, out streams) (err error) {
	flags := newFlags("compare", compareHelp, out)
	asJSON := flags.Bool("json", false, "print JSON")
	f := jobFlags{
		backend:   oneOfFlag(flags, "backend", "cpu", "what compares: cpu, cuda or auto `NAME`", "cuda", "auto"),
		precision: &oneOf{value: gpu.F32.String()},
	}
	rest, err := parse(flags, args)
	if err != nil {
		return err
	}
	if len(rest) != 2 {
		return badUsage("compare wants two captures, A and B, and got %d", len(rest))
	}
	a, err := captureOf(rest[0])
	if err != nil {
		return err
	}
	b, err := captureOf(rest[1])
	if err != nil {
		return err
	}
	switch {
	case a.dir == b.dir && a.run.Name == b.run.Name:
		return badUsage("A and B are the same capture")
	case a.run.Hidden != b.run.Hidden:
		return badUsage("the states of %s have %d values and those of %s %d: they are not of one model", rest[0], a.run.Hidden, rest[1], b.run.Hidden)
	case a.label == b.label:
		a.label, b.label = filepath.Base(a.dir)+":"+a.label, filepath.Base(b.dir)+":"+b.label
	}
	dev, err := newJob(f, out).newDevice(1)
	if err != nil {
		return err
	}
	m := measure{dev: dev}
	defer func() { err = errors.Join(err, m.close()) }()
	c, path, err := compareCaptures(ctx, a, b, m.rows)
	if err != nil {
		return err
	}
	fmt.Fprintf(out.stderr, "wrote %s\n", path)
	if *asJSON {
		return writeJSON(out.stdout, c)
	}
	_, err = io.WriteString(out.stdout, c.String())
	return err
}

// captureOf finds DATASET or DATASET:RUN.
func captureOf(ref string) (captureRef, error) {
	dir, run, _ := strings.Cut(ref, ":")
	r, err := pickRun(dir, run)
	return captureRef{filepath.Clean(dir), r, r.Name}, err
}

// compareCaptures goes through both captures side by side. Where their orders
// differ, what came early waits for its other half.
func compareCaptures(ctx context.Context, a, b captureRef, rows similar.Rows) (_ *similar.Comparison, path string, err error) {
	sources := [2]*sequenceReader{}
	for i, ref := range []captureRef{a, b} {
		if sources[i], err = readSequences(ref); err != nil {
			return nil, "", err
		}
		defer func() { err = errors.Join(err, sources[i].close()) }()
	}
	w, err := similar.Create(a.dir, a.label, b.label)
	if err != nil {
		return nil, "", dataError(err)
	}
	defer func() {
		if w != nil {
			err = errors.Join(err, w.Abort())
		}
	}()
	c := similar.New(a.label, b.label, a.run.Hidden, rows)
	waiting := [2]map[string]similar.Sequence{{}, {}}
	done := [2]bool{}
	for side := 0; !done[0] || !done[1]; side = 1 - side {
		if done[side] {
			continue
		}
		q, err := sources[side].next(ctx)
		if errors.Is(err, io.EOF) {
			done[side] = true
			continue
		}
		if err != nil {
			return nil, "", err
		}
		other, ok := waiting[1-side][q.ID]
		if !ok {
			waiting[side][q.ID] = q
			continue
		}
		delete(waiting[1-side], q.ID)
		pair := [2]similar.Sequence{}
		pair[side], pair[1-side] = q, other
		rows, err := c.Add(pair[0], pair[1])
		if err != nil {
			return nil, "", err
		}
		if err := w.Write(rows); err != nil {
			return nil, "", dataError(err)
		}
	}
	c.OnlyA, c.OnlyB = len(waiting[0]), len(waiting[1])
	if c.Sequences == 0 {
		return nil, "", badUsage("%s and %s have no sequence in common", a.label, b.label)
	}
	path, err = w.Close()
	w = nil
	return c, path, dataError(err)
}

// measureValues bounds what of a state lies on the device at once.
const measureValues = 1 << 24

// measure compares rows on a device, in the same memory again and again.
type measure struct {
	dev  cuda.Device
	bufs [2]cuda.Buffer
}

// rows is a [similar.Rows].
func (m *measure) rows(a, b []float32, width int) ([]schemas.Similarity, error) {
	var out []schemas.Similarity
	tile := max(1, measureValues/width) * width
	for lo := 0; lo < len(a); lo += tile {
		n := min(tile, len(a)-lo)
		var sides [2]cuda.Tensor
		for i, values := range [][]float32{a[lo : lo+n], b[lo : lo+n]} {
			buf, err := m.dev.Grow(m.bufs[i], n)
			if err != nil {
				return nil, err
			}
			m.bufs[i] = buf
			sides[i] = cuda.Matrix(buf, n/width, width)
			if err := m.dev.Upload(sides[i], values); err != nil {
				return nil, err
			}
		}
		found, err := m.dev.Similarity(sides[0], sides[1])
		if err != nil {
			return nil, err
		}
		for _, s := range found {
			na, nb := s.Norms()
			row := schemas.Similarity{MaxAbs: float32(s.MaxDiff), NormA: float32(na), NormB: float32(nb)}
			if cos, ok := s.Cosine(); ok {
				row.Cosine = new(float32(cos))
			}
			if rel, ok := s.RelL2(); ok {
				row.RelL2 = new(float32(rel))
			}
			out = append(out, row)
		}
	}
	return out, nil
}

func (m *measure) close() error {
	for _, b := range m.bufs {
		if b != nil {
			b.Close()
		}
	}
	return m.dev.Close()
}

// sequenceReader yields a run's sequences whole.
type sequenceReader struct {
	ds     *data.Dataset
	source *data.ReplaySource
}

func readSequences(ref captureRef) (*sequenceReader, error) {
	ds, err := data.Open(ref.dir)
	if err != nil {
		return nil, dataError(err)
	}
	source, err := ds.Replay(ref.run.Name, data.ReplayConfig{})
	if err != nil {
		return nil, errors.Join(dataError(err), ds.Close())
	}
	return &sequenceReader{ds, source}, nil
}

func (r *sequenceReader) next(ctx context.Context) (similar.Sequence, error) {
	open := diagnose.Sequence{States: map[int][]float32{}}
	for {
		id, rec, last, err := r.source.Next(ctx)
		if err != nil {
			if errors.Is(err, io.EOF) {
				return similar.Sequence{}, io.EOF
			}
			return similar.Sequence{}, dataError(err)
		}
		err = takeRecord(&open, rec)
		rec.Release()
		if err != nil {
			return similar.Sequence{}, fmt.Errorf("reading sequence %s: %w", id, err)
		}
		if last {
			return similar.Sequence{ID: id, Tokens: open.Tokens, States: open.States}, nil
		}
	}
}

func (r *sequenceReader) close() error { return errors.Join(r.source.Close(), r.ds.Close()) }
