package pipeline

import "fmt"

// sequence is a sequence being received: one attempt at it, and the numbers
// of its messages, which stay unacknowledged until the whole is done with.
type sequence struct {
	id, attempt string
	tally       tally
	digests     []uint64 // of the chunks so far
	held        []uint64 // stream sequences
	begun       bool     // the handler has seen a record of it
	aside       bool     // the rest of this attempt is skipped
	out         *outSeq  // the stage's own
}

// verdict is what to do with a message.
type verdict int

const (
	process  verdict = iota // hand the record over
	complete                // the sequence is whole
	repeat                  // seen already: acknowledge
	skip                    // of no use: acknowledge
	spoiled                 // the sequence cannot be completed: see the fault
)

// assembler puts the messages of one partition together to sequences. It
// knows the order in which a publisher sends, so that whatever is missing,
// doubled or changed shows:
//
//   - chunk 0 of a new attempt starts its sequence over;
//   - an equal repeat is dropped, an unequal one spoils the attempt;
//   - so does a gap;
//   - a given-up marker takes its attempt out, without a fault;
//   - the end marker has to agree with the chunks in number, rows and digest.
type assembler struct {
	nonce string // of this invocation
	open  map[string]*sequence
	done  map[string]bool // attempts of this invocation: completed, or (true) set aside
}

func newAssembler(nonce string) *assembler {
	return &assembler{nonce: nonce, open: map[string]*sequence{}, done: map[string]bool{}}
}

// retire takes out the sequences of other invocations than the given one.
// Invocations follow each other, so these will never be completed.
func (a *assembler) retire(nonce string) []*sequence {
	var gone []*sequence
	for id, s := range a.open {
		if nonceOf(s.attempt) != nonce {
			delete(a.open, id)
			gone = append(gone, s)
		}
	}
	return gone
}

// adopt makes an invocation of another process the one to expect messages of,
// and says whether it was not before.
func (a *assembler) adopt(nonce string) bool {
	if a.nonce == nonce {
		return false
	}
	a.nonce = nonce
	clear(a.done)
	return true
}

// busy says that a sequence is half through.
func (a *assembler) busy() bool {
	for _, s := range a.open {
		if s.begun && !s.aside {
			return true
		}
	}
	return false
}

// reset takes out every sequence that is to be delivered again. Those set
// aside stay so.
func (a *assembler) reset() []*sequence {
	var gone []*sequence
	for id, s := range a.open {
		if !s.aside {
			delete(a.open, id)
			gone = append(gone, s)
		}
	}
	return gone
}

// accept judges a message of a sequence. s is the sequence it belongs to (nil
// for one to skip), and replaced an older attempt that it puts an end to.
// A fault comes with the verdict spoiled only.
func (a *assembler) accept(h header) (v verdict, s, replaced *sequence, fault *Fault) {
	if h.kind == kindGivenUp {
		if s = a.open[h.seq]; s != nil && s.attempt == h.attempt {
			delete(a.open, h.seq)
			replaced = s
		}
		return skip, nil, replaced, nil
	}
	if _, ok := a.done[h.attempt]; ok {
		return skip, nil, nil, nil
	}
	s = a.open[h.seq]
	starts := h.kind == kindData && h.chunk == 0 || h.kind == kindEnd && h.count == 0
	if starts && (s == nil || s.attempt != h.attempt) {
		replaced = s
		s = &sequence{id: h.seq, attempt: h.attempt, tally: newTally()}
		a.open[h.seq] = s
	}
	spoil := func(check, format string, args ...any) (verdict, *sequence, *sequence, *Fault) {
		return spoiled, s, replaced, &Fault{Seq: h.seq, Chunk: h.chunk, Check: check, Detail: fmt.Sprintf(format, args...)}
	}
	if s == nil || s.attempt != h.attempt {
		if nonceOf(h.attempt) != a.nonce {
			// The tail of a sequence whose beginning was acknowledged before
			// a crash: it is done with.
			return skip, nil, replaced, nil
		}
		replaced = s
		s = &sequence{id: h.seq, attempt: h.attempt, tally: newTally()}
		a.open[h.seq] = s
		return spoil("order", "its first chunk is missing")
	}
	if s.aside {
		if h.kind == kindEnd {
			delete(a.open, h.seq)
		}
		return skip, nil, replaced, nil
	}
	if h.kind == kindEnd {
		h.chunk = -1
		t := &s.tally
		switch {
		case int64(t.chunks) != h.count || t.rows != h.rows:
			return spoil("count", "%d chunks of %d rows came, the end marker says %d of %d", t.chunks, t.rows, h.count, h.rows)
		case t.digest() != h.digest:
			return spoil("digest", "digest of the whole is %016x, the end marker says %016x", t.digest(), h.digest)
		}
		delete(a.open, h.seq)
		if nonceOf(h.attempt) == a.nonce {
			a.done[h.attempt] = false
		}
		return complete, s, replaced, nil
	}
	switch {
	case h.chunk > s.tally.chunks:
		return spoil("order", "chunk %d came where %d was due", h.chunk, s.tally.chunks)
	case h.chunk < s.tally.chunks && s.digests[h.chunk] == h.digest:
		return repeat, s, replaced, nil
	case h.chunk < s.tally.chunks:
		return spoil("digest", "chunk %d came twice, unequal", h.chunk)
	}
	s.tally.add(h.rows, h.digest)
	s.digests = append(s.digests, h.digest)
	return process, s, replaced, nil
}
