package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
)

// Holder is a [Sink] that can say what its store has. A store that starts, or
// takes over, compares it with what the server says was stored, which may be
// in another store, or have been lost since.
type Holder interface {
	// Held lists the run's sequences that are durable, or durably set aside.
	Held() (map[string]bool, error)
}

// compare looks whether the sink has all that the server says was stored of
// this partition. If not, the reader begins at the start of the stream again:
// what the sink has is dropped as a repeat. What is not in the stream any more
// is a fault, and the notes are corrected, so that a source that is resumed
// sends it again.
func (r *reader) compare(ctx context.Context, sink Sink) error {
	holder, ok := sink.(Holder)
	floor := r.books.acknowledged()
	capture := r.route.stream == CaptureStream
	if !ok {
		return nil
	}
	held, err := holder.Held()
	if err != nil {
		return fmt.Errorf("listing what is stored: %w", err)
	}
	gone, err := r.run.tombstones(ctx)
	if err != nil {
		return err
	}
	stream, err := r.run.js.Stream(ctx, r.route.name())
	if err != nil {
		return fmt.Errorf("opening stream %s: %w", r.route.name(), err)
	}
	there := map[string]bool{} // whole, in the stream
	behind := 0                // of those, sequences that were acknowledged and are not held
	look := func() error {
		return r.run.eachHeader(ctx, stream, r.route.subject(r.partition), func(h header, number uint64) {
			if h.kind != kindEnd || h.count == 0 || there[h.seq] {
				return
			}
			there[h.seq] = true
			if number <= floor && !held[h.seq] {
				behind++
			}
		})
	}
	if floor > 0 {
		if err := look(); err != nil {
			return err
		}
	}
	if capture {
		lacking, err := r.run.amendNotes(ctx, held, r.partition, func(lacking []string) error {
			if floor == 0 {
				if err := look(); err != nil {
					return err
				}
			}
			lost := slices.DeleteFunc(lacking, func(seq string) bool {
				_, deleted := gone[seq]
				return deleted || there[seq]
			})
			if len(lost) == 0 {
				return nil
			}
			r.told = true
			r.run.fault(Fault{Stream: r.route.stream, Chunk: -1, Check: "missing", Detail: fmt.Sprintf(
				"%s of partition %d were stored elsewhere, or stored here and lost, and have left the stream; the same capture, run again, sends them again", counted(lost), r.partition)})
			return nil
		})
		if err != nil {
			return err
		}
		if len(lacking) > 0 {
			r.run.log.Debug("the notes named sequences that are not stored here", "partition", r.partition, "sequences", len(lacking))
		}
	}
	if behind == 0 {
		r.unread(stream, gone)
		return nil
	}
	r.run.log.Warn("sequences that the server takes for stored are not in this dataset: reading the stream again from its beginning", "stream", r.route.name(), "partition", r.partition, "sequences", behind)
	// Without them, nobody takes the run for stored meanwhile.
	names, _, err := r.consumers(ctx)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := r.run.js.DeleteConsumer(ctx, r.route.name(), name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
			return fmt.Errorf("starting over with stream %s: %w", r.route.name(), err)
		}
	}
	r.books = newLedger(0, r.books.send)
	r.unread(stream, gone)
	return nil
}

// unread says that results have left their stream, which is of one partition,
// before this reader came to them. Where sequences were deleted, their messages
// cannot be told from those.
func (r *reader) unread(stream jetstream.Stream, gone map[string]tombstone) {
	for _, t := range gone {
		if t.Partition == r.partition {
			return
		}
	}
	first, next := stream.CachedInfo().State.FirstSeq, r.books.acknowledged()+1
	if r.route.group == "" || first <= next {
		return
	}
	r.run.fault(Fault{Stream: r.route.stream, Chunk: -1, Check: "missing", Detail: fmt.Sprintf(
		"%d messages of the results of group %s on partition %d left their stream before they were read (purged, or aged out); replay of the dataset makes these results", first-next, r.route.group, r.partition)})
}

// counted counts sequences and names the first of them.
func counted(seqs []string) string {
	const atMost = 5
	slices.Sort(seqs)
	text := fmt.Sprintf("%d sequences (%s", len(seqs), strings.Join(seqs[:min(atMost, len(seqs))], ", "))
	if len(seqs) > atMost {
		text += ", …"
	}
	return text + ")"
}

// amendNotes takes the sequences that are not held off the notes of what was
// stored of a partition, or of all of them when it is negative. before hears of
// them while the notes still have them.
func (s *Session) amendNotes(ctx context.Context, held map[string]bool, partition int, before func([]string) error) (lacking []string, err error) {
	prefix := noteKey(s.cfg.Run, "stored")
	notes, err := s.list(ctx, prefix)
	if err != nil {
		return nil, err
	}
	left := map[string][]string{}
	for key, b := range notes {
		if p, _, _ := strings.Cut(key, "-"); partition >= 0 && p != strconv.Itoa(partition) {
			continue
		}
		var seqs []string
		if err := json.Unmarshal(b, &seqs); err != nil {
			return nil, fmt.Errorf("reading the note of stored sequences %s: %w", key, err)
		}
		keep := []string{}
		for _, seq := range seqs {
			if held[seq] {
				keep = append(keep, seq)
			} else {
				lacking = append(lacking, seq)
			}
		}
		if len(keep) < len(seqs) {
			left[key] = keep
		}
	}
	if len(lacking) == 0 {
		return nil, nil
	}
	slices.Sort(lacking)
	lacking = slices.Compact(lacking)
	if err := before(slices.Clone(lacking)); err != nil {
		return nil, err
	}
	kv, err := s.notes(ctx)
	if err != nil {
		return nil, err
	}
	for key, keep := range left {
		if len(keep) == 0 {
			err = kv.Purge(ctx, noteKey(s.cfg.Run, "stored", key))
		} else if b, merr := json.Marshal(keep); merr == nil {
			_, err = kv.Put(ctx, noteKey(s.cfg.Run, "stored", key), b)
		}
		if err != nil {
			return nil, fmt.Errorf("correcting the note of stored sequences %s: %w", key, err)
		}
	}
	return lacking, nil
}

// ForgetStored takes sequences that are not held off the notes of what was
// stored, so that a source that is resumed sends them again, and returns them.
// It is for a run that has no streams.
func (s *Session) ForgetStored(ctx context.Context, held map[string]bool) (lacking []string, err error) {
	err = s.patiently(ctx, func(ctx context.Context) error {
		lacking, err = s.amendNotes(ctx, held, -1, func([]string) error { return nil })
		return err
	})
	return lacking, err
}

// noteSent leaves word of how many sequences this invocation of a source has
// ended on each partition: its end-of-run markers, which say it, may be purged,
// or age out.
func (v *invocation) noteSent(ctx context.Context) error {
	return v.patiently(ctx, func(ctx context.Context) error {
		capture, err := v.js.Stream(ctx, StreamName(v.cfg.Run, CaptureStream))
		if err != nil {
			return fmt.Errorf("looking for what was sent: %w", err)
		}
		ended := make([]int64, v.partitions)
		for p := range ended {
			m, err := capture.GetLastMsgForSubject(ctx, Subject(v.cfg.Run, CaptureStream, p))
			if errors.Is(err, jetstream.ErrMsgNotFound) {
				continue
			}
			if err != nil {
				return fmt.Errorf("looking for what was sent: %w", err)
			}
			if h, err := parseHeader(m.Header); err == nil && h.kind == kindEndOfRun && h.attempt == v.nonce {
				ended[p] = h.count
			}
		}
		b, err := json.Marshal(ended)
		if err != nil {
			return err
		}
		kv, err := v.notes(ctx)
		if err == nil {
			_, err = kv.Put(ctx, noteKey(v.cfg.Run, "sent", v.nonce), b)
		}
		if err != nil {
			return fmt.Errorf("noting what was sent: %w", err)
		}
		return nil
	})
}

// short says that a partition of the capture has had sequences, at least, that
// the sink does not have, and that were not deleted. Invocations that sent the
// same sequences are not told apart: it may find too few missing, never too
// many.
func (s *Session) short(ctx context.Context, sink Sink, partition, partitions int, sent int64) error {
	holder, ok := sink.(Holder)
	if !ok {
		return nil
	}
	held, err := holder.Held()
	if err != nil {
		return fmt.Errorf("listing what is stored: %w", err)
	}
	gone, err := s.tombstones(ctx)
	if err != nil {
		return err
	}
	has := int64(0)
	for seq := range held {
		if Partition(seq, partitions) == partition {
			has++
		}
	}
	for seq, t := range gone {
		if t.Partition == partition && !held[seq] {
			has++
		}
	}
	if has < sent {
		return fmt.Errorf("%w: %d were published to partition %d of the capture, %d of them at least left the stream before they were read (purged, or aged out)", ErrIncomplete, sent, partition, sent-has)
	}
	return nil
}

// agedOut finds out what is missing of partitions whose end has left the
// stream: no marker says it.
func (st *storing) agedOut(ctx context.Context) error {
	v := st.run
	return v.patiently(ctx, func(ctx context.Context) error {
		if state, err := v.sourceState(ctx); state != sourceEnded || err != nil {
			return err
		}
		capture, err := v.js.Stream(ctx, StreamName(v.cfg.Run, CaptureStream))
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("looking at what is left of the capture: %w", err)
		}
		notes, err := v.list(ctx, noteKey(v.cfg.Run, "sent"))
		if err != nil {
			return err
		}
		sent := make([]int64, v.partitions)
		for _, b := range notes {
			var ended []int64
			if err := json.Unmarshal(b, &ended); err != nil {
				return fmt.Errorf("reading what was sent: %w", err)
			}
			for p := range min(len(ended), len(sent)) {
				sent[p] = max(sent[p], ended[p])
			}
		}
		for _, r := range st.readers {
			if r.route.stream != CaptureStream || r.told {
				continue
			}
			_, err := capture.GetLastMsgForSubject(ctx, r.route.subject(r.partition))
			if err == nil {
				continue
			}
			if !errors.Is(err, jetstream.ErrMsgNotFound) {
				return err
			}
			err = v.short(ctx, r.handler.(*storeHandler).sink, r.partition, v.partitions, sent[r.partition])
			if errors.Is(err, ErrIncomplete) {
				v.fault(Fault{Stream: CaptureStream, Chunk: -1, Check: "missing", Detail: err.Error()})
			} else if err != nil {
				return err
			}
		}
		return nil
	})
}
