package pipeline

import (
	"context"

	"github.com/apache/arrow/go/v17/arrow"
)

// Source yields the records of sequences. The records of one sequence follow
// each other without another sequence's in between.
type Source interface {
	// Next returns the next record, the sequence it belongs to, and whether
	// it is that sequence's last. The caller releases the record. After the
	// last sequence it returns io.EOF. It is called from one goroutine.
	Next(ctx context.Context) (seq string, rec arrow.Record, last bool, err error)
}

// Stage turns the records of sequences into other records. One Stage serves
// one partition, from one goroutine. The records of one sequence come in
// order; those of different sequences may interleave.
type Stage interface {
	// Process takes the next record of a sequence. It must not keep rec
	// beyond the call unless it retains it. emit publishes a record; the
	// stage keeps ownership of it and may release it when emit returns.
	Process(ctx context.Context, seq string, rec arrow.Record, emit func(arrow.Record) error) error
	// End says that all of the sequence's records were processed and that
	// their counts and digests are right. What the stage still owes for the
	// sequence is emitted here; the acks follow.
	End(ctx context.Context, seq string, emit func(arrow.Record) error) error
	// Drop says that the sequence will be sent again from its start, or
	// never be completed. The stage forgets it.
	Drop(seq string)
}

// Sink stores the records of sequences. One Sink serves one partition of one
// stream, from one goroutine.
type Sink interface {
	// Write takes the next record of a sequence; see [Stage.Process].
	Write(ctx context.Context, seq string, rec arrow.Record) error
	// End says that the sequence is complete and verified. streamSeq is the
	// stream's own number of its last message.
	End(ctx context.Context, seq string, streamSeq uint64) error
	// Drop says that the sequence will be sent again, or never completed.
	Drop(seq string)
	// Pending is the number of raw bytes that Commit would make durable.
	Pending() int64
	// Commit makes every ended sequence durable, as whole files or not at
	// all; only after it returns are those sequences acknowledged.
	Commit(ctx context.Context) error
	// Close drops what was not committed.
	Close() error
}
