package tap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync/atomic"
	"time"
)

// accept serves the engines that come after the first.
func (s *Source) accept(l *Listener) {
	for {
		e, err := l.Accept(s.taking, func(err error) { s.cfg.Log.Warn("an engine was refused", "reason", err) })
		if err != nil {
			if s.taking.Err() == nil {
				s.fail(err)
			}
			return
		}
		if err := s.checkModel(e.Hello); err != nil {
			s.cfg.Log.Warn("an engine was refused", "reason", err)
			e.Refuse(err)
			continue
		}
		s.mu.Lock()
		s.engines++
		s.mu.Unlock()
		s.wait.Go(func() { s.serve(e) })
	}
}

// link is one engine's connection at work.
type link struct {
	*Source
	e     *Engine
	ring  *ring
	open  map[string]*sequence
	seen  int64 // sequences, for the choice of those to probe
	steps int64
	freed uint64 // as the engine was told

	// Guarded by Source.mu:
	counts  Counts
	pending int // sequences that Next has not given out yet
}

// serve reads an engine until it has gone.
func (s *Source) serve(e *Engine) {
	l := &link{Source: s, e: e, open: map[string]*sequence{}}
	stop := context.AfterFunc(s.taking, func() { _ = e.conn.SetReadDeadline(time.Unix(1, 0)) }) // wakes run
	err := l.run()
	stop()
	protocol, cause := errors.Is(err, ErrProtocol), context.Cause(s.ctx)
	switch {
	case errors.Is(cause, ErrClaim):
		e.Refuse(cause)
	case s.taking.Err() != nil: // it may come back, to the next daemon
	case protocol:
		e.Refuse(err)
	}
	e.close()
	e.wire.closeFiles()
	s.mu.Lock()
	if l.ring != nil {
		delete(s.rings, l.ring)
	}
	s.mu.Unlock()
	if rerr := l.ring.close(); rerr != nil {
		s.cfg.Log.Warn("unmapping the ring", "error", rerr)
	}
	switch {
	case s.taking.Err() != nil, err == nil:
	case protocol:
		s.cfg.Log.Warn("an engine's connection was closed", "pid", e.Hello.PID, "reason", err)
	default:
		s.cfg.Log.Warn("an engine has gone without saying goodbye", "pid", e.Hello.PID, "open_requests", len(l.open), "reason", err)
	}
	for _, id := range slices.Sorted(maps.Keys(l.open)) {
		q := l.open[id]
		who := "the engine went away"
		if s.taking.Err() != nil {
			who = "the daemon was stopped"
		}
		q.stoned(stoneDisconnected, "%s after %d rows", who, len(q.ids))
		l.end(q)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.prefixes.drop(func(k *kept) bool { return k.model == l })
	s.authors.drop(l)
	s.engines--
	s.gone = true
	s.changed.Broadcast()
}

// run is the protocol. It returns nil after a bye.
func (l *link) run() error {
	s, e := l.Source, l.e
	err := e.send(welcome{typeWelcome, Protocol, s.cfg.Run, s.cfg.States, kindMemfd, s.cfg.Policy.share(), s.cfg.Policy.MaxTokens})
	if err != nil {
		return err
	}
	for {
		kind, body, err := e.read()
		if err != nil {
			return err
		}
		if l.ring == nil && kind != typeRing && kind != typeBye {
			return badProtocol("%s before the ring", kind)
		}
		switch kind {
		case typeRing:
			err = l.onRing(body)
		case typeBegin:
			err = l.onBegin(body)
		case typeStep:
			err = l.onStep(body)
		case typeFinish, typeAbort, typeShed:
			err = l.onEnding(kind, body)
		case typeBye:
			return l.onBye(body)
		default:
			err = badProtocol("a message of type %q", kind)
		}
		if err != nil {
			return err
		}
		if err := l.credit(); err != nil {
			return err
		}
	}
}

func (l *link) onRing(body []byte) error {
	if l.ring != nil {
		return badProtocol("a second ring")
	}
	ad, err := decode[ringAd](typeRing, body)
	if err != nil {
		return err
	}
	f := l.e.wire.take()
	if f == nil {
		return badProtocol("a ring without its descriptor")
	}
	width := int64(l.hello.Model.Hidden) * int64(l.format.Size) * int64(len(l.cfg.States))
	if l.ring, err = mapRing(f, ad, width); err != nil {
		return err
	}
	l.mu.Lock()
	l.rings[l.ring] = struct{}{}
	l.mu.Unlock()
	return l.sendCredit()
}

func (l *link) sendCredit() error {
	l.freed = l.ring.next
	return l.e.send(struct {
		Type  string `json:"type"`
		Freed uint64 `json:"freed"`
	}{typeCredit, l.freed})
}

// credit tells the engine what was read: at once in the ring's counter, and
// in a message, which wakes an engine that waits, when a sixteenth of the ring
// has gathered. To read a message for each step would cost the engine more
// than to write the step.
func (l *link) credit() error {
	if l.ring == nil {
		return nil
	}
	atomic.StoreUint64(&l.ring.head.read, l.ring.next)
	if due := l.ring.next - l.freed; due == 0 || due < uint64(l.ring.ad.Slots)/16 {
		return nil
	}
	return l.sendCredit()
}

func (l *link) onBegin(body []byte) error {
	b, err := decode[begin](typeBegin, body)
	if err != nil {
		return err
	}
	if !goodID.MatchString(b.R) {
		return badProtocol("a request called %.150q; use up to 128 letters, digits, '_', '-' and '.'", b.R)
	}
	if l.open[b.R] != nil {
		return badProtocol("request %s begins twice", b.R)
	}
	if err := l.checkIDs(b.R, b.Prompt); err != nil {
		return err
	}
	q := &sequence{id: b.R, link: l, begin: b}
	l.open[b.R] = q
	s := l.Source
	s.mu.Lock()
	s.age++
	q.age = s.age
	s.open[q] = struct{}{}
	s.count(l, Counts{Begun: 1})
	s.mu.Unlock()
	if !s.cfg.Policy.wants(b) {
		return l.drop(q, "not wanted")
	}
	return nil
}

func (l *link) checkIDs(r string, ids []int32) error {
	for i, id := range ids {
		if id < 0 || int(id) >= l.hello.Model.Vocab {
			return badProtocol("request %s: token %d at %d, the vocabulary has %d", r, id, i, l.hello.Model.Vocab)
		}
	}
	return nil
}

// count adds to the counts of the connection and of the source. The mutex is
// held.
func (s *Source) count(l *link, c Counts) {
	l.counts.Add(c)
	s.counts.Add(c)
}

func (e *Engine) sendDrop(id, reason string) error {
	return e.send(struct {
		Type   string `json:"type"`
		R      string `json:"r"`
		Reason string `json:"reason"`
	}{typeDrop, id, reason})
}

func (l *link) onStep(body []byte) error {
	st, err := decode[step](typeStep, body)
	if err != nil {
		return err
	}
	if st.N != l.steps {
		return badProtocol("step %d, want %d", st.N, l.steps)
	}
	l.steps++
	rows := 0
	for _, en := range st.Rows {
		q := l.open[en.R]
		if q == nil {
			return badProtocol("rows of request %.150q, which is not open", en.R)
		}
		if len(en.IDs) == 0 || en.Pos < 0 {
			return badProtocol("an entry of %d rows at position %d", len(en.IDs), en.Pos)
		}
		if err := errors.Join(l.ring.claim(en.Slot, len(en.IDs)), l.checkIDs(en.R, en.IDs)); err != nil {
			return err
		}
		rows += len(en.IDs)
		if err := l.rows(q, en); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count(l, Counts{Steps: 1, Rows: int64(rows)})
	l.bytes += int64(rows) * l.ring.width
	if st.At > 0 {
		l.lag = max(0, l.cfg.Now().Sub(time.UnixMicro(int64(st.At*1e6))))
		l.worst = max(l.worst, l.lag)
	}
	return nil
}

// rows takes the rows of an entry out of the ring.
func (l *link) rows(q *sequence, en entry) error {
	s := l.Source
	s.mu.Lock()
	skip, evicted := q.dropped, q.evicted
	s.mu.Unlock()
	if evicted {
		q.blocks = nil
		q.stoned(stoneMemory, "the daemon's memory of %d bytes was spent by unfinished requests after %d rows of this one", s.cfg.Memory, len(q.ids))
	}
	if skip {
		return nil
	}
	if n := q.begin.Cached; n > 0 && n == en.Pos && len(q.ids) == 0 && q.check == "" && !l.completePrefix(q) {
		q.ids = append(q.ids, en.IDs...)
		return s.ctx.Err() // nil when the sequence was evicted, which the next step finds
	}
	have := len(q.ids)
	if en.Pos > have {
		q.fault(checkRows, "rows %d to %d are missing (a prefix cache?)", have, en.Pos-1)
	}
	if q.check != "" {
		l.forget(q)
		// What the engine counts goes on.
		q.ids = append(q.ids[:min(have, en.Pos)], en.IDs...)
		return nil
	}
	l.takeBack(q, en.Pos)
	if m := s.cfg.Policy.MaxTokens; m > 0 && en.Pos+len(en.IDs) > m {
		return l.drop(q, fmt.Sprintf("longer than %d tokens", m))
	}
	for i, id := range en.IDs {
		raw := l.ring.row(en.Slot + uint64(i))
		if bad := s.format.CheckFinite(raw, en.Pos+i, s.cfg.States); bad != "" {
			q.fault(checkFinite, "%s", bad)
			l.forget(q)
			q.ids = append(q.ids, en.IDs[i:]...)
			return nil
		}
		b := q.room()
		if b == nil {
			if !s.reserve(q) {
				q.ids = append(q.ids, en.IDs[i:]...)
				return s.ctx.Err() // nil when the sequence was evicted, which the next step finds
			}
			b = s.newBlock()
			q.blocks = append(q.blocks, b)
		}
		size := len(raw) / len(b.states)
		for j := range b.states {
			b.states[j] = s.format.Append(b.states[j], raw[j*size:(j+1)*size], s.cfg.DType)
		}
		b.rows++
		q.ids = append(q.ids, id)
	}
	return nil
}

// takeBack takes back the rows of a sequence from pos on.
func (l *link) takeBack(q *sequence, pos int) {
	if pos >= len(q.ids) {
		return
	}
	bytes := int64(q.rewind(pos)) * l.blockBytes()
	l.mu.Lock()
	defer l.mu.Unlock()
	q.bytes -= bytes
	l.used -= bytes
}

func (l *link) onEnding(kind string, body []byte) error {
	e, err := decode[ending](kind, body)
	if err != nil {
		return err
	}
	q := l.open[e.R]
	if q == nil {
		return badProtocol("%s of request %.150q, which is not open", kind, e.R)
	}
	var c Counts
	switch kind {
	case typeFinish:
		c.Finished = 1
		if err := l.finish(q, e); err != nil {
			return err
		}
	case typeAbort:
		c.Aborted = 1
		q.stoned(stoneAborted, "%s, after %d rows", reasonOf(e, "aborted"), len(q.ids))
	case typeShed:
		c.Shed = 1
		q.stoned(stoneShed, "the engine shed it: %s, after %d rows", reasonOf(e, "no credit"), len(q.ids))
	}
	l.mu.Lock()
	l.count(l, c)
	l.mu.Unlock()
	l.end(q)
	return nil
}

func reasonOf(e ending, or string) string {
	if e.Reason == "" {
		return or
	}
	return fmt.Sprintf("%.200s", e.Reason)
}

// stoned makes a sequence a tombstone, unless it is a fault already.
func (q *sequence) stoned(check, format string, args ...any) {
	if q.check == "" {
		q.stone = true
		q.fault(check, format, args...)
	}
}

func (l *link) finish(q *sequence, e ending) error {
	s := l.Source
	s.mu.Lock()
	skip, evicted := q.dropped, q.evicted
	s.mu.Unlock()
	if skip {
		return nil
	}
	if evicted {
		q.stoned(stoneMemory, "the daemon's memory of %d bytes was spent by unfinished requests", s.cfg.Memory)
		return nil
	}
	if err := l.checkIDs(e.R, e.IDs); err != nil {
		return err
	}
	if q.check != "" {
		return nil
	}
	if e.Taken > 0 && e.Rows >= 0 && e.Rows+e.Taken == len(q.ids) { // verify says what is wrong otherwise
		l.takeBack(q, e.Rows)
	}
	q.finish = reasonOf(e, "unknown")
	if q.verify(e); q.check != "" {
		return nil
	}
	if len(q.ids) < s.cfg.Policy.MinTokens {
		return l.drop(q, "too short")
	}
	q.probe = s.cfg.Target != nil && l.seen%int64(s.cfg.ProbeEvery) == 0
	l.seen++
	return nil
}

// end hands a sequence over to Next, unless nothing is to be kept of it.
func (l *link) end(q *sequence) {
	delete(l.open, q.id)
	s := l.Source
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, q)
	if q.check != "" || q.dropped {
		s.freeLocked(q)
		q.blocks = nil
	}
	if !q.dropped {
		if q.check == "" {
			s.prefixes.add(&kept{q.id, l.weights(), q.ids, slices.Clone(q.blocks), q.search, q.absent})
		}
		s.done = append(s.done, q)
		l.pending++
	}
	s.changed.Broadcast()
}

// settleWait is how long a goodbye waits for what the engine has finished to
// be published.
const settleWait = 20 * time.Second

// settle waits until it is known what became of the engine's requests, so
// that the goodbye can say so, or a claim's failure can still be told.
func (l *link) settle() {
	s := l.Source
	ctx, cancel := context.WithTimeout(s.ctx, settleWait)
	defer cancel()
	defer context.AfterFunc(ctx, func() { s.mu.Lock(); defer s.mu.Unlock(); s.changed.Broadcast() })()
	s.mu.Lock()
	defer s.mu.Unlock()
	for l.pending > 0 && ctx.Err() == nil {
		s.changed.Wait()
	}
}

func (l *link) onBye(body []byte) error {
	b, err := decode[struct {
		Counts Counts `json:"counts"`
	}](typeBye, body)
	if err != nil {
		return err
	}
	s := l.Source
	l.settle()
	if s.ctx.Err() != nil {
		return context.Cause(s.ctx) // which the engine is told instead
	}
	s.mu.Lock()
	c := l.counts
	s.counts.Add(Counts{ShedRows: b.Counts.ShedRows, Unsampled: b.Counts.Unsampled, OptOut: b.Counts.OptOut, Lost: b.Counts.Lost})
	s.mu.Unlock()
	if b.Counts.sent() != c.sent() {
		s.cfg.Log.Error("the engine's counts are not the daemon's", "engine", fmt.Sprintf("%+v", b.Counts), "daemon", fmt.Sprintf("%+v", c))
	}
	if err := l.e.send(struct {
		Type   string `json:"type"`
		Counts Counts `json:"counts"`
	}{typeBye, c}); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}
