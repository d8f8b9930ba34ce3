package pipeline

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// tombstone is the note that a sequence was deleted from the streams of a run.
// It is there before the first message goes.
type tombstone struct {
	Partition int `json:"partition"`
	// Attempts are those that were whole: who has not read one of them is not
	// to wait for it, nor to call it missing.
	Attempts []string `json:"attempts"`
}

// Deletion says what Delete removed.
type Deletion struct {
	Sequence string   `json:"sequence"`
	Streams  []string `json:"streams"`
	Messages int      `json:"messages"`
}

// ErrNoSequence marks a sequence of which the streams of a run hold nothing.
var ErrNoSequence = errors.New("no such sequence in the streams")

// Delete removes the messages of a sequence from all streams of the run, and
// leaves a note, so that readers count it as deleted, and a source that is
// resumed does not send it again. What is in a sink already stays there. A
// reader that is in the middle of the sequence drops it.
func (s *Session) Delete(ctx context.Context, seq string) (Deletion, error) {
	d := Deletion{Sequence: seq}
	err := checkSeqID(seq)
	if err == nil {
		err = s.delete(ctx, seq, &d)
	}
	if err != nil {
		return d, fmt.Errorf("deleting sequence %q of run %s: %w", seq, s.cfg.Run, err)
	}
	return d, nil
}

func (s *Session) delete(ctx context.Context, seq string, d *Deletion) error {
	partitions, err := storedPartitions(ctx, s.js, s.cfg.Run, CaptureStream)
	if err != nil {
		return err
	}
	if partitions == 0 {
		return fmt.Errorf("%w: the run has no capture stream", ErrNoSequence)
	}
	groups, err := s.Groups(ctx)
	if err != nil {
		return err
	}
	t := tombstone{Partition: Partition(seq, partitions)}
	routes := []route{{run: s.cfg.Run, stream: CaptureStream}, {run: s.cfg.Run, stream: ResultsStream}}
	for _, g := range groups {
		routes = append(routes, route{s.cfg.Run, ResultsStream, g.Name, t.Partition})
	}
	found := map[string][]uint64{} // numbers by stream, those of end markers last
	for _, r := range routes {
		numbers, attempts, err := s.messagesOf(ctx, r, t.Partition, seq)
		if err != nil {
			return err
		}
		if len(numbers) > 0 {
			found[r.name()] = numbers
			d.Streams = append(d.Streams, r.name())
		}
		t.Attempts = append(t.Attempts, attempts...)
	}
	if len(found) == 0 {
		return ErrNoSequence
	}
	if err := s.bury(ctx, seq, t); err != nil {
		return err
	}
	for _, name := range d.Streams {
		stream, err := s.js.Stream(ctx, name)
		if err != nil {
			return fmt.Errorf("opening stream %s: %w", name, err)
		}
		// Backwards: a reader sees a sequence without an end, never one with a
		// hole in it.
		for _, n := range slices.Backward(found[name]) {
			if err := stream.DeleteMsg(ctx, n); err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) && !errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
				return fmt.Errorf("deleting message %d of stream %s: %w", n, name, err)
			}
			d.Messages++
		}
	}
	return nil
}

// messagesOf lists the messages of a sequence in one stream, ascending, and
// its attempts that are whole.
func (s *Session) messagesOf(ctx context.Context, r route, partition int, seq string) (numbers []uint64, attempts []string, err error) {
	stream, err := s.js.Stream(ctx, r.name())
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("opening stream %s: %w", r.name(), err)
	}
	err = s.eachHeader(ctx, stream, r.subject(partition), func(h header, number uint64) {
		if h.seq != seq {
			return
		}
		numbers = append(numbers, number)
		if h.kind == kindEnd {
			attempts = append(attempts, h.attempt)
		}
	})
	return numbers, attempts, err
}

// eachHeader visits the header of every message that a stream holds under a
// subject now; an empty subject is all of them.
func (s *Session) eachHeader(ctx context.Context, stream jetstream.Stream, subject string, visit func(h header, number uint64)) error {
	return s.eachMessage(ctx, stream, subject, true, func(m jetstream.Msg, number uint64) error {
		if h, err := parseHeader(m.Headers()); err == nil {
			visit(h, number)
		}
		return nil
	})
}

// eachMessage visits every message that a stream holds under a subject now, or
// its header only; an empty subject is all of them. It leaves the streams and
// their readers as they are.
func (s *Session) eachMessage(ctx context.Context, stream jetstream.Stream, subject string, headers bool, visit func(m jetstream.Msg, number uint64) error) error {
	name, last := stream.CachedInfo().Config.Name, stream.CachedInfo().State.LastSeq
	if stream.CachedInfo().State.Msgs == 0 {
		return nil
	}
	cfg := jetstream.OrderedConsumerConfig{HeadersOnly: headers}
	if subject != "" {
		cfg.FilterSubjects = []string{subject}
	}
	consumer, err := stream.OrderedConsumer(ctx, cfg)
	if err != nil {
		return fmt.Errorf("reading %s: %w", name, err)
	}
	atOnce := 1000
	if !headers {
		atOnce = pullBatch
	}
	// The client takes a second without any answer for an answer: that there
	// is no more.
	const silence, silences = time.Second, 10
	for silent := 0; ; {
		asked := time.Now()
		batch, err := consumer.FetchNoWait(atOnce)
		if err != nil {
			return fmt.Errorf("reading %s: %w", name, err)
		}
		n := 0
		for m := range batch.Messages() {
			n++
			meta, err := m.Metadata()
			if err != nil {
				continue
			}
			if meta.Sequence.Stream > last {
				return nil
			}
			if err := visit(m, meta.Sequence.Stream); err != nil {
				return err
			}
			if meta.Sequence.Stream >= last {
				return nil
			}
		}
		if err := batch.Error(); err != nil {
			return fmt.Errorf("reading %s: %w", name, err)
		}
		switch {
		case n > 0:
			silent = 0
		case time.Since(asked) < silence:
			return nil
		default:
			if silent++; silent == silences {
				return fmt.Errorf("reading %s: %w", name, nats.ErrTimeout)
			}
		}
	}
}

// bury leaves a tombstone, or adds to the one that is there.
func (s *Session) bury(ctx context.Context, seq string, t tombstone) error {
	have, err := s.tombstones(ctx)
	if err != nil {
		return err
	}
	for _, a := range have[seq].Attempts {
		if !slices.Contains(t.Attempts, a) {
			t.Attempts = append(t.Attempts, a)
		}
	}
	b, err := json.Marshal(t)
	if err != nil {
		return err
	}
	return s.patiently(ctx, func(ctx context.Context) error {
		kv, err := s.notes(ctx)
		if err == nil {
			_, err = kv.Put(ctx, noteKey(s.cfg.Run, "deleted", seq), b)
		}
		if err != nil {
			return fmt.Errorf("leaving a tombstone: %w", err)
		}
		return nil
	})
}

func (s *Session) tombstones(ctx context.Context) (map[string]tombstone, error) {
	notes, err := s.list(ctx, noteKey(s.cfg.Run, "deleted"))
	if err != nil {
		return nil, err
	}
	all := map[string]tombstone{}
	for seq, b := range notes {
		var t tombstone
		if err := json.Unmarshal(b, &t); err != nil {
			return nil, fmt.Errorf("reading the tombstone of sequence %q: %w", seq, err)
		}
		all[seq] = t
	}
	return all, nil
}

// Deleted lists the sequences that were deleted from the run's streams.
func (s *Session) Deleted(ctx context.Context) (list []string, err error) {
	err = s.patiently(ctx, func(ctx context.Context) error {
		all, err := s.tombstones(ctx)
		list = list[:0]
		for seq := range all {
			list = append(list, seq)
		}
		slices.Sort(list)
		return err
	})
	return list, err
}

// deleted counts the whole attempts of an invocation that were deleted before
// this reader had them.
func (r *reader) deleted(ctx context.Context, nonce string) (n int64, err error) {
	err = r.run.patiently(ctx, func(ctx context.Context) error {
		all, err := r.run.tombstones(ctx)
		n = 0
		for _, t := range all {
			for _, a := range t.Attempts {
				if _, done := r.asm.done[a]; !done && nonceOf(a) == nonce && t.Partition == r.partition {
					n++
				}
			}
		}
		return err
	})
	return n, err
}

// ErrNoGroup marks a group of workers that the run does not have.
var ErrNoGroup = errors.New("no such group of workers")

// ForgetGroup makes a group of workers one that nobody waits for any more, and
// deletes the streams of its results. What a store has of them stays there.
// Workers of the group that are still there have to be stopped before.
func (s *Session) ForgetGroup(ctx context.Context, group string) error {
	err := s.forgetGroup(ctx, group)
	if err != nil {
		return fmt.Errorf("forgetting group %s of run %s: %w", group, s.cfg.Run, err)
	}
	return nil
}

func (s *Session) forgetGroup(ctx context.Context, group string) error {
	groups, err := s.Groups(ctx)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(groups, func(g Group) bool { return g.Name == group }) {
		return ErrNoGroup
	}
	kv, err := s.notes(ctx)
	if err == nil {
		err = kv.Purge(ctx, noteKey(s.cfg.Run, "groups", group))
	}
	if err != nil {
		return err
	}
	partitions, err := storedPartitions(ctx, s.js, s.cfg.Run, CaptureStream)
	if err != nil {
		return err
	}
	for p := range partitions {
		err := s.js.DeleteStream(ctx, GroupStreamName(s.cfg.Run, group, p))
		if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return err
		}
	}
	return nil
}

// noteStored leaves word of sequences of the capture that a store has made
// durable: when they are purged, a source that is resumed still knows them.
// last is the number of the last of their messages, which a stream that is made
// anew counts from one again.
func (v *invocation) noteStored(ctx context.Context, partition int, last uint64, seqs []string) error {
	slices.Sort(seqs)
	b, err := json.Marshal(seqs)
	if err != nil {
		return err
	}
	kv, err := v.notes(ctx)
	if err == nil {
		_, err = kv.Put(ctx, noteKey(v.cfg.Run, "stored", fmt.Sprintf("%d-%s-%d", partition, v.nonce, last)), b)
	}
	return err
}

// storedSequences lists what noteStored was told, with its partition.
func (s *Session) storedSequences(ctx context.Context) (map[string]int, error) {
	notes, err := s.list(ctx, noteKey(s.cfg.Run, "stored"))
	if err != nil {
		return nil, err
	}
	all := map[string]int{}
	for key, b := range notes {
		var seqs []string
		partition, err := strconv.Atoi(key[:max(0, strings.IndexByte(key, '-'))])
		if err == nil {
			err = json.Unmarshal(b, &seqs)
		}
		if err != nil {
			return nil, fmt.Errorf("reading the note of stored sequences %s: %w", key, err)
		}
		for _, seq := range seqs {
			all[seq] = partition
		}
	}
	return all, nil
}

// Live lists the runs whose capture stream is there, of whatever name the
// session is.
func (s *Session) Live(ctx context.Context) ([]string, error) {
	var runs []string
	list := s.js.StreamNames(ctx, jetstream.WithStreamListSubject("ds.*."+CaptureStream+".*"))
	for name := range list.Name() {
		rest, ok := strings.CutPrefix(name, "DS_")
		run, ok2 := strings.CutSuffix(rest, "_"+CaptureStream)
		if ok && ok2 {
			runs = append(runs, unescapeToken(run))
		}
	}
	if err := list.Err(); err != nil {
		return nil, fmt.Errorf("listing streams: %w", err)
	}
	slices.Sort(runs)
	return runs, nil
}
