package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/gpu"
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/data/similar"
	"github.com/draftscope/draftscope/schemas"
)

const compareHelp = `usage: draftscope compare A B [--target T [--drafter NAME=DIR]...]
                                [--backend cpu|cuda|auto] [--json]
       draftscope compare DATASET[:RUN] --drafters A,B [--json]
       draftscope compare DRAFTER-DIR DRAFTER-DIR [--json]

Compares two captures of the same ids, made by two engines, dtypes, devices or
quantisations: cosine, relative distance and largest difference of every state
that both record, row by row, and where the two part first. A and B are DATASET
or DATASET:RUN. The rows go into the table similarity of A's dataset, where
"draftscope query" finds them and "draftscope report --html" draws them. With
--target the final states go through the target's head: KL, equal answers, and
where they part; with --drafter each drafter is put on both captures.

With --drafters it compares two drafters that were replayed over one capture:
paired differences with intervals by slot, setting, tag, length and distance
from the prompt, wins, and what one fails on that the other does not.

Two folders of weights are compared by what does not depend on scale: cosines,
spectra, use of the taps; a scale that a norm takes out is called a gauge. Values
that are not finite and shapes that config.json contradicts are named, and the
exit status is then 4, or 2 where nothing is left to compare.

examples:
  draftscope compare ds:fp32 ds:bf16
  draftscope compare here there --target ./Qwen3-8B --drafter v1=./v1
  draftscope compare ds --drafters v1,v2
  draftscope compare ./v1 ./v2 --json
`

// captureRef is one side of a comparison.
type captureRef struct {
	dir   string
	run   data.Run
	label string
}

func cmdCompare(ctx context.Context, args []string, out streams) error {
	var f jobFlags
	flags := newFlags("compare", compareHelp, out)
	asJSON := flags.Bool("json", false, "print JSON")
	names := flags.String("drafters", "", "compare the drafters `A,B` of one capture")
	flags.StringVar(&f.target, "target", "", "the target's model `DIR` (demo: the shipped one), for its answers")
	flags.Var(&f.drafters, "drafter", "put a drafter on both captures, `NAME=DIR`; give it once for each")
	f.backend = oneOfFlag(flags, "backend", "cpu", "what compares captures: cpu, cuda or auto `NAME`", "cuda", "auto")
	f.precision = &oneOf{value: gpu.F32.String()}
	rest, err := parse(flags, args)
	switch {
	case err != nil:
		return err
	case *names != "" && f.backend.value == "cuda":
		return badUsage("--backend cuda has no effect on --drafters, which compares what is stored: leave it out")
	case *names != "" && len(rest) == 1 && f.target == "" && len(f.drafters) == 0:
		return compareDrafters(ctx, rest[0], *names, *asJSON, out)
	case *names != "":
		return badUsage("--drafters A,B compares two drafters of one capture: name one dataset, and no --target or --drafter")
	case len(rest) != 2:
		return badUsage("compare wants two captures, A and B, and got %d", len(rest))
	case len(f.drafters) > 0 && f.target == "":
		return badUsage("--drafter needs --target, whose embedding and head it uses")
	case f.target == "" && isModel(rest[0]) && isModel(rest[1]):
		if f.backend.value == "cuda" {
			return badUsage("--backend cuda has no effect on folders of weights, which the CPU compares: leave it out")
		}
		return compareWeights(rest[0], rest[1], *asJSON, out)
	}
	return comparePair(ctx, newJob(f, out), rest[0], rest[1], *asJSON)
}

// comparePair compares two captures.
func comparePair(ctx context.Context, j *job, refA, refB string, asJSON bool) (err error) {
	defer func() { err = errors.Join(err, j.opened.Close()) }()
	a, err := captureOf(refA)
	if err != nil {
		return err
	}
	b, err := captureOf(refB)
	if err != nil {
		return err
	}
	switch {
	case a.dir == b.dir && a.run.Name == b.run.Name:
		return badUsage("A and B are the same capture")
	case a.run.Hidden != b.run.Hidden:
		return badUsage("the states of %s have %d values and those of %s %d: they are not of one model", refA, a.run.Hidden, refB, b.run.Hidden)
	case a.label == b.label:
		a.label, b.label = filepath.Base(a.dir)+":"+a.label, filepath.Base(b.dir)+":"+b.label
	}
	out := struct {
		*similar.Comparison
		Head    *headComparison `json:"head,omitempty"`
		Effects []draftEffect   `json:"drafters,omitempty"`
	}{}
	if j.target != "" {
		if out.Head, err = j.headOf(a, b); err != nil {
			return err
		}
	}
	dev, err := j.newDevice(1)
	if err != nil {
		return err
	}
	rows := measure{dev: dev}
	defer func() { err = errors.Join(err, rows.close()) }()
	var path string
	if out.Comparison, path, err = compareCaptures(ctx, a, b, rows.rows, out.Head); err != nil {
		return err
	}
	fmt.Fprintf(j.out.stderr, "wrote %s\n", path)
	if out.Effects, err = j.effects(ctx, a, b); err != nil {
		return err
	}
	if asJSON {
		return writeJSON(j.out.stdout, out)
	}
	text := []string{out.String()}
	if out.Head != nil {
		text = append(text, out.Head.String())
	}
	for _, e := range out.Effects {
		text = append(text, e.String())
	}
	_, err = io.WriteString(j.out.stdout, strings.Join(text, ""))
	return err
}

// headOf opens the target for a comparison of two captures' answers.
func (j *job) headOf(a, b captureRef) (*headComparison, error) {
	if err := j.openTarget(j.target); err != nil {
		return nil, err
	}
	host := hostOf(j.model)
	switch n := host.Layers; {
	case a.run.Hidden != host.Hidden:
		return nil, badUsage("the states of %s have %d values and those of target %s %d: they are not of one model", a.label, a.run.Hidden, j.place.label, host.Hidden)
	case !slices.Contains(a.run.States, n) || !slices.Contains(b.run.States, n):
		return nil, badUsage("--target needs the final state %d in both captures; %s has %v and %s %v", n, a.label, a.run.States, b.label, b.run.States)
	}
	return &headComparison{host: host, dev: j.dev}, nil
}

// captureOf finds DATASET or DATASET:RUN.
func captureOf(ref string) (captureRef, error) {
	dir, run, _ := strings.Cut(ref, ":")
	r, err := pickRun(dir, run)
	return captureRef{filepath.Clean(dir), r, r.Name}, err
}

// compareCaptures goes through both captures side by side; head may be nil.
func compareCaptures(ctx context.Context, a, b captureRef, rows similar.Rows, head *headComparison) (_ *similar.Comparison, path string, err error) {
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
	c.OnlyA, c.OnlyB, err = eachPair(ctx, a, b, comparePassBytes, func(x, y similar.Sequence) error {
		compared, err := c.Add(x, y)
		if err != nil {
			return err
		}
		if err := w.Write(compared); err != nil {
			return dataError(err)
		}
		if head == nil {
			return nil
		}
		return head.add(x, y)
	})
	if err != nil {
		return nil, "", err
	}
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
