package pipeline

import (
	"context"
	"fmt"

	"github.com/apache/arrow/go/v17/arrow"
)

// stageHandler puts a Stage behind a reader of the capture stream. What the
// stage emits goes into the results stream; the messages of a sequence are
// acknowledged once the server has its results' end marker, before which it
// has all the results.
type stageHandler struct {
	run       *invocation
	stage     Stage
	partition int
	results   *publisher
	books     *ledger
	sent      int64     // sequences whose results were ended
	owed      []*outSeq // dropped, and readers of the results do not know it yet
}

func (h *stageHandler) emitter(ctx context.Context, s *sequence) func(arrow.Record) error {
	if s.out == nil {
		s.out = h.results.begin(s.id, h.run.attempt(), h.partition)
	}
	return func(rec arrow.Record) error {
		n, err := h.results.record(ctx, s.out, rec)
		h.run.progress.resultBytes.Add(n)
		return err
	}
}

func (h *stageHandler) record(ctx context.Context, s *sequence, rec arrow.Record) error {
	if err := h.giveUp(ctx); err != nil {
		return err
	}
	if err := h.stage.Process(ctx, s.id, rec, h.emitter(ctx, s)); err != nil {
		return fmt.Errorf("processing sequence %q: %w", s.id, err)
	}
	h.run.progress.processedRows.Add(rec.NumRows())
	return nil
}

func (h *stageHandler) end(ctx context.Context, s *sequence, _ uint64) error {
	if err := h.stage.End(ctx, s.id, h.emitter(ctx, s)); err != nil {
		return fmt.Errorf("ending sequence %q: %w", s.id, err)
	}
	s.begun = false // it is no longer the stage's to forget
	h.sent++
	held := s.held
	return h.results.end(ctx, s.out, func() {
		h.books.ack(held...)
		h.run.progress.processed.Add(1)
	})
}

func (h *stageHandler) drop(s *sequence) {
	h.stage.Drop(s.id)
	if s.out != nil {
		h.results.abandon(s.out)
		h.owed = append(h.owed, s.out)
		s.out = nil
	}
}

// giveUp tells the readers of the results what was dropped: they would hold
// it, and with it the stream's room, until the end of the run.
func (h *stageHandler) giveUp(ctx context.Context) error {
	for _, o := range h.owed {
		if err := h.results.giveUp(ctx, o); err != nil {
			return err
		}
	}
	h.owed = nil
	return nil
}

func (h *stageHandler) idle(ctx context.Context) error { return h.giveUp(ctx) }

func (h *stageHandler) settle(ctx context.Context) error {
	if err := h.giveUp(ctx); err != nil {
		return err
	}
	return h.results.flush(ctx)
}

// finish passes the end of the run on.
func (h *stageHandler) finish(ctx context.Context, _ string, _, _ int64) error {
	if err := h.results.control(ctx, kindEndOfRun, h.run.nonce, h.partition, h.sent); err != nil {
		return err
	}
	return h.results.flush(ctx)
}
