package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Error codes of the JetStream API that have no name in the client.
const (
	codeWrongLastID     jetstream.ErrorCode = 10070
	codeWrongLastSeq    jetstream.ErrorCode = 10071
	codeWrongLastSeqNow jetstream.ErrorCode = 10164
	codeIDInProcess     jetstream.ErrorCode = 10158
	codeStoreFailed     jetstream.ErrorCode = 10077
	codeNoResources     jetstream.ErrorCode = 10023
	codeNoStreamStore   jetstream.ErrorCode = 10049
	codeNoReaderStore   jetstream.ErrorCode = 10012
	codeNoStorage       jetstream.ErrorCode = 10047
	codeTooManyRequests jetstream.ErrorCode = 10167
	codeClusterNotAvail jetstream.ErrorCode = 10008
)

// mend is called when the first message of the queue failed with cause. It
// finds out what the stream has, and sends the rest again: in order, under
// the same ids, in a finer cut if the server takes less than it did. It
// returns an error when trying again is no use. failing is when the trouble
// began.
func (p *publisher) mend(ctx context.Context, cause error, failing time.Time) error {
	p.mu.Lock()
	p.broken = true
	p.mu.Unlock()
	full := isFull(cause)
	if err := hopeless(cause); err != nil && (!full || p.quota == nil) {
		return err
	}
	patience := p.cfg.OutageTimeout
	if full {
		patience *= 10 // readers may be slow
	}
	if time.Since(failing) > patience {
		return fmt.Errorf("%w for %s: %w; if its disk is full, free some space and run again: what is stored is kept", ErrRefused, patience, cause)
	}
	p.patience.tell("the server to take what is published to " + p.route.name() + ": " + cause.Error())
	pause := min(max(time.Since(failing)/4, 2*time.Millisecond), 500*time.Millisecond)
	select {
	case <-time.After(pause):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if !p.nc.IsConnected() {
		if p.nc.IsClosed() {
			return fmt.Errorf("%w: %w", ErrNoServer, nats.ErrConnectionClosed)
		}
		return nil // serve comes back with the same cause
	}
	if full && p.quota != nil {
		if err := p.quota.reclaim(ctx); err != nil {
			return err
		}
	}

	last, lastID, err := p.lastStored(ctx)
	if err != nil {
		p.cfg.Logger.Debug("asking for the stream's state", "stream", p.route.name(), "error", err)
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if done := slices.IndexFunc(p.queue, func(e *outgoing) bool { return e.id != "" && sameMessage(e.id, lastID) }); done >= 0 {
		for _, e := range slices.Clone(p.queue[:done+1]) {
			p.pop(e, last)
		}
		p.lastID = lastID // under whichever id it got through
	}
	chain := p.lastID
	if lastID != p.lastID {
		if last > p.lastSeq && lastID != "" {
			return fmt.Errorf("%w: message %s came from elsewhere", ErrAnotherWriter, lastID)
		}
		chain = "" // the message is gone: nothing to hold on to
	}
	for _, e := range p.queue {
		e.fut, e.err = nil, nil
		if apiCode(cause) == codeIDInProcess {
			// A cluster remembers the ids of what it refused for its order,
			// and refuses them for as long as it remembers ids.
			e.again++
		}
		if e.out != nil {
			e.out.sent = e.out.stored
		}
	}
	if err := p.recut(); err != nil {
		return err
	}
	p.chain, p.number, p.broken = chain, last, false
	for _, e := range p.queue {
		if p.send(e); p.broken {
			break
		}
	}
	return nil
}

// lastStored is the number and the id of the stream's last message; the id is
// empty when the message is gone or carries none.
func (p *publisher) lastStored(ctx context.Context) (seq uint64, id string, err error) {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.ConnectTimeout)
	defer cancel()
	info, err := p.stream.Info(ctx)
	if err != nil {
		return 0, "", err
	}
	seq = info.State.LastSeq
	if seq == 0 || info.State.Msgs == 0 {
		return seq, "", nil
	}
	msg, err := p.stream.GetMsg(ctx, seq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return seq, "", nil
	}
	if err != nil {
		return 0, "", err
	}
	return seq, msg.Header.Get(hdrMsgID), nil
}

// recut splits the frames of the queue that the server no longer takes. None
// of them is stored; the chunks behind them are numbered anew when sent.
func (p *publisher) recut() error {
	limit := p.nc.MaxPayload()
	var queue []*outgoing
	for _, e := range p.queue {
		if e.kind != kindData || e.frame.buf.Len()+p.headerBound(e.out) <= int(limit) {
			queue = append(queue, e)
			continue
		}
		p.cfg.Logger.Warn("NATS server takes smaller messages now, cutting again", "max_payload", limit, "sequence", e.out.seq)
		rec, err := newDecoder(p.cfg.Allocator).record(header{rows: e.frame.rows, schema: e.frame.schema}, e.frame.buf.Bytes())
		if err != nil {
			return err
		}
		err = p.enc.split(rec, int(limit)-p.headerBound(e.out), func(f frame) error {
			queue = append(queue, &outgoing{kind: kindData, out: e.out, subject: e.subject, frame: f})
			return nil
		})
		rec.Release()
		if err != nil {
			return fmt.Errorf("sequence %q: %w", e.out.seq, err)
		}
		queue[len(queue)-1].slot = e.slot
		p.enc.release(e.frame)
	}
	p.queue = queue
	return nil
}

func apiCode(err error) jetstream.ErrorCode {
	if api, ok := errors.AsType[*jetstream.APIError](err); ok {
		return api.ErrorCode
	}
	return 0
}

// isOrder says that a message was refused because the one that it names is not
// the stream's last.
func isOrder(err error) bool {
	c := apiCode(err)
	return c == codeWrongLastID || c == codeWrongLastSeq || c == codeWrongLastSeqNow
}

// isFull says that the stream has reached its MaxBytes.
func isFull(err error) bool {
	return apiCode(err) == codeStoreFailed && strings.Contains(err.Error(), "maximum bytes exceeded")
}

// hopeless turns an answer that will not change into an error that says what
// to do; nil means that trying again may help.
func hopeless(cause error) error {
	var api *jetstream.APIError
	if !errors.As(cause, &api) {
		return nil // the connection's trouble, not the message's
	}
	switch api.ErrorCode {
	case codeWrongLastID, codeWrongLastSeq, codeWrongLastSeqNow, codeIDInProcess, codeTooManyRequests, codeClusterNotAvail:
		return nil
	}
	return fmt.Errorf("%w: %w; if its disk or its account is full, free some space and run again: what is stored is kept", ErrRefused, cause)
}

// explained says what to do about an answer that has to do with the server's
// disk; any other error stays what it is.
func explained(err error) error {
	switch apiCode(err) {
	case codeNoResources, codeNoStorage, codeStoreFailed, codeNoStreamStore, codeNoReaderStore:
		return hopeless(err)
	}
	return err
}
