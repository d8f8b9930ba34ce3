package tap

import (
	"fmt"
	"slices"

	"github.com/draftscope/draftscope/schemas"
)

// The checks that faults name. Those of a tombstone are words.
const (
	checkFinite       = "K1"
	checkRows         = "K3"
	checkEcho         = "K4"
	stoneAborted      = "aborted"
	stoneShed         = "shed"
	stoneDisconnected = "disconnected"
	stoneMemory       = "memory"
)

// blockRows is the rows of a capture record, and the unit in which memory is
// taken and given back.
const blockRows = 64

// block is up to blockRows rows of every state.
type block struct {
	rows   int
	states [][]byte // by state, rows*width bytes
	shared bool     // other sequences have it, too: it must not change
}

// sequence is a request on its way. While it is open its link's goroutine
// owns it, but for the fields that the source's mutex guards.
type sequence struct {
	id    string
	age   uint64 // requests that began before it
	link  *link
	begin begin

	blocks []*block
	ids    []int32 // of the rows
	taken  int     // rows that were taken back
	lent   int     // the first rows, which are those of the sequence lender
	lender string
	// lenderRun is the lender's run, if it is another one.
	lenderRun string
	search    *search // for the first absent rows, which are zero until then
	absent    int

	check, detail string // a fault or tombstone
	stone         bool   // it is a tombstone

	finish string // reason
	probe  bool   // its rows are to be compared with the target's

	// Guarded by Source.mu:
	bytes   int64
	dropped bool // not wanted: nothing is kept
	evicted bool // its memory was taken from it
}

func (q *sequence) fault(check, format string, args ...any) {
	if q.check == "" {
		q.check, q.detail = check, fmt.Sprintf(format, args...)
	}
}

// rewind takes back the rows from pos on, and returns how many blocks of
// memory that frees.
func (q *sequence) rewind(pos int) (freed int) {
	q.taken += len(q.ids) - pos
	q.ids = q.ids[:pos]
	keep := (pos + blockRows - 1) / blockRows
	freed = len(q.blocks) - keep
	q.blocks = q.blocks[:keep]
	q.lent, q.absent = min(q.lent, pos), min(q.absent, pos)
	if keep == 0 {
		return freed
	}
	b, rows := q.blocks[keep-1], pos-(keep-1)*blockRows
	switch {
	case rows == b.rows:
	case b.shared:
		q.blocks[keep-1] = b.first(rows, q.link.newBlock())
	default:
		for i := range b.states {
			b.states[i] = b.states[i][:len(b.states[i])/b.rows*rows]
		}
		b.rows = rows
	}
	return freed
}

// room is the block that the next row goes into, nil when a new one is needed.
func (q *sequence) room() *block {
	if n := len(q.blocks); n > 0 && q.blocks[n-1].rows < blockRows {
		return q.blocks[n-1]
	}
	return nil
}

// verify compares the rows that came with what the engine's front end says of
// the request.
func (q *sequence) verify(e ending) {
	rows := len(q.ids)
	switch {
	case e.Rows != rows:
		q.fault(checkRows, "the engine counts %d rows, %d came", e.Rows, rows)
	case rows == 0:
		q.fault(checkRows, "no row came")
	case len(e.IDs) < rows:
		q.fault(checkRows, "%d rows for %d tokens", rows, len(e.IDs))
	case len(e.IDs) > rows+1:
		q.fault(checkRows, "%d rows for %d tokens, the last %d rows are missing (only the last token may have none)", rows, len(e.IDs), len(e.IDs)-rows)
	}
	if q.check != "" {
		return
	}
	for i, id := range q.ids {
		if e.IDs[i] != id {
			q.fault(checkEcho, "ids differ at %d: the model was fed %d, the sequence has %d", i, id, e.IDs[i])
			return
		}
	}
	if p := q.begin.Prompt; len(p) > len(e.IDs) || !slices.Equal(p, e.IDs[:len(p)]) {
		q.fault(checkEcho, "the sequence does not begin with the request's prompt of %d tokens", len(p))
	}
}

// tokens are the rows of the table tokens, without what the target says.
func (q *sequence) tokens(turn []int32, role []string) []schemas.Token {
	out := make([]schemas.Token, len(q.ids))
	for i, id := range q.ids {
		out[i] = schemas.Token{
			SeqID: q.id, Pos: int32(i), TokenID: id, LossMask: i >= len(q.begin.Prompt), Turn: turn[i], Role: role[i],
		}
	}
	return out
}

// rowsOf gathers rows [lo, hi) of state number i, by index, as floats.
func (q *sequence) rowsOf(i, lo, hi int, d schemas.DType) []float32 {
	var out []float32
	for lo < hi {
		b := q.blocks[lo/blockRows]
		width := len(b.states[i]) / b.rows
		at := lo % blockRows
		n := min(hi-lo, b.rows-at)
		out = d.AppendFloats(out, b.states[i][at*width:(at+n)*width])
		lo += n
	}
	return out
}
