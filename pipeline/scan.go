package pipeline

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/nats-io/nats.go/jetstream"
)

// Scanner hears what a scan finds, partition by partition, in the order of the
// messages. Sequences may be interleaved.
type Scanner interface {
	// Record takes the next record of a sequence, which the scan releases.
	Record(o Origin, seq string, rec arrow.Record) error
	// End says that a sequence is whole.
	End(o Origin, seq string) error
	// Drop says that nothing more comes of a sequence, and that it is not whole.
	Drop(o Origin, seq string)
	// Fault says what is wrong with a message, or with how they follow each
	// other.
	Fault(o Origin, f Fault)
}

// Scanned is what a scan came by.
type Scanned struct {
	Streams, Messages int
	// Unended are sequences that were begun and are not whole in the stream: on
	// their way, or given up.
	Unended []string
}

// Scan reads what the run's streams hold when it begins, the captures and all
// results, and ends there. It takes no part in the run: readers and messages
// stay as they are. An error of the scanner ends it.
func (s *Session) Scan(ctx context.Context, to Scanner) (out Scanned, err error) {
	gone, err := s.tombstones(ctx)
	if err != nil {
		return out, err
	}
	groups, err := s.Groups(ctx)
	if err != nil {
		return out, err
	}
	partitions, err := storedPartitions(ctx, s.js, s.cfg.Run, CaptureStream)
	if err != nil {
		return out, err
	}
	unended := map[string]bool{}
	scan := func(from route, about []byte) error {
		stream, err := s.js.Stream(ctx, from.name())
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("opening stream %s: %w", from.name(), err)
		}
		out.Streams++
		which := []int{from.partition}
		if from.group == "" {
			which = which[:0]
			for p := range partitions {
				which = append(which, p)
			}
		}
		for _, p := range which {
			r := &scan{
				to: to, asm: newAssembler(""), decoder: newDecoder(s.cfg.Allocator), gone: gone, unended: unended, messages: &out.Messages,
				origin: Origin{Stream: from.stream, Group: from.group, About: about, Partition: p, Name: from.name(), Created: stream.CachedInfo().Created},
			}
			if err := s.eachMessage(ctx, stream, from.subject(p), false, r.message); err != nil {
				return err
			}
			for _, q := range r.asm.reset() {
				r.drop(q)
			}
		}
		return nil
	}
	err = scan(route{run: s.cfg.Run, stream: CaptureStream}, nil)
	if err == nil {
		err = scan(route{run: s.cfg.Run, stream: ResultsStream}, nil)
	}
	for _, g := range groups {
		for p := range partitions {
			if err == nil {
				err = scan(route{s.cfg.Run, ResultsStream, g.Name, p}, g.About)
			}
		}
	}
	out.Unended = slices.Sorted(maps.Keys(unended))
	return out, err
}

// scan reads one partition of one stream.
type scan struct {
	to       Scanner
	origin   Origin
	asm      *assembler
	decoder  *decoder
	gone     map[string]tombstone
	unended  map[string]bool
	messages *int

	begun bool  // the begin of the invocation at hand is in the stream
	ended int64 // sequences of it that ended, whole or not
}

func (r *scan) message(m jetstream.Msg, number uint64) error {
	*r.messages++
	h, err := parseHeader(m.Headers())
	if err != nil {
		r.fault(Fault{Chunk: -1, Check: "header", Detail: fmt.Sprintf("message %d: %v", number, err)})
		return nil
	}
	for _, q := range r.asm.retire(nonceOf(h.attempt)) {
		r.drop(q)
	}
	switch h.kind {
	case kindBegin:
		if r.asm.adopt(h.attempt) {
			r.begun, r.ended = true, 0
		}
		return nil
	case kindEndOfRun:
		for id, q := range r.asm.open {
			r.drop(q)
			delete(r.asm.open, id)
		}
		// What was deleted took its messages along.
		if r.begun && h.attempt == r.asm.nonce && r.ended != h.count && len(r.gone) == 0 {
			r.fault(Fault{Chunk: -1, Check: "missing", Detail: fmt.Sprintf("%d sequences were published to partition %d, %d are there", h.count, r.origin.Partition, r.ended)})
		}
		return nil
	}
	v, q, replaced, fault := r.asm.accept(h)
	if replaced != nil {
		r.drop(replaced)
	}
	switch v {
	case skip, repeat:
		if h.kind == kindEnd && r.asm.done[h.attempt] {
			r.ended++
		}
		return nil
	case spoiled:
		if _, deleted := r.gone[h.seq]; !deleted {
			r.setAside(q, *fault)
		}
		if h.kind == kindEnd {
			delete(r.asm.open, q.id)
			r.ended++
		}
		return nil
	case complete:
		r.ended++
		delete(r.unended, q.id)
		return r.to.End(r.origin, q.id)
	}
	rec, err := r.decoder.decode(h, m.Data())
	if err != nil {
		r.setAside(q, Fault{Seq: q.id, Chunk: h.chunk, Check: "frame", Detail: fmt.Sprintf("message %d: %v", number, err)})
		return nil
	}
	defer rec.Release()
	q.begun = true
	return r.to.Record(r.origin, q.id, rec)
}

func (r *scan) fault(f Fault) {
	f.Stream = r.origin.Stream
	r.to.Fault(r.origin, f)
}

func (r *scan) setAside(q *sequence, f Fault) {
	q.aside = true
	if nonceOf(q.attempt) == r.asm.nonce {
		r.asm.done[q.attempt] = true
	}
	r.fault(f)
	if q.begun {
		q.begun = false
		r.to.Drop(r.origin, q.id)
	}
}

// drop forgets a sequence that will not become whole in this attempt.
func (r *scan) drop(q *sequence) {
	if _, deleted := r.gone[q.id]; !deleted && !q.aside {
		r.unended[q.id] = true
	}
	if q.begun {
		r.to.Drop(r.origin, q.id)
	}
}
