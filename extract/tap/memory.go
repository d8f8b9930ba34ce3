package tap

import "context"

// drop gives up a request: nothing of it is kept, and the engine is told to
// send no more of it.
func (l *link) drop(q *sequence, reason string) error {
	s := l.Source
	s.mu.Lock()
	if !q.dropped {
		q.dropped = true
		s.count(l, Counts{Dropped: 1})
	}
	s.freeLocked(q)
	s.mu.Unlock()
	q.blocks = nil
	return l.e.sendDrop(q.id, reason)
}

// freeLocked gives a sequence's memory back to the budget.
func (s *Source) freeLocked(q *sequence) {
	s.used -= q.bytes
	q.bytes = 0
	s.changed.Broadcast()
}

func (s *Source) newBlock() *block {
	b := &block{states: make([][]byte, len(s.cfg.States))}
	for i := range b.states {
		b.states[i] = make([]byte, 0, blockRows*s.width)
	}
	return b
}

// forget frees what was kept of a sequence that has a fault.
func (l *link) forget(q *sequence) {
	if q.blocks == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.freeLocked(q)
	q.blocks = nil
}

// reserve takes memory for one more block of q. While the budget is spent it
// waits for what Next gives out; when unfinished requests alone have spent
// it, the youngest of them loses its rows. It returns false when that was q,
// or when the source has ended.
func (s *Source) reserve(q *sequence) bool {
	need := s.blockBytes()
	defer context.AfterFunc(s.ctx, func() { s.mu.Lock(); defer s.mu.Unlock(); s.changed.Broadcast() })()
	s.mu.Lock()
	defer s.mu.Unlock()
	for q.evicted || s.used+need > s.cfg.Memory {
		if q.evicted || s.ctx.Err() != nil {
			return false
		}
		if len(s.done) > 0 || s.giving {
			s.changed.Wait()
			continue
		}
		youngest := q
		for o := range s.open {
			if o.bytes > 0 && o.age > youngest.age {
				youngest = o
			}
		}
		youngest.evicted = true
		s.freeLocked(youngest)
		s.wait.Go(func() { _ = youngest.link.e.sendDrop(youngest.id, "no memory") }) // the engine may be gone
	}
	s.used += need
	q.bytes += need
	return true
}
