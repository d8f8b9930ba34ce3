package pipeline

import (
	"strconv"
	"strings"
	"testing"
)

// sent is a sequence as a publisher would number it.
func sent(seq, attempt string, chunks int) []header {
	t := newTally()
	var out []header
	for i := range chunks {
		h := header{kind: kindData, seq: seq, attempt: attempt, chunk: i, rows: int64(i + 1), digest: uint64(1000 + i)}
		t.add(h.rows, h.digest)
		out = append(out, h)
	}
	return append(out, header{kind: kindEnd, seq: seq, attempt: attempt, count: int64(chunks), rows: t.rows, digest: t.digest()})
}

func TestTheAssemblerSeesWhatIsMissingDoubledOrChanged(t *testing.T) {
	me, again, other := sent("s", "me.1", 3), sent("s", "me.2", 3), sent("s", "old.1", 3)
	changed := me[1]
	changed.digest++
	short := me[3]
	short.rows--
	forged := me[3]
	forged.digest++
	tests := map[string]struct {
		in   []header
		want string // a letter each: process, complete, repeat, skip, ! spoiled; < an older attempt is replaced
	}{
		"whole":                         {me, "pppc"},
		"no chunks":                     {sent("s", "me.1", 0), "c"},
		"equal repeat":                  {[]header{me[0], me[1], me[0], me[1], me[2], me[3]}, "pprrpc"},
		"unequal repeat":                {[]header{me[0], me[1], changed, me[2], me[3]}, "pp!ss"},
		"gap":                           {[]header{me[0], me[2], me[3]}, "p!s"},
		"last chunk missing":            {[]header{me[0], me[1], me[3]}, "pp!"},
		"first chunk missing":           {[]header{me[1], me[2], me[3]}, "!ss"},
		"only the end":                  {[]header{me[3]}, "!"},
		"rows do not add up":            {[]header{me[0], me[1], me[2], short}, "ppp!"},
		"digest of the whole":           {[]header{me[0], me[1], me[2], forged}, "ppp!"},
		"started over":                  {append([]header{me[0], me[1]}, again...), "pp<pppc"},
		"started over by another":       {append([]header{other[0], other[1]}, me...), "pp<pppc"},
		"started over after a gap":      {append([]header{me[0], me[2]}, again...), "p!<pppc"},
		"tail of what was done":         {append([]header{other[2], other[3]}, me...), "sspppc"},
		"all of it twice":               {append(append([]header{}, me...), me...), "pppcssss"},
		"twice, by another first":       {append(append([]header{}, other...), me...), "pppcpppc"},
		"end of an attempt never begun": {append([]header{me[0]}, again[3]), "p<!"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			a := newAssembler("me")
			var got strings.Builder
			for _, h := range tc.in {
				v, s, replaced, fault := a.accept(h)
				if replaced != nil {
					got.WriteByte('<')
				}
				got.WriteByte("pcrs!"[v])
				if v == spoiled {
					s.aside = true
				}
				if (fault != nil) != (v == spoiled) {
					t.Errorf("verdict %d with fault %v", v, fault)
				}
			}
			if got.String() != tc.want {
				t.Errorf("got %s, want %s", &got, tc.want)
			}
		})
	}
}

func TestTheLedgerNeverPassesWhatIsNotAcknowledged(t *testing.T) {
	var acks []string
	l := newLedger(10, func(reply string, verb []byte) { acks = append(acks, reply+string(verb)) })
	deliver := func(seq uint64, want bool) {
		t.Helper()
		if got := l.deliver(seq, strconv.FormatUint(seq, 10)); got != want {
			t.Errorf("message %d is new: %t", seq, got)
		}
	}
	floor := func(want uint64) {
		t.Helper()
		if got := l.acknowledged(); got != want {
			t.Errorf("floor %d, want %d", got, want)
		}
	}
	deliver(9, false) // acknowledged by an earlier invocation
	deliver(12, true)
	deliver(15, true)
	deliver(17, true)
	deliver(15, false) // held
	l.ack(15)
	floor(10)
	l.ack(12)
	floor(15)
	deliver(20, true)
	l.ack(20)
	floor(15)
	if got := l.forget(); got != 15 {
		t.Errorf("forget returns to %d", got)
	}
	l.ack(17) // forgotten, comes again
	floor(15)
	deliver(17, true)
	deliver(20, false) // acknowledged before
	floor(15)
	l.ack(17)
	floor(20)
	want := "9+ACK 15+ACK 12+ACK 20+ACK 20+ACK 17+ACK"
	if got := strings.Join(acks, " "); got != want {
		t.Errorf("acks %s, want %s", got, want)
	}
}
