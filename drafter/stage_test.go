package drafter_test

import (
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/pipeline"
	"github.com/draftscope/draftscope/schemas"
)

var _ pipeline.Stage = (*drafter.Stage)(nil)

// emitted is what a stage gave for a sequence, by drafter.
type emitted struct {
	drafts map[string][]schemas.Draft
	slots  map[string][]schemas.Slot
	rounds map[string][]schemas.Round
	faults map[string][]schemas.Fault
	tables []string // drafter/table, in order
}

func newEmitted() *emitted {
	return &emitted{
		drafts: map[string][]schemas.Draft{}, slots: map[string][]schemas.Slot{},
		rounds: map[string][]schemas.Round{}, faults: map[string][]schemas.Fault{},
	}
}

func (e *emitted) take(rec arrow.Record) error {
	env, err := schemas.EnvelopeOf(rec)
	if err != nil {
		return err
	}
	e.tables = append(e.tables, env.Drafter+"/"+env.Table)
	switch env.Table {
	case schemas.TableDrafts:
		return appendRows(e.drafts, env.Drafter, rec)
	case schemas.TableSlots:
		return appendRows(e.slots, env.Drafter, rec)
	case schemas.TableRounds:
		return appendRows(e.rounds, env.Drafter, rec)
	case schemas.TableFaults:
		return appendRows(e.faults, env.Drafter, rec)
	}
	return nil
}

func appendRows[T any](to map[string][]T, drafter string, rec arrow.Record) error {
	rows, err := schemas.Rows[T](rec)
	to[drafter] = append(to[drafter], rows...)
	return err
}

// feed sends a whole sequence through a stage in batches of step rows.
func feed(tb testing.TB, w *world, s *drafter.Stage, mem memory.Allocator, c captured, step int) *emitted {
	tb.Helper()
	var records []schemas.Capture
	for lo := 0; lo < len(c.ids); lo += step {
		records = append(records, c.record(tb, w, lo, min(lo+step, len(c.ids))))
	}
	return feedRecords(tb, s, mem, c, records)
}

func feedRecords(tb testing.TB, s *drafter.Stage, mem memory.Allocator, c captured, records []schemas.Capture) *emitted {
	tb.Helper()
	out := newEmitted()
	process := func(rec arrow.Record) {
		tb.Helper()
		defer rec.Release()
		if err := s.Process(tb.Context(), c.id, rec, out.take); err != nil {
			tb.Fatal(err)
		}
	}
	for _, r := range records {
		rec, err := schemas.CaptureRecord(mem, r)
		if err != nil {
			tb.Fatal(err)
		}
		process(rec)
	}
	process(schemas.Record(mem, schemas.Envelope{Table: schemas.TableSequences, Run: "r1"}, []schemas.Sequence{{
		SeqID: c.id, PromptLen: int32(c.promptLen), Length: int32(len(c.ids)), FinishReason: "length",
	}}))
	if err := s.End(tb.Context(), c.id, out.take); err != nil {
		tb.Fatal(err)
	}
	return out
}

// stage starts a stage over checked memory; the test fails if any leaks.
func (w *world) stage(cfg drafter.Config) (*drafter.Stage, memory.Allocator) {
	w.tb.Helper()
	mem := memory.NewCheckedAllocator(memory.DefaultAllocator)
	cfg.Host, cfg.Device, cfg.Allocator = w.host, w.dev, mem
	s, err := drafter.NewStage(cfg)
	w.must(err)
	w.tb.Cleanup(func() {
		s.Close()
		if t, ok := w.tb.(*testing.T); ok {
			mem.AssertSize(t, 0)
		}
	})
	return s, mem
}
