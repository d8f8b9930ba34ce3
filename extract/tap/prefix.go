package tap

import (
	"fmt"
	"slices"
	"strconv"
)

// The tags that say of a sequence that its first rows were not computed for
// it: how many, which sequence they are from, and of which run if it is
// another one.
const (
	TagPrefixRows = "draftscope.prefix_rows"
	TagPrefixFrom = "draftscope.prefix_from"
	TagPrefixRun  = "draftscope.prefix_run"
)

// kept are the rows of a request that has finished.
type kept struct {
	id     string
	model  any
	ids    []int32
	blocks []*block

	search *search // for the first absent rows, which are zero until then
	absent int
}

// prefixes are the rows of the latest requests, the least recently used one
// first. A block that several of them have counts once.
type prefixes struct {
	bound, used int64 // bytes; a block counts as a whole one
	unit        int64 // bytes of a block
	list        []*kept
	refs        map[*block]int
}

// add keeps a request's rows, and lets go of the oldest ones for it.
func (p *prefixes) add(k *kept) {
	if int64(len(k.blocks))*p.unit > p.bound {
		return
	}
	for _, b := range k.blocks {
		if p.refs[b]++; p.refs[b] == 1 {
			p.used += p.unit
		}
		b.share()
	}
	p.list = append(p.list, k)
	for p.used > p.bound {
		oldest := p.list[0]
		p.drop(func(k *kept) bool { return k == oldest })
	}
}

// drop lets go of the rows of some requests.
func (p *prefixes) drop(which func(*kept) bool) {
	p.list = slices.DeleteFunc(p.list, func(k *kept) bool {
		if !which(k) {
			return false
		}
		for _, b := range k.blocks {
			if p.refs[b]--; p.refs[b] == 0 {
				delete(p.refs, b)
				p.used -= p.unit
			}
		}
		return true
	})
}

// find returns a request of the model that began with these ids, nil without.
func (p *prefixes) find(model any, ids []int32) *kept {
	for i, k := range slices.Backward(p.list) {
		if k.model == model && hasPrefix(k.ids, ids) {
			p.list = append(slices.Delete(p.list, i, i+1), k)
			return k
		}
	}
	return nil
}

func hasPrefix(ids, prefix []int32) bool {
	return len(ids) >= len(prefix) && slices.Equal(ids[:len(prefix)], prefix)
}

// weights tell models apart: they are the target's, where there is one, which
// tests every engine; or have the engine's fingerprint; or, of an engine that
// does not know its own, those of the connection. A source's engines have the
// same sizes, dtype and final norm, and give the same states.
func (l *link) weights() any {
	if m := l.cfg.Target; m != nil {
		return m.Fingerprint()
	}
	if p := l.e.Hello.Model.Fingerprint; p != "" {
		return p
	}
	return l
}

// completePrefix gives a request whose first rows a prefix cache has those of
// a request with the same first tokens: one of the latest that have finished,
// one that goes on at this engine, or one that is stored, whose rows are read
// while this one goes on. Without such rows it is a fault. It returns false
// when the source's memory went to others.
func (l *link) completePrefix(q *sequence) bool {
	s, n := l.Source, q.begin.Cached
	var from *kept
	if n <= len(q.begin.Prompt) {
		from = l.prefixOf(q, q.begin.Prompt[:n])
		if from == nil && s.cfg.Stored != nil {
			from = l.search(q.begin.Prompt[:n])
		}
	}
	if from == nil {
		q.missing(nil)
		return true
	}
	for lo := 0; lo < n; lo += blockRows {
		if !s.reserve(q) {
			q.ids = slices.Clone(q.begin.Prompt[:n])
			return false
		}
		b := from.blocks[lo/blockRows]
		if n-lo < blockRows {
			b = b.first(n-lo, s.newBlock())
		}
		q.blocks = append(q.blocks, b)
	}
	q.ids = slices.Clone(q.begin.Prompt[:n])
	q.lent, q.lender = n, from.id
	q.search, q.absent = from.search, min(n, from.absent)
	return true
}

// missing says that nobody has the rows of a prefix; err is of looking for
// them.
func (q *sequence) missing(err error) {
	where := "no request at hand"
	if q.link.cfg.Stored != nil {
		where += " and none that is stored"
	}
	what := ""
	if err != nil {
		what = fmt.Sprintf(" (%v)", err)
	}
	q.fault(checkRows, "the first %d rows are missing: a prefix cache has them, and %s began with the same tokens%s; "+
		"keep more (--prefix-memory), or have the engine compute them again", q.begin.Cached, where, what)
}

// prefixOf finds rows of these ids, as whole blocks that are shared from now
// on and the rest of one.
func (l *link) prefixOf(q *sequence, ids []int32) *kept {
	s := l.Source
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.prefixes.bound == 0 {
		return nil
	}
	if k := s.prefixes.find(l.weights(), ids); k != nil {
		return k
	}
	var oldest *sequence
	for _, o := range l.open {
		if o != q && o.check == "" && !o.dropped && !o.evicted && hasPrefix(o.ids, ids) && (oldest == nil || o.age < oldest.age) {
			oldest = o
		}
	}
	if oldest == nil {
		return nil
	}
	for _, b := range oldest.blocks[:len(ids)/blockRows] {
		b.share()
	}
	return &kept{id: oldest.id, blocks: oldest.blocks, search: oldest.search, absent: oldest.absent}
}

// share says that others have the block, too. That is written once, by the
// only one who has it.
func (b *block) share() {
	if !b.shared {
		b.shared = true
	}
}

// first copies a block's first rows to another, which is empty.
func (b *block) first(rows int, to *block) *block {
	to.rows = rows
	for i, raw := range b.states {
		to.states[i] = append(to.states[i][:0], raw[:len(raw)/b.rows*rows]...)
	}
	return to
}

// tags are the client's, and what the daemon says of the prefix. Nobody else
// says that.
func (q *sequence) tags() map[string]string {
	out := map[string]string{}
	for k, v := range q.begin.Tags {
		if k != TagPrefixRows && k != TagPrefixFrom && k != TagPrefixRun {
			out[k] = v
		}
	}
	if q.lent > 0 {
		out[TagPrefixRows], out[TagPrefixFrom] = strconv.Itoa(q.lent), q.lender
		if q.lenderRun != "" {
			out[TagPrefixRun] = q.lenderRun
		}
	}
	return out
}
