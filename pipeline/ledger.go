package pipeline

import (
	"maps"
	"sync"
)

// ledger keeps the books of one reader: which messages it was given and which
// it has acknowledged. It holds no payloads, only numbers and reply subjects.
//
// Its floor is the stream sequence up to which everything is acknowledged.
// After any irregularity the reader starts again behind the floor, with a new
// consumer; what was acknowledged above it is remembered and skipped.
// It may be used from several goroutines.
type ledger struct {
	send func(reply string, verb []byte) // lost sends cost a repeat, no more

	mu    sync.Mutex
	order []*delivery // in stream order, from the first not acknowledged
	known map[uint64]*delivery
	ahead map[uint64]struct{} // acknowledged before the last forget
	floor uint64
}

type delivery struct {
	seq   uint64
	reply string
	acked bool
}

var (
	verbAck      = []byte("+ACK")
	verbProgress = []byte("+WPI")
)

func newLedger(floor uint64, send func(reply string, verb []byte)) *ledger {
	return &ledger{send: send, floor: floor, known: map[uint64]*delivery{}, ahead: map[uint64]struct{}{}}
}

// deliver books a message and says whether it is new. One that was
// acknowledged before is acknowledged again.
func (l *ledger) deliver(seq uint64, reply string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if seq <= l.floor {
		l.send(reply, verbAck)
		return false
	}
	if d, ok := l.known[seq]; ok {
		d.reply = reply
		if d.acked {
			l.send(reply, verbAck)
		}
		return false
	}
	d := &delivery{seq: seq, reply: reply}
	l.known[seq] = d
	l.order = append(l.order, d)
	if _, ok := l.ahead[seq]; ok {
		delete(l.ahead, seq)
		l.ackOne(d)
		l.advance()
		return false
	}
	return true
}

// ack acknowledges messages. Those forgotten meanwhile are left alone: they
// come again.
func (l *ledger) ack(seqs ...uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, seq := range seqs {
		if d, ok := l.known[seq]; ok && !d.acked {
			l.ackOne(d)
		}
	}
	l.advance()
}

func (l *ledger) ackOne(d *delivery) {
	d.acked = true
	l.send(d.reply, verbAck)
}

func (l *ledger) advance() {
	n := 0
	for n < len(l.order) && l.order[n].acked {
		l.floor = l.order[n].seq
		delete(l.known, l.floor)
		n++
	}
	if n > 0 {
		clear(l.order[:n])
		l.order = l.order[n:]
	}
}

// touch tells the server that what is held is being worked on.
func (l *ledger) touch() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range l.order {
		if !d.acked {
			l.send(d.reply, verbProgress)
		}
	}
}

// forget drops what is held, to be delivered again from floor+1 on.
func (l *ledger) forget() (floor uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range l.order {
		if d.acked {
			l.ahead[d.seq] = struct{}{}
		}
	}
	maps.DeleteFunc(l.ahead, func(seq uint64, _ struct{}) bool { return seq <= l.floor })
	l.order, l.known = nil, map[uint64]*delivery{}
	return l.floor
}

func (l *ledger) acknowledged() (floor uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.floor
}

// unacknowledged is how many messages are held.
func (l *ledger) unacknowledged() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, d := range l.order {
		if !d.acked {
			n++
		}
	}
	return n
}

// replyOf is where the ack of a held message goes.
func (l *ledger) replyOf(seq uint64) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d, ok := l.known[seq]; ok {
		return d.reply
	}
	return ""
}
