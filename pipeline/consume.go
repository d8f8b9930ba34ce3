package pipeline

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// handler is what a reader does with sequences: a stage or a sink behind it.
type handler interface {
	// record takes the next record of s.
	record(ctx context.Context, s *sequence, rec arrow.Record) error
	// end takes over s and sees to it that s.held is acknowledged.
	end(ctx context.Context, s *sequence, streamSeq uint64) error
	// drop forgets s.
	drop(s *sequence)
	// idle says that nothing came for a while.
	idle(ctx context.Context) error
	// settle returns once all that was ended is acknowledged.
	settle(ctx context.Context) error
	// finish is called when the invocation nonce says that it sends no more,
	// after settle. sequences is how many it ended on this partition, or
	// unknown when this reader was not there from its beginning; aside how
	// many of them were set aside here.
	finish(ctx context.Context, nonce string, sequences, aside int64) error
}

// reader reads one partition of one stream for one handler.
type reader struct {
	run       *invocation
	route     route
	role      string // stage or store; part of the consumer's name
	partition int
	books     *ledger
	asm       *assembler
	handler   handler
	decoder   *decoder

	// foreign says that the publisher is another process: its invocations
	// are known from their begin markers, and follow each other.
	foreign bool
	ends    bool            // a foreign reader that reads up to one end-of-run marker
	stop    <-chan struct{} // closed to stop after the sequence at hand; nil is never
	urged   chan struct{}   // the stream is full: commit what there is

	made  int    // consumers made so far
	next  uint64 // consumer sequence that is due
	aside int64  // sequences of this invocation that were set aside and are through
	told  bool   // a fault has said what was lost of this partition before this reader came
}

const pullBatch = 8

// pullHeartbeat is how often the server says that it still minds a request for
// messages. When it does not, the request was lost, and is made again.
const pullHeartbeat = 2 * time.Second

// lostAfter is how long a reader is patient with a consumer that does not
// answer, or that says it delivered or lacks what this reader knows better.
const lostAfter = 2 * time.Second

// unknown stands for a count that cannot be compared.
const unknown = -1

var (
	errIrregular = errors.New("delivery out of order")
	errRestarted = errors.New("connection was lost meanwhile")
)

// openReader finds out where the last invocation stopped.
func openReader(ctx context.Context, run *invocation, from route, role string, partition int) (*reader, error) {
	r := &reader{run: run, route: from, role: role, partition: partition, asm: newAssembler(run.nonce), decoder: newDecoder(run.cfg.Allocator), urged: make(chan struct{}, 1)}
	names, floor, err := r.consumers(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading where partition %d of %s stopped: %w", partition, from.name(), err)
	}
	r.run.log.Debug("reader", "stream", from.name(), "role", role, "partition", partition, "floor", floor, "earlier", len(names))
	r.books = newLedger(floor, func(reply string, verb []byte) { _ = run.nc.Publish(reply, verb) })
	return r, nil
}

func (r *reader) prefix() string { return fmt.Sprintf("%s-%d-", r.role, r.partition) }

// consumers lists this reader's consumers and the highest sequence up to
// which one of them has everything acknowledged.
func (r *reader) consumers(ctx context.Context) (names []string, floor uint64, err error) {
	s, err := r.run.js.Stream(ctx, r.route.name())
	if err != nil {
		return nil, 0, err
	}
	list := s.ListConsumers(ctx)
	for info := range list.Info() {
		if strings.HasPrefix(info.Name, r.prefix()) {
			names = append(names, info.Name)
			floor = max(floor, floorOf(info))
		}
	}
	return names, floor, list.Err()
}

// subscribe makes a new consumer behind the floor and deletes the earlier
// ones. A new one has no memory of deliveries that nobody waits for any more,
// so that a restart does not have to sit out AckWait. The order makes a crash
// between the two harmless.
func (r *reader) subscribe(ctx context.Context) (jetstream.Consumer, error) {
	old, _, err := r.consumers(ctx)
	if err != nil {
		return nil, err
	}
	r.made++
	c, err := r.run.js.CreateConsumer(ctx, r.route.name(), jetstream.ConsumerConfig{
		Durable:       fmt.Sprintf("%s%s-%d", r.prefix(), r.run.nonce, r.made),
		FilterSubject: r.route.subject(r.partition),
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:   r.books.forget() + 1,
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       r.run.cfg.AckWait,
		MaxAckPending: -1,
	})
	if err != nil {
		return nil, err
	}
	for _, name := range old {
		err := r.run.js.DeleteConsumer(ctx, r.route.name(), name)
		if err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
			return nil, err
		}
	}
	r.next = 1
	return c, nil
}

// read runs until the end-of-run marker of this invocation is through.
func (r *reader) read(ctx context.Context) error {
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		lost := r.run.reconnected()
		consumer, err := r.subscribe(ctx)
		if err == nil {
			err = r.follow(ctx, consumer, lost)
			if err == nil {
				return nil
			}
		} else if ctx.Err() == nil && outage(err) {
			err = errRestarted
		}
		if errors.Is(err, errStopped) {
			return err
		}
		if !errors.Is(err, errIrregular) && !errors.Is(err, errRestarted) {
			return fmt.Errorf("reading partition %d of %s: %w", r.partition, r.route.stream, explained(err))
		}
		r.run.log.Debug("starting again behind the last acknowledged message", "stream", r.route.stream, "role", r.role, "partition", r.partition, "why", err)
		if err := r.handler.settle(ctx); err != nil {
			return err
		}
		r.abandon()
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// outage says that err comes from a server that is away, not from an answer.
func outage(err error) bool {
	return errors.Is(err, nats.ErrNoResponders) || errors.Is(err, nats.ErrTimeout) || errors.Is(err, nats.ErrDisconnected) ||
		errors.Is(err, nats.ErrReconnectBufExceeded) || errors.Is(err, nats.ErrConnectionReconnecting) ||
		errors.Is(err, jetstream.ErrNoStreamResponse) || errors.Is(err, jetstream.ErrNoHeartbeat) ||
		errors.Is(err, jetstream.ErrServerShutdown) || errors.Is(err, jetstream.ErrConsumerLeadershipChanged) || apiCode(err) == codeClusterNotAvail || errors.Is(err, context.DeadlineExceeded)
}

// follow handles the consumer's messages as they come.
func (r *reader) follow(ctx context.Context, consumer jetstream.Consumer, lost <-chan struct{}) error {
	// Without ctx's deadline, which a fetch would make its own.
	pulling, stop := context.WithCancel(context.WithoutCancel(ctx))
	msgs := make(chan jetstream.Msg, pullBatch)
	pulled := make(chan error, 1)
	go func() { pulled <- pull(pulling, consumer, msgs) }()
	defer func() {
		stop()
		if err := <-pulled; err != nil {
			r.run.log.Debug("fetching has ended", "stream", r.route.name(), "error", err)
		}
	}()
	idle := time.NewTimer(r.run.cfg.CommitIdle)
	defer idle.Stop()
	told, stopping := r.stop, false
	var doubt doubt
	for {
		select {
		case m := <-msgs:
			if finished, err := r.message(ctx, m); finished || err != nil {
				return err
			}
			if stopping && !r.asm.busy() {
				return r.settled(ctx)
			}
			idle.Reset(r.run.cfg.CommitIdle)
		case <-idle.C:
			if stopping {
				return r.settled(ctx)
			}
			if err := r.handler.idle(ctx); err != nil {
				return err
			}
			if r.lost(ctx, consumer, &doubt) {
				return errIrregular
			}
			idle.Reset(r.run.cfg.CommitIdle)
		case <-r.urged:
			if err := r.handler.idle(ctx); err != nil {
				return err
			}
		case <-told:
			// A stage has worked for the sequence at hand; a sink has not.
			if !r.ends || !r.asm.busy() {
				return r.settled(ctx)
			}
			told, stopping = nil, true
			idle.Reset(min(r.run.cfg.CommitIdle, time.Second))
		case <-lost:
			return errRestarted
		case err := <-pulled:
			pulled <- nil
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// doubt is when a reader last asked its consumer, and what was due then.
type doubt struct {
	asked time.Time
	next  uint64
	held  int
	found bool // something was missing
}

// lost asks the consumer of a reader to which nothing comes whether a delivery
// or an ack got lost on the way. The server would repeat it, but after AckWait
// only. What is merely on its way is not missing when it is asked again.
func (r *reader) lost(ctx context.Context, consumer jetstream.Consumer, d *doubt) bool {
	held := r.books.unacknowledged()
	if d.next != r.next || d.held != held {
		*d = doubt{asked: time.Now(), next: r.next, held: held}
	}
	if time.Since(d.asked) < lostAfter {
		return false
	}
	d.asked = time.Now()
	ask, cancel := context.WithTimeout(ctx, r.run.cfg.ConnectTimeout)
	defer cancel()
	info, err := consumer.Info(ask)
	if err != nil {
		return false // it shows elsewhere
	}
	before := d.found
	d.found = info.Delivered.Consumer >= r.next || info.NumAckPending > held
	return before && d.found
}

// settled ends a reader that was told to stop.
func (r *reader) settled(ctx context.Context) error {
	if err := r.handler.settle(ctx); err != nil {
		return err
	}
	return errStopped
}

// abandon forgets what is open: it comes again to whoever reads next.
func (r *reader) abandon() {
	for _, s := range r.asm.reset() {
		if s.begun {
			r.handler.drop(s)
		}
	}
}

// pull fetches messages a few at a time: one batch is worked on while the
// next is on its way, and no more than that is held in memory.
func pull(ctx context.Context, consumer jetstream.Consumer, out chan<- jetstream.Msg) error {
	var missing time.Time // since when nobody answers
	for ctx.Err() == nil {
		batch, err := consumer.Fetch(pullBatch, jetstream.FetchContext(ctx), jetstream.FetchHeartbeat(pullHeartbeat))
		if err == nil {
			for m := range batch.Messages() {
				select {
				case out <- m:
				case <-ctx.Done():
				}
			}
			err = batch.Error()
		}
		switch {
		case !errors.Is(err, nats.ErrNoResponders):
			missing = time.Time{}
		case missing.IsZero():
			missing = time.Now()
		case time.Since(missing) > lostAfter:
			return errIrregular // nobody has this consumer: make another
		}
		switch {
		case err == nil, errors.Is(err, jetstream.ErrNoMessages), ctx.Err() != nil:
		case errors.Is(err, jetstream.ErrConsumerDeleted), errors.Is(err, jetstream.ErrConsumerNotFound):
			return fmt.Errorf("%w: it took over the reading", ErrAnotherWriter)
		case outage(err):
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
		default:
			return err
		}
	}
	return nil
}

// message handles one message. finished says that it was the last.
func (r *reader) message(ctx context.Context, m jetstream.Msg) (finished bool, err error) {
	meta, err := m.Metadata()
	if err != nil {
		return false, fmt.Errorf("message metadata: %w", err)
	}
	streamSeq := meta.Sequence.Stream
	if meta.Sequence.Consumer != r.next {
		return false, errIrregular
	}
	r.next++
	if !r.books.deliver(streamSeq, m.Reply()) {
		return false, nil
	}
	h, err := parseHeader(m.Headers())
	if err != nil {
		r.run.fault(Fault{Stream: r.route.stream, Chunk: -1, Check: "header", Detail: fmt.Sprintf("message %d: %v", streamSeq, err)})
		r.books.ack(streamSeq)
		return false, nil
	}
	for _, s := range r.asm.retire(nonceOf(h.attempt)) {
		r.release(s)
	}
	switch h.kind {
	case kindBegin:
		if r.foreign && r.asm.adopt(h.attempt) {
			r.aside = 0
		}
		r.books.ack(streamSeq)
		return false, nil
	case kindEndOfRun:
		if !r.foreign && h.attempt != r.run.nonce {
			r.books.ack(streamSeq)
			return false, nil
		}
		return !r.foreign || r.ends, r.endOfRun(ctx, h, streamSeq)
	}
	return false, r.part(ctx, h, m.Data(), streamSeq)
}

// part handles a message of a sequence.
func (r *reader) part(ctx context.Context, h header, payload []byte, streamSeq uint64) error {
	v, s, replaced, fault := r.asm.accept(h)
	if replaced != nil {
		r.release(replaced)
	}
	switch v {
	case skip, repeat:
		if h.kind == kindEnd && r.asm.done[h.attempt] {
			r.aside++
		}
		r.books.ack(streamSeq)
		return nil
	case spoiled:
		s.held = append(s.held, streamSeq)
		r.setAside(s, *fault, h.kind == kindEnd)
		return nil
	case complete:
		s.held = append(s.held, streamSeq)
		err := r.handler.end(ctx, s, streamSeq)
		return r.judge(s, -1, err, true)
	}
	s.held = append(s.held, streamSeq)
	rec, err := r.decoder.decode(h, payload)
	if err != nil {
		r.setAside(s, Fault{Seq: s.id, Chunk: h.chunk, Check: "frame", Detail: err.Error()}, false)
		return nil
	}
	defer rec.Release()
	s.begun = true
	return r.judge(s, h.chunk, r.handler.record(ctx, s, rec), false)
}

// judge tells a fault of the sequence, which is set aside, from an error that
// stops the run.
func (r *reader) judge(s *sequence, chunk int, err error, last bool) error {
	var fault *Fault
	if err == nil || !errors.As(err, &fault) {
		return err
	}
	f := *fault
	f.Seq, f.Chunk = s.id, chunk
	r.setAside(s, f, last)
	return nil
}

// setAside gives a sequence up: this attempt will not be completed here. last
// says that its end marker has come.
func (r *reader) setAside(s *sequence, f Fault, last bool) {
	f.Stream = r.route.stream
	s.aside = true
	if last {
		delete(r.asm.open, s.id)
	}
	if nonceOf(s.attempt) == r.run.nonce {
		r.asm.done[s.attempt] = true
		if last {
			r.aside++
		}
	}
	r.run.fault(f)
	r.release(s)
}

// release tells the handler and gives the held messages back to the server.
func (r *reader) release(s *sequence) {
	if s.begun {
		r.handler.drop(s)
		s.begun = false
	}
	r.books.ack(s.held...)
	s.held = nil
}

// endOfRun finishes. What is still open was given up by its publisher; that no
// end marker was lost is seen from the count.
func (r *reader) endOfRun(ctx context.Context, h header, streamSeq uint64) error {
	for id, s := range r.asm.open {
		r.release(s)
		delete(r.asm.open, id)
	}
	if err := r.handler.settle(ctx); err != nil {
		return err
	}
	sequences := h.count
	if h.attempt != r.asm.nonce {
		sequences = unknown
	}
	gone := int64(0)
	if r.foreign && sequences != unknown {
		var err error
		if gone, err = r.deleted(ctx, h.attempt); err != nil {
			return err
		}
	}
	err := r.handler.finish(ctx, h.attempt, sequences, r.aside+gone)
	if store, ok := r.handler.(*storeHandler); ok && r.foreign && sequences == unknown && !r.told && r.route.stream == CaptureStream {
		err = r.run.short(ctx, store.sink, r.partition, r.run.partitions, h.count)
	}
	if r.foreign && errors.Is(err, ErrIncomplete) {
		// Its source is gone and cannot be asked for them again.
		r.run.fault(Fault{Stream: r.route.stream, Chunk: -1, Check: "missing", Detail: err.Error()})
	} else if err != nil {
		return err
	}
	// The answer to this ack says that all before it have arrived.
	confirm, cancel := context.WithTimeout(ctx, r.run.cfg.ConnectTimeout)
	defer cancel()
	if _, err := r.run.nc.RequestWithContext(confirm, r.books.replyOf(streamSeq), verbAck); err != nil {
		r.run.log.Debug("last ack was not confirmed; a next run will skip what it repeats", "stream", r.route.stream, "partition", r.partition, "error", err)
	}
	r.books.ack(streamSeq)
	return nil
}
