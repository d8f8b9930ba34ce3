package pipeline

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// minPayload is the smallest max_payload that leaves room beside the headers.
const minPayload = 4096

// outSeq is one attempt at publishing a sequence. Its fields belong to the
// publisher.
type outSeq struct {
	seq, attempt string
	subject      string
	sent, stored tally // with all that was sent; with what the server confirmed
	bytes        int64 // sent and not closed, for the quota
}

// outgoing is a message on its way. Its number, and with it its header, is
// fixed when it is sent: after an outage it may be sent again under another.
type outgoing struct {
	kind    kind
	out     *outSeq // data, end and given-up
	subject string
	attempt string // begin and end-of-run
	count   int64  // end-of-run
	part    int    // begin and end-of-run: the partition
	frame   frame
	onStore func() // called once the server has it; must not block
	slot    bool   // holds a place in the window
	again   int    // times that it got another id, see [header.again]

	id  string
	fut jetstream.PubAckFuture // nil: not sent
	err error                  // of sending
}

// publisher puts messages into one stream, in order, with a window of them in
// flight. Each names the one before it (Nats-Expected-Last-Msg-Id): if one is
// refused so are all behind it, and they are sent again in order; and if a
// second process publishes into the stream, both cannot go on.
// Its methods may be called from several goroutines; [publisher.serve] runs
// beside them.
type publisher struct {
	cfg    Config
	route  route
	nc     *nats.Conn
	js     jetstream.JetStream
	stream jetstream.Stream
	enc    *encoder
	quota  *quota

	window   chan struct{}
	wake     chan struct{}
	patience waiting
	failed   chan struct{} // closed when err is set
	err      error

	mu      sync.Mutex
	queue   []*outgoing // sent or to be sent, not confirmed
	broken  bool        // nothing is sent before serve has mended the chain
	chain   string      // id of the last message sent
	number  uint64      // and the stream's number that it gets if all goes well
	counted bool        // messages name their predecessor's number, not its id
	lastID  string      // id of the last message confirmed
	lastSeq uint64      // and the stream's number of it
	idle    chan struct{}
}

func newPublisher(ctx context.Context, cfg Config, to route, nc *nats.Conn, js jetstream.JetStream) (*publisher, error) {
	stream, err := js.Stream(ctx, to.name())
	if err != nil {
		return nil, fmt.Errorf("opening stream %s: %w", to.name(), err)
	}
	p := &publisher{
		cfg: cfg, route: to, nc: nc, js: js, stream: stream,
		enc:      newEncoder(cfg.Allocator, cfg.Window+1),
		window:   make(chan struct{}, cfg.Window),
		wake:     make(chan struct{}, 1),
		patience: waiting{log: cfg.Logger},
		failed:   make(chan struct{}),

		lastSeq: stream.CachedInfo().State.LastSeq,
		number:  stream.CachedInfo().State.LastSeq,
		// Servers check a number before they replicate a message, an id after
		// that; and one that does not fit there ends the stream, for all of
		// them (nats-server 2.15).
		counted: stream.CachedInfo().Config.Replicas > 1,
	}
	p.quota = newQuota(cfg, to, stream)
	return p, nil
}

// begin opens an attempt at a sequence.
func (p *publisher) begin(seq, attempt string, partition int) *outSeq {
	return &outSeq{seq: seq, attempt: attempt, subject: p.route.subject(partition), sent: newTally(), stored: newTally()}
}

// record publishes a record as the sequence's next chunks.
func (p *publisher) record(ctx context.Context, o *outSeq, rec arrow.Record) (bytes int64, err error) {
	err = p.enc.split(rec, p.room(o), func(f frame) error {
		bytes += int64(f.buf.Len())
		if p.quota != nil {
			if err := p.quota.wait(ctx, o, int64(f.buf.Len())); err != nil {
				p.enc.release(f)
				return err
			}
		}
		return p.put(ctx, &outgoing{kind: kindData, out: o, subject: o.subject, frame: f})
	})
	if err != nil {
		return bytes, fmt.Errorf("publishing sequence %q to %s: %w", o.seq, p.route.stream, err)
	}
	return bytes, nil
}

// end publishes the sequence's end marker.
func (p *publisher) end(ctx context.Context, o *outSeq, onStore func()) error {
	p.abandon(o)
	if err := p.put(ctx, &outgoing{kind: kindEnd, out: o, subject: o.subject, onStore: onStore}); err != nil {
		return fmt.Errorf("publishing the end of sequence %q to %s: %w", o.seq, p.route.stream, err)
	}
	return nil
}

// giveUp publishes that nothing more follows in o, so that readers let go of
// what they have of it.
func (p *publisher) giveUp(ctx context.Context, o *outSeq) error {
	p.abandon(o)
	if err := p.put(ctx, &outgoing{kind: kindGivenUp, out: o, subject: o.subject}); err != nil {
		return fmt.Errorf("giving up sequence %q in %s: %w", o.seq, p.route.stream, err)
	}
	return nil
}

// abandon says that nothing more follows in o.
func (p *publisher) abandon(o *outSeq) {
	if p.quota != nil {
		p.quota.close(o)
	}
}

// control publishes a message about the invocation itself.
func (p *publisher) control(ctx context.Context, k kind, nonce string, partition int, count int64) error {
	e := &outgoing{kind: k, subject: p.route.subject(partition), attempt: nonce, count: count, part: partition}
	if err := p.put(ctx, e); err != nil {
		return fmt.Errorf("publishing the %s marker to %s: %w", k, p.route.stream, err)
	}
	return nil
}

// room is what a payload of o may take: the server's limit counts headers.
func (p *publisher) room(o *outSeq) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return min(int(p.nc.MaxPayload())-p.headerBound(o), p.chunkBytes())
}

// headerBound is an upper bound of the header of any chunk of o. It is called
// with p.mu held.
func (p *publisher) headerBound(o *outSeq) int {
	h := header{kind: kindData, seq: o.seq, attempt: o.attempt}
	const numbers = 192 // of rows, chunk, schema; the padding
	return headerBytes(h.marshal(p.cfg.Run, "")) + numbers + len(hdrLastID) + max(len(p.chain), len(h.id(p.cfg.Run))+10)
}

func (p *publisher) chunkBytes() int {
	if p.cfg.ChunkBytes > 0 {
		return p.cfg.ChunkBytes
	}
	return 1_000_000
}

// put waits for a place in the window and sends.
func (p *publisher) put(ctx context.Context, e *outgoing) error {
	select {
	case p.window <- struct{}{}:
	case <-p.failed:
		p.enc.release(e.frame)
		return p.err
	case <-ctx.Done():
		p.enc.release(e.frame)
		return context.Cause(ctx)
	}
	e.slot = true
	p.mu.Lock()
	p.queue = append(p.queue, e)
	if !p.broken {
		p.send(e)
	}
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return nil
}

// send gives e its number and sends it. A failure is left in e for serve.
func (p *publisher) send(e *outgoing) {
	h := header{kind: e.kind, attempt: e.attempt, count: e.count, partition: e.part, again: e.again}
	if o := e.out; o != nil {
		h.seq, h.attempt = o.seq, o.attempt
		if e.kind == kindData {
			h.chunk, h.rows, h.schema, h.digest = o.sent.chunks, e.frame.rows, e.frame.schema, e.frame.digest
			o.sent.add(h.rows, h.digest)
		} else {
			h.count, h.rows, h.digest = int64(o.sent.chunks), o.sent.rows, o.sent.digest()
		}
	}
	e.id, e.fut, e.err = h.id(p.cfg.Run), nil, nil
	h.counted, h.behind = p.counted, p.number
	msg := &nats.Msg{Subject: e.subject, Header: h.marshal(p.cfg.Run, p.chain)}
	p.number++
	if e.frame.buf != nil {
		msg.Data = e.frame.buf.Bytes()
	}
	p.chain = e.id
	if int64(headerBytes(msg.Header)+len(msg.Data)) > p.nc.MaxPayload() {
		e.err = nats.ErrMaxPayload
	} else {
		e.fut, e.err = p.js.PublishMsgAsync(msg)
	}
	if e.err != nil {
		p.broken = true
	}
}

// flush waits until the server has confirmed all that was put.
func (p *publisher) flush(ctx context.Context) error {
	p.mu.Lock()
	if len(p.queue) == 0 {
		p.mu.Unlock()
		return nil
	}
	if p.idle == nil {
		p.idle = make(chan struct{})
	}
	idle := p.idle
	p.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-p.failed:
		return p.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// serve confirms messages as the server acknowledges them and mends what
// goes wrong, until stop is closed or ctx ends. An error means that the
// stream cannot be published to.
func (p *publisher) serve(ctx context.Context, stop <-chan struct{}) error {
	var failing time.Time // since when nothing got through
	for {
		e, next := p.front()
		if e == nil {
			select {
			case <-p.wake:
				continue
			case <-stop:
				return nil
			case <-ctx.Done():
				return p.fail(context.Cause(ctx))
			}
		}
		if e.fut == nil && e.err == nil {
			e.err = errUnsent
		}
		if e.err == nil {
			select {
			case ack := <-e.fut.Ok():
				p.confirm(ack.Sequence, 1)
				failing = time.Time{}
			case e.err = <-e.fut.Err():
			case ack := <-next.ok:
				// It names e, so that e is stored too, and only the answer was lost.
				p.confirm(ack.Sequence, 2)
				failing = time.Time{}
			case next.out.err = <-next.err:
				if isOrder(next.out.err) {
					e.err = next.out.err // e was lost, or comes late
				}
			case <-p.wake: // there may be a next one now
			case <-ctx.Done():
				return p.fail(context.Cause(ctx))
			}
			if e.err == nil {
				continue
			}
		}
		if failing.IsZero() {
			failing = time.Now()
		}
		before := p.lastID
		if err := p.mend(ctx, e.err, failing); err != nil {
			return p.fail(fmt.Errorf("publishing to stream %s: %w", p.route.name(), err))
		}
		if p.lastID != before { // some of it had got through
			failing = time.Time{}
			p.patience.tell("")
		}
	}
}

func (p *publisher) fail(err error) error {
	p.err = err
	close(p.failed)
	return err
}

// follower is the answer to the message behind the first of the queue. Without
// such a message, or once it has failed, all of it is nil.
type follower struct {
	out *outgoing
	ok  <-chan *jetstream.PubAck
	err <-chan error
}

// front is the first of the queue, and what tells of it if its own answer is
// lost: the answer to the second, which names it.
func (p *publisher) front() (*outgoing, follower) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) == 0 {
		return nil, follower{}
	}
	if len(p.queue) == 1 || p.queue[1].fut == nil || p.queue[1].err != nil {
		return p.queue[0], follower{}
	}
	next := p.queue[1]
	return p.queue[0], follower{next, next.fut.Ok(), next.fut.Err()}
}

// confirm takes the first n off the queue; seq is the last one's number.
func (p *publisher) confirm(seq uint64, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range n {
		p.pop(p.queue[0], seq)
	}
}

func (p *publisher) pop(e *outgoing, seq uint64) {
	p.queue[0] = nil
	p.queue = p.queue[1:]
	p.lastID, p.lastSeq = e.id, max(p.lastSeq, seq)
	if e.kind == kindData {
		e.out.stored.add(e.frame.rows, e.frame.digest)
	}
	p.enc.release(e.frame)
	if e.onStore != nil {
		e.onStore()
	}
	if e.slot {
		<-p.window
	}
	if len(p.queue) == 0 && p.idle != nil {
		close(p.idle)
		p.idle = nil
	}
}

// errUnsent stands for the error of a message further ahead in the queue.
var errUnsent = errors.New("not sent yet")
