package main

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/cespare/xxhash/v2"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/extract/verify"
	"github.com/draftscope/draftscope/schemas"
)

// checks are what the captured sequences of one run are put to.
type checks struct {
	v     *validation
	run   data.Run
	file  string // that faults are said to lie in
	vocab int
	truth *truth // nil without a target
}

func (j *job) checksOf(v *validation, r data.Run, file string) *checks {
	c := &checks{v: v, run: r, file: file}
	switch {
	case j.model == nil:
	case r.Hidden != j.model.Config().Hidden || r.Layers != j.model.Config().Layers:
		v.fault(file, "K6", "its target has %d layers of width %d, the one of --target %d of %d", r.Layers, r.Hidden, j.model.Config().Layers, j.model.Config().Hidden)
	default:
		c.vocab = j.model.Config().Vocab
		c.truth = newTruth(j)
	}
	return c
}

// gathered is a captured sequence as its records come.
type gathered struct {
	verify.Sequence
	faults []verify.Fault // that were found before it was sent, or in how it is cut
	aside  bool           // it came as faults and nothing else
	seen   *xxhash.Digest // of tokens and states, however they are cut
}

func (c *checks) begin(id string) *gathered {
	r := c.run
	return &gathered{seen: xxhash.New(), Sequence: verify.Sequence{
		ID: id, Length: -1, States: map[int][]float32{}, Hidden: r.Hidden, Recorded: r.States, Layers: r.Layers, Vocab: c.vocab,
	}}
}

func (g *gathered) take(rec arrow.Record) error {
	env, err := schemas.EnvelopeOf(rec)
	if err != nil {
		return err
	}
	switch env.Table {
	case schemas.TableCapture:
		c, err := schemas.ReadCapture(rec)
		if err != nil {
			return err
		}
		if c.Spec.Hidden != g.Hidden || c.Spec.Layers != g.Layers {
			g.fault(-1, "K6", "states of %d values of a target of %d layers, the run's have %d of %d", c.Spec.Hidden, c.Spec.Layers, g.Hidden, g.Layers)
			return nil
		}
		for i, t := range c.Tokens {
			if t.SeqID != g.ID {
				g.fault(len(g.Tokens)+i, "K3", "a row of sequence %q", t.SeqID)
				break
			}
		}
		g.Tokens = append(g.Tokens, c.Tokens...)
		for _, t := range c.Tokens {
			fmt.Fprintf(g.seen, "%d,", t.TokenID)
		}
		for i, state := range c.Spec.States {
			g.States[state] = c.Spec.DType.AppendFloats(g.States[state], c.States[i])
		}
	case schemas.TableSequences:
		rows, err := schemas.Rows[schemas.Sequence](rec)
		if err != nil {
			return err
		}
		if len(rows) != 1 || rows[0].SeqID != g.ID || g.Length >= 0 {
			g.fault(-1, "K3", "its row of the table sequences does not describe it alone")
			return nil
		}
		g.Length = int(rows[0].Length)
	case schemas.TableFaults:
		rows, err := schemas.Rows[schemas.Fault](rec)
		if err != nil {
			return err
		}
		g.aside = true
		for _, f := range rows {
			g.fault(-1, f.Check, "set aside when it was captured: %s", f.Detail)
		}
	}
	return nil
}

func (g *gathered) fault(row int, rule, format string, a ...any) {
	g.faults = append(g.faults, verify.Fault{Sample: g.ID, Row: row, State: -1, Rule: rule, Value: fmt.Sprintf(format, a...)})
}

// digest is that of what was captured, however it was cut into records.
func (g *gathered) digest() uint64 {
	for _, state := range slices.Sorted(maps.Keys(g.States)) {
		g.seen.Write(schemas.F32.AppendBytes(nil, g.States[state]))
	}
	return g.seen.Sum64()
}

// end checks a sequence that is whole.
func (c *checks) end(ctx context.Context, g *gathered) error {
	c.v.Samples++
	faults := g.faults
	if !g.aside {
		faults = append(faults, g.Check()...)
	}
	if c.truth == nil && !g.aside {
		faults = append(faults, g.Band(c.run.Profile)...)
	}
	if c.truth != nil && !g.aside && !slices.ContainsFunc(faults, func(f verify.Fault) bool { return f.Rule == "K3" || f.Rule == "K11" || f.Rule == "K6" }) {
		more, err := c.truth.check(ctx, g.Sequence)
		if err != nil {
			return fmt.Errorf("checking sequence %s against the target: %w", g.ID, err)
		}
		faults = append(faults, more...)
	}
	if c.truth != nil && c.truth.tok != nil && !g.aside {
		faults = append(faults, c.truth.misplaced(g.Tokens)...)
	}
	if slices.ContainsFunc(faults, func(f verify.Fault) bool { return f.Warning && f.Value == verify.Idle }) {
		c.v.idle++
	}
	before := c.v.Faults
	for _, f := range faults {
		f.File = c.file
		c.v.add(f)
	}
	if c.v.Faults == before {
		c.v.sound++
	}
	return nil
}
