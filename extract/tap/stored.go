package tap

import (
	"context"
	"slices"
)

// Stored finds rows that were captured before and are durable.
type Stored interface {
	// Prefix returns the first rows of a sequence that begins with ids and
	// that accept takes: for each state of the source a raw matrix [len(ids),
	// hidden] of its dtype, and the sequence's run and id. Without one the id
	// is empty. It is called from several goroutines.
	Prefix(ctx context.Context, ids []int32, accept func(run, seq string) bool) (run, seq string, states [][]byte, err error)
}

// search is the search for the stored rows of a prefix. What it found is
// guarded by Source.mu until done, and does not change after that.
type search struct {
	done     bool
	run, seq string   // whose rows they are; empty when there are none
	blocks   []*block // of no sequence alone: they must not change
	err      error
}

// knowsWeights says whether all rows of the run are of weights that are known.
// If not, nothing but a connection tells whose they are.
func (s *Source) knowsWeights() bool {
	return s.cfg.Target != nil || s.hello.Model.Fingerprint != ""
}

// search begins to look among what is stored for the first n rows of a
// request. What stands for them until it is published are blocks of zeros.
func (l *link) search(ids []int32) *kept {
	s, found, weights := l.Source, &search{}, l.weights()
	accept := func(run, seq string) bool {
		if s.knowsWeights() {
			return true
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		w, ok := s.authors.of[seq]
		return ok && run == s.cfg.Run && w == weights
	}
	s.wait.Go(func() {
		run, seq, states, err := s.cfg.Stored.Prefix(s.ctx, ids, accept)
		blocks := s.cut(states, len(ids))
		s.mu.Lock()
		defer s.mu.Unlock()
		*found = search{true, run, seq, blocks, err}
		s.changed.Broadcast()
	})
	blocks := (len(ids) + blockRows - 1) / blockRows
	return &kept{blocks: slices.Repeat([]*block{s.absent}, blocks), search: found, absent: len(ids)}
}

// absentBlock is what stands for rows that are not read yet.
func (s *Source) absentBlock() *block {
	b := s.newBlock()
	b.rows, b.shared = blockRows, true
	for i := range b.states {
		b.states[i] = b.states[i][:cap(b.states[i])]
	}
	return b
}

// cut makes blocks of rows.
func (s *Source) cut(states [][]byte, rows int) []*block {
	var out []*block
	for lo := int64(0); len(states) > 0 && lo < int64(rows); lo += blockRows {
		b, hi := s.newBlock(), min(lo+blockRows, int64(rows))
		b.rows, b.shared = int(hi-lo), true
		for i, raw := range states {
			b.states[i] = append(b.states[i], raw[lo*s.width:hi*s.width]...)
		}
		out = append(out, b)
	}
	return out
}

// settled says that what is searched for, for a sequence that has finished, was
// found or not. The mutex is held.
func (q *sequence) settled() bool { return q.check != "" || q.absent == 0 || q.search.done }

// ready is the first of the sequences that have finished of which nothing is
// searched for; -1 without one. What is published of an engine waits for what
// tests it. The mutex is held.
func (s *Source) ready() int {
	var untested []*link
	for i, q := range s.done {
		if q.settled() && !slices.Contains(untested, q.link) {
			return i
		}
		if q.probe {
			untested = append(untested, q.link)
		}
	}
	return -1
}

// fill puts the rows that were searched for into a sequence that has finished;
// without them it is a fault.
func (s *Source) fill(q *sequence) {
	found, n := q.search, q.absent
	if q.check != "" || n == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	mine := func(k *kept) bool { return k.id == q.id }
	if found.err != nil || found.seq == "" {
		q.missing(found.err)
		s.prefixes.drop(mine)
		return
	}
	for lo := 0; lo < n; lo += blockRows {
		i := lo / blockRows
		b := found.blocks[i]
		if rows := n - lo; rows < blockRows { // and behind them are others
			whole := b.first(rows, s.newBlock())
			whole.rows = q.blocks[i].rows
			for j, raw := range q.blocks[i].states {
				whole.states[j] = append(whole.states[j], raw[len(whole.states[j]):]...)
			}
			b = whole
		}
		q.blocks[i] = b
	}
	if q.lender == "" {
		q.lender = found.seq
		if found.run != s.cfg.Run {
			q.lenderRun = found.run
		}
	}
	q.search, q.absent = nil, 0
	s.prefixes.drop(mine)
	s.prefixes.add(&kept{id: q.id, model: q.link.weights(), ids: q.ids, blocks: slices.Clone(q.blocks)})
}

// authors are the weights of the latest stored sequences, where the run's
// record does not say them.
type authors struct {
	of    map[string]any
	order []string
}

const maxAuthors = 1 << 16

func (a *authors) add(seq string, weights any) {
	if a.of == nil {
		a.of = map[string]any{}
	}
	if len(a.order) == maxAuthors {
		delete(a.of, a.order[0])
		a.order = a.order[1:]
	}
	a.of[seq] = weights
	a.order = append(a.order, seq)
}

// drop forgets the sequences of some weights.
func (a *authors) drop(weights any) {
	a.order = slices.DeleteFunc(a.order, func(seq string) bool {
		if a.of[seq] != weights {
			return false
		}
		delete(a.of, seq)
		return true
	})
}
