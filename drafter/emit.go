package drafter

import (
	"cmp"
	"slices"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/draftscope/draftscope/schemas"
)

// Rows of one emitted record, at most. A row of drafts is some hundred times
// as long as the others.
const (
	emitRows   = 4096
	emitDrafts = 512
)

// emit publishes a drafter's rows for a sequence, or its fault.
func (s *Stage) emit(q *sequence, l *lane, rounds []schemas.Round, emit func(arrow.Record) error) error {
	env := schemas.Envelope{Run: q.run, Drafter: l.drafter.Name}
	if l.fault != nil {
		fault := *l.fault
		fault.SeqID, fault.Chunk, fault.At = q.id, -1, s.cfg.Now().UTC()
		env.Table = schemas.TableFaults
		return emitRecord(s, env, []schemas.Fault{fault}, emit)
	}
	slices.SortStableFunc(l.drafts, func(a, b schemas.Draft) int { return cmp.Compare(a.Anchor, b.Anchor) })
	slices.SortStableFunc(l.slots, func(a, b schemas.Slot) int {
		return cmp.Or(cmp.Compare(a.Anchor, b.Anchor), cmp.Compare(a.Slot, b.Slot))
	})
	env.Table = schemas.TableDrafts
	for part := range slices.Chunk(l.drafts, emitDrafts) {
		if err := emitRecord(s, env, part, emit); err != nil {
			return err
		}
	}
	env.Table = schemas.TableSlots
	for part := range slices.Chunk(l.slots, emitRows) {
		if err := emitRecord(s, env, part, emit); err != nil {
			return err
		}
	}
	env.Table = schemas.TableRounds
	if len(rounds) == 0 {
		return emitRecord(s, env, rounds, emit) // the marker
	}
	for part := range slices.Chunk(rounds, emitRows) {
		if err := emitRecord(s, env, part, emit); err != nil {
			return err
		}
	}
	return nil
}

func emitRecord[T any](s *Stage, env schemas.Envelope, rows []T, emit func(arrow.Record) error) error {
	rec := schemas.Record(s.cfg.Allocator, env, rows)
	defer rec.Release()
	return emit(rec)
}
