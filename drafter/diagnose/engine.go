package diagnose

import (
	"context"
	"fmt"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
)

// engineRun is what package drafter's engine made of one sequence.
type engineRun struct {
	slots  []schemas.Slot // by anchor, then slot
	warm   []float64      // of each slot KL at temperature 2, once asked for
	rounds []schemas.Round
	faults []schemas.Fault
}

// treeBudget is the one tree that is drawn beside the chain.
const treeBudget = 8

// runEngine puts every sequence through a drafting stage: every anchor, every
// slot. With shift the label of a slot is the target's answer that many tokens
// further on, as a drafter with shifted labels was trained for; the rounds
// then mean nothing.
func (s *study) runEngine(ctx context.Context, c Checkpoint, losses cuda.Losses, shift int) ([]engineRun, error) {
	d, err := drafter.Open(c.Name, c.Config, c.Weights, s.Host, s.Device)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	stage, err := drafter.NewStage(drafter.Config{
		Drafters: []*drafter.Drafter{d}, Host: s.Host, Device: s.Device, Budgets: []int{treeBudget}, Losses: losses,
	})
	if err != nil {
		return nil, err
	}
	defer stage.Close()
	out := make([]engineRun, len(s.seqs))
	for i, q := range s.seqs {
		if err := s.feed(ctx, stage, q, shift, &out[i]); err != nil {
			return nil, fmt.Errorf("scoring %s: %w", q.ID, err)
		}
		if f := out[i].faults; len(f) > 0 {
			return nil, fmt.Errorf("%w: the engine set sequence %s aside: %s %s", ErrCase, q.ID, f[0].Check, f[0].Detail)
		}
	}
	return out, nil
}

func (s *study) feed(ctx context.Context, stage *drafter.Stage, q *subject, shift int, to *engineRun) error {
	c := schemas.Capture{Spec: schemas.CaptureSpec{Run: "diagnose", Hidden: s.Host.Hidden, Layers: s.Host.Layers, DType: schemas.F32}}
	for state, vals := range s.states(q, false) {
		if vals == nil {
			continue
		}
		if state == s.Host.Layers && shift != 0 {
			vals = shiftRows(vals, s.Host.Hidden, shift)
		}
		c.Spec.States = append(c.Spec.States, state)
		c.States = append(c.States, schemas.F32.AppendBytes(nil, vals))
	}
	for t, tok := range q.Tokens {
		tok.TargetArgmax = nil
		if at := t + 1 + shift; at >= 0 && at < len(q.labels) && q.labels[at] >= 0 {
			tok.TargetArgmax = &q.labels[at]
		}
		tok.SeqID, tok.Pos = q.ID, int32(t)
		c.Tokens = append(c.Tokens, tok)
	}
	rec, err := schemas.CaptureRecord(memory.DefaultAllocator, c)
	if err != nil {
		return err
	}
	defer rec.Release()
	if err := stage.Process(ctx, q.ID, rec, nil); err != nil {
		return err
	}
	return stage.End(ctx, q.ID, func(rec arrow.Record) error { return to.take(rec) })
}

// shiftRows moves rows up by some positions; those that fall off at one end
// come in at the other, since a row that is repeated is a fault (K2).
func shiftRows(vals []float32, width, by int) []float32 {
	n := len(vals) / width
	out := make([]float32, 0, len(vals))
	for t := range n {
		from := ((t+by)%n + n) % n
		out = append(out, vals[from*width:(from+1)*width]...)
	}
	return out
}

func (e *engineRun) take(rec arrow.Record) error {
	env, err := schemas.EnvelopeOf(rec)
	if err != nil {
		return err
	}
	switch env.Table {
	case schemas.TableSlots:
		rows, err := schemas.Rows[schemas.Slot](rec)
		e.slots = append(e.slots, rows...)
		return err
	case schemas.TableRounds:
		rows, err := schemas.Rows[schemas.Round](rec)
		e.rounds = append(e.rounds, rows...)
		return err
	case schemas.TableFaults:
		rows, err := schemas.Rows[schemas.Fault](rec)
		e.faults = append(e.faults, rows...)
		return err
	}
	return nil
}
