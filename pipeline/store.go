package pipeline

import (
	"context"
	"fmt"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
)

// storeHandler puts a Sink behind a reader. The messages of a sequence are
// acknowledged after the Commit that made it durable.
type storeHandler struct {
	run       *invocation
	sink      Sink
	from      route
	partition int
	books     *ledger

	noted bool                 // whether the server is told what is stored
	ended map[string]*sequence // not committed yet
	own   map[string]int64     // committed sequences by the invocation that published them
}

func (h *storeHandler) record(ctx context.Context, s *sequence, rec arrow.Record) error {
	if _, again := h.ended[s.id]; again {
		// The sink shall see a repeat of what is durable, never of what is not.
		if err := h.commit(ctx); err != nil {
			return err
		}
	}
	if err := h.sink.Write(ctx, s.id, rec); err != nil {
		return fmt.Errorf("storing sequence %q: %w", s.id, err)
	}
	return nil
}

func (h *storeHandler) end(ctx context.Context, s *sequence, streamSeq uint64) error {
	if _, again := h.ended[s.id]; again {
		if err := h.commit(ctx); err != nil {
			return err
		}
	}
	if err := h.sink.End(ctx, s.id, streamSeq); err != nil {
		return fmt.Errorf("storing sequence %q: %w", s.id, err)
	}
	h.ended[s.id] = s
	if h.sink.Pending() >= h.run.cfg.CommitBytes || len(h.ended) >= h.run.cfg.CommitSequences {
		return h.commit(ctx)
	}
	return nil
}

func (h *storeHandler) drop(s *sequence) { h.sink.Drop(s.id) }

func (h *storeHandler) idle(ctx context.Context) error { return h.commit(ctx) }

func (h *storeHandler) settle(ctx context.Context) error { return h.commit(ctx) }

func (h *storeHandler) commit(ctx context.Context) error {
	if len(h.ended) == 0 {
		return nil
	}
	report := Commit{Stream: h.from.stream, Group: h.from.group, Partition: h.partition, Sequences: len(h.ended), Bytes: h.sink.Pending()}
	start := time.Now()
	if err := h.sink.Commit(ctx); err != nil {
		return fmt.Errorf("committing partition %d of %s: %w", h.partition, h.from.name(), err)
	}
	if report.Took = time.Since(start); h.run.cfg.OnCommit != nil {
		h.run.cfg.OnCommit(report)
	}
	var stored []string
	var last uint64
	for id, s := range h.ended {
		stored, last = append(stored, id), max(last, s.held[len(s.held)-1])
		h.books.ack(s.held...)
		h.own[nonceOf(s.attempt)]++
		delete(h.ended, id)
		if h.from.stream == CaptureStream {
			h.run.progress.stored.Add(1)
		} else {
			h.run.progress.resultsStored.Add(1)
		}
	}
	if h.noted {
		// After the acks, which a slow server should not hold up. What a crash
		// between the two leaves out is captured again if it is purged.
		if err := h.run.noteStored(ctx, h.partition, last, stored); err != nil {
			h.run.log.Debug("noting what is stored", "partition", h.partition, "error", err)
		}
	}
	return nil
}

// finish compares what was sent with what is durable.
func (h *storeHandler) finish(_ context.Context, nonce string, sequences, aside int64) error {
	own := h.own[nonce]
	clear(h.own)
	if sequences != unknown && own+aside != sequences {
		return fmt.Errorf("%w: %d were published to partition %d of %s, %d are stored and %d set aside",
			ErrIncomplete, sequences, h.partition, h.from.name(), own, aside)
	}
	return nil
}
