//go:build linux

package tap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRequestsThatInterleaveComeOneAfterTheOther(t *testing.T) {
	d := listen(t)
	e := d.ready(Config{}, 16)
	e.begin("a", 1, 2, 3)
	e.begin("b", 4)
	e.step(e.rows("a", 0, 1, 2, 3), e.rows("b", 0, 4))
	e.step(e.rows("b", 1, 5), e.rows("a", 3, 6))
	e.step(e.rows("a", 4, 7))
	e.finish("a", 5, 1, 2, 3, 6, 7, 8) // the last was never fed
	e.step(e.rows("b", 2, 9))
	e.finish("b", 3, 4, 5, 9) // and here it was
	e.bye()
	for _, want := range []struct {
		id     string
		prompt int
		ids    []int32
	}{{"a", 3, []int32{1, 2, 3, 6, 7}}, {"b", 1, []int32{4, 5, 9}}} {
		id, g, err := d.next()
		if err != nil || id != want.id {
			t.Fatalf("%s, %v; want %s", id, err, want.id)
		}
		g.check(t, want.prompt, want.ids...)
	}
	counts := e.hear(typeBye)["counts"].(map[string]any)
	if counts["stored"] != 2.0 || counts["rows"] != float64(e.count.Rows) || counts["stored_rows"] != 8.0 {
		t.Errorf("the daemon counts %v", counts)
	}
	if _, _, err := d.next(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last: %v", err)
	}
}

func TestARequestLargerThanTheRingGoesThroughItInPieces(t *testing.T) {
	d := listen(t)
	e := d.ready(Config{}, 8)
	e.begin("a", 1)
	var ids []int32
	done := make(chan struct{})
	go func() {
		defer close(done)
		for p := range 300 {
			id := int32(p % 90)
			if p%8 == 0 && p > 0 {
				for e.hear(typeCredit)["freed"].(float64) < float64(p) {
				}
			}
			e.step(e.rows("a", p, id))
		}
	}()
	for p := range 300 {
		ids = append(ids, int32(p%90))
	}
	<-done
	ids[0] = 0
	e.finish("a", 300, ids...)
	_, g, err := d.next()
	if err != nil {
		t.Fatal(err)
	}
	if g.fault == nil || g.fault.Check != checkEcho { // the prompt was 1
		t.Errorf("%+v", g.fault)
	}
}

func TestWhatTheEngineTakesBackIsNotStored(t *testing.T) {
	for _, blocks := range []int{0, 1, 2} { // whole blocks before the draft
		t.Run(strconv.Itoa(blocks), func(t *testing.T) {
			d := listen(t)
			e := d.ready(Config{}, 256)
			var ids []int32
			for p := range blocks*blockRows + 3 {
				ids = append(ids, int32(p%90))
			}
			e.begin("a", ids...)
			e.step(e.rows("a", 0, ids...))
			draft := make([]int32, 70)
			e.step(e.rows("a", len(ids), draft...)) // 70 drafts
			e.step(e.rows("a", len(ids)-1, 91, 92)) // all of them rejected, and a token before them
			all := append(ids[:len(ids)-1:len(ids)-1], 91, 92)
			// The prompt's last token was changed, which is a fault; so the
			// engine says that the prompt was shorter.
			e.finish("a", len(all), append(all, 93)...)
			_, g, err := d.next()
			if err != nil {
				t.Fatal(err)
			}
			if g.fault == nil || g.fault.Check != checkEcho {
				t.Errorf("a changed prompt: %+v", g.fault)
			}
			e.begin("b", ids...)
			e.step(e.rows("b", 0, ids...))
			e.step(e.rows("b", len(ids), draft...))
			e.step(e.rows("b", len(ids)+2, 91))
			all = append(slices.Clip(ids), 0, 0, 91)
			e.finish("b", len(all), append(all, 93)...)
			if _, g, err = d.next(); err != nil {
				t.Fatal(err)
			}
			g.check(t, len(ids), all...)
			if used := d.src.Status().Memory; used != 0 {
				t.Errorf("%d bytes are still counted", used)
			}
		})
	}
}

func TestWhatIsWrongWithARequestIsItsFault(t *testing.T) {
	for name, tt := range map[string]struct {
		do          func(e *engine)
		check, says string
	}{
		"a hole": {func(e *engine) {
			e.begin("a", 1, 2)
			e.step(e.rows("a", 0, 1, 2))
			e.step(e.rows("a", 4, 5))
			e.finish("a", 3, 1, 2, 3, 4, 5)
		}, checkRows, "rows 2 to 3 are missing"},
		"a cached prefix that is owned up to": {func(e *engine) {
			e.beginCached("a", 2, 1, 2, 3)
			e.step(e.rows("a", 2, 3))
			e.finish("a", 1, 1, 2, 3, 4)
		}, checkRows, "the first 2 rows are missing"},
		"a cached prefix that is not": {func(e *engine) {
			e.begin("a", 1, 2, 3)
			e.step(e.rows("a", 2, 3))
			e.finish("a", 1, 1, 2, 3, 4)
		}, checkRows, "rows 0 to 1 are missing (a prefix cache?)"},
		"rows for the tail only": {func(e *engine) {
			e.begin("a", 1, 2, 3)
			e.step(e.rows("a", 0, 3))
			e.finish("a", 1, 1, 2, 3, 4)
		}, checkRows, "1 rows for 4 tokens"},
		"other ids": {func(e *engine) {
			e.begin("a", 1, 2)
			e.step(e.rows("a", 0, 1, 1, 2))
			e.finish("a", 3, 1, 2, 3)
		}, checkEcho, "ids differ at 1: the model was fed 1, the sequence has 2"},
		"another count": {func(e *engine) {
			e.begin("a", 1)
			e.step(e.rows("a", 0, 1))
			e.finish("a", 2, 1, 2, 3)
		}, checkRows, "the engine counts 2 rows, 1 came"},
		"no row": {func(e *engine) {
			e.begin("a", 1)
			e.finish("a", 0, 1)
		}, checkRows, "no row came"},
		"a value that is not finite": {func(e *engine) {
			e.begin("a", 1, 2)
			rows := e.rows("a", 0, 1, 2)
			copy(e.ring[64+32+16+4:], []byte{0, 0, 0x80, 0x7f}) // slot 1, second state, value 1: +Inf
			e.step(rows)
			e.finish("a", 2, 1, 2, 3)
		}, checkFinite, "row 1, state 3: 0 NaN, 1 Inf"},
		"an abort": {func(e *engine) {
			e.begin("a", 1)
			e.step(e.rows("a", 0, 1))
			e.abort("a")
		}, stoneAborted, "the client hung up, after 1 rows"},
		"a death": {func(e *engine) {
			e.begin("a", 1)
			e.step(e.rows("a", 0, 1))
			e.conn.Close()
		}, stoneDisconnected, "after 1 rows"},
	} {
		t.Run(name, func(t *testing.T) {
			d := listen(t)
			e := d.ready(Config{}, 16)
			tt.do(e)
			id, g, err := d.next()
			if err != nil || id != "a" {
				t.Fatal(id, err)
			}
			if g.fault == nil || g.fault.Check != tt.check || !strings.Contains(g.fault.Detail, tt.says) || g.row != nil || g.tokens != nil {
				t.Errorf("%+v, row %v; want %s: %s", g.fault, g.row, tt.check, tt.says)
			}
			if used := d.src.Status().Memory; used != 0 {
				t.Errorf("%d bytes are still counted", used)
			}
		})
	}
}

func TestRequestsThatAreNotWantedLeaveNothing(t *testing.T) {
	d := listen(t)
	e := d.ready(Config{Policy: Policy{MinTokens: 2, MaxTokens: 4, Tags: map[string]string{"tenant": "a"}}}, 64)
	begin := func(r string, tags map[string]string, more map[string]any) {
		m := map[string]any{"type": typeBegin, "r": r, "prompt": []int{1}, "tags": tags}
		maps.Copy(m, more)
		e.count.Begun++
		e.send(m)
	}
	mine := map[string]string{"tenant": "a"}
	begin("other", map[string]string{"tenant": "b"}, nil)
	begin("untagged", nil, nil)
	begin("off", map[string]string{"tenant": "a", "draftscope": "off"}, nil)
	begin("optout", mine, map[string]any{"optout": true})
	begin("short", mine, nil)
	begin("long", mine, nil)
	begin("kept", mine, nil)
	for _, r := range []string{"other", "untagged", "off", "optout", "short", "kept"} {
		e.step(e.rows(r, 0, 1))
	}
	e.step(e.rows("long", 0, 1, 2, 3, 4))
	e.step(e.rows("long", 4, 5), e.rows("kept", 1, 2, 3))
	for _, r := range []string{"other", "untagged", "off", "optout", "short"} {
		e.finish(r, 1, 1, 2)
	}
	e.abort("long")
	e.finish("kept", 3, 1, 2, 3)
	e.bye()
	id, g, err := d.next()
	if err != nil || id != "kept" {
		t.Fatal(id, err)
	}
	g.check(t, 1, 1, 2, 3)
	if id, _, err := d.next(); !errors.Is(err, io.EOF) {
		t.Errorf("%s came too (%v)", id, err)
	}
	if c := d.src.Status().Counts; c.Dropped != 6 || c.Stored != 1 || c.Tombstones != 0 || c.sent() != e.count.sent() {
		t.Errorf("counts %+v, the engine's %+v", c, e.count)
	}
}

func TestASampleIsChosenByName(t *testing.T) {
	p := Policy{Sample: 0.3}
	n := 0
	for i := range 10_000 {
		if p.sampled(fmt.Sprint("r", i)) {
			n++
		}
	}
	if n < 2850 || n > 3150 {
		t.Errorf("%d of 10,000 sampled, want about 3,000", n)
	}
	// The engine's half has the same two in its tests.
	if !p.sampled("r6") || p.sampled("r0") {
		t.Error("r6 is in the sample and r0 is not")
	}
}

func TestMemoryThatUnfinishedRequestsSpendCostsTheYoungest(t *testing.T) {
	block := int64(blockRows * 2 * testHidden * 4)
	d := listen(t)
	e := d.ready(Config{Memory: 2 * block}, 512)
	for _, r := range []string{"old", "middle", "young"} {
		e.begin(r, 1)
	}
	ids := make([]int32, blockRows)
	e.step(e.rows("old", 0, append([]int32{1}, ids[1:]...)...))
	e.step(e.rows("young", 0, 1))
	e.step(e.rows("middle", 0, 1)) // takes the young one's memory
	if m := e.hear(typeDrop); m["r"] != "young" {
		t.Errorf("dropped %v", m)
	}
	e.step(e.rows("old", blockRows, 5)) // takes the middle one's
	if m := e.hear(typeDrop); m["r"] != "middle" {
		t.Errorf("dropped %v", m)
	}
	e.step(e.rows("young", 1, 2), e.rows("middle", 1, 2)) // were on their way
	e.finish("young", 2, 1, 2, 3)
	e.finish("middle", 2, 1, 2, 3)
	whole := append(append([]int32{1}, ids[1:]...), 5)
	e.finish("old", len(whole), append(whole, 6)...)
	e.bye()
	for _, want := range []string{"young", "middle"} {
		id, g, err := d.next()
		if err != nil || id != want || g.fault == nil || g.fault.Check != stoneMemory {
			t.Errorf("%s %+v %v; want the tombstone of %s", id, g, err, want)
		}
	}
	_, g, err := d.next()
	if err != nil {
		t.Fatal(err)
	}
	g.check(t, 1, whole...)
	if s := d.src.Status(); s.Memory != 0 || s.Tombstones != 2 {
		t.Errorf("%+v", s)
	}
}

func TestMemoryThatIsWaitingToBePublishedEndsCredit(t *testing.T) {
	block := int64(blockRows * 2 * testHidden * 4)
	d := listen(t)
	e := d.ready(Config{Memory: block}, 8)
	e.begin("a", 1)
	e.step(e.rows("a", 0, 1))
	e.hear(typeCredit)
	e.finish("a", 1, 1, 2)
	e.begin("b", 3)
	e.step(e.rows("b", 0, 3))
	_ = e.conn.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	if k, _, _, err := readFrame(e.in, nil); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%s, %v: the daemon has no memory and reads on", k, err)
	}
	if _, g, err := d.next(); err != nil {
		t.Fatal(err)
	} else {
		g.check(t, 1, 1)
	}
	e.hear(typeCredit)
	e.finish("b", 1, 3, 4)
	if _, g, err := d.next(); err != nil {
		t.Fatal(err)
	} else {
		g.check(t, 1, 3)
	}
}

func TestTheStatusSaysWhatWaitsInTheRing(t *testing.T) {
	d := listen(t)
	e := d.ready(Config{}, 16)
	filled := func() { binary.LittleEndian.PutUint64(e.ring[16:], e.slot) }
	until := func(what string, ok func(Status) bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); !ok(d.src.Status()); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: %+v", what, d.src.Status())
			}
		}
	}
	e.begin("a", 1)
	rows := e.rows("a", 0, 1, 2)
	filled()
	until("two rows are in the ring and in no message", func(s Status) bool { return s.Filled == 2 && s.Slots == 16 })
	e.send(map[string]any{"type": typeStep, "n": 0, "at": float64(time.Now().Add(-time.Second).UnixMicro()) / 1e6, "rows": []any{rows}})
	until("they were read", func(s Status) bool { return s.Filled == 0 && s.Rows == 2 })
	if s := d.src.Status(); s.Bytes != 2*2*testHidden*4 || s.Lag < time.Second || s.Lag > time.Minute || s.Worst != s.Lag {
		t.Errorf("%d bytes, lag %v, at most %v", s.Bytes, s.Lag, s.Worst)
	}
	e.conn.Close()
	until("the ring is gone", func(s Status) bool { return s.Slots == 0 && s.Engines == 0 })
	if _, g, err := d.next(); err != nil || g.fault == nil {
		t.Errorf("%+v, %v", g, err)
	}
}

func TestADaemonThatDrainsLeavesATombstoneForWhatIsOpen(t *testing.T) {
	d := listen(t)
	e := d.ready(Config{}, 16)
	d.src.mu.Lock()
	d.src.cfg.Once = false
	d.src.mu.Unlock()
	e.begin("a", 1, 2)
	e.begin("b", 4, 5)
	e.step(e.rows("a", 0, 1, 2), e.rows("b", 0, 4, 5))
	e.finish("a", 2, 1, 2, 3)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		if st := d.src.Status(); st.Open == 1 && st.Waiting == 1 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%+v", d.src.Status())
		}
	}
	d.src.Drain()
	if id, g, err := d.next(); err != nil || id != "a" {
		t.Fatal(id, err)
	} else {
		g.check(t, 2, 1, 2)
	}
	if id, g, err := d.next(); err != nil || id != "b" || g.fault == nil || g.fault.Check != stoneDisconnected || g.fault.Detail != "the daemon was stopped after 2 rows" {
		t.Errorf("%s, %+v, %v", id, g, err)
	}
	if _, _, err := d.next(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last: %v", err)
	}
	if st := d.src.Status(); st.Begun != 2 || st.Stored != 1 || st.Tombstones != 1 {
		t.Errorf("%+v", st.Counts)
	}
	// It is not refused, so that it tries again.
	_ = e.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	var buf []byte
	for {
		kind, _, grown, err := readFrame(e.in, buf)
		if errors.Is(err, io.EOF) {
			break
		}
		if buf = grown; err != nil || kind == typeRefuse {
			t.Fatal(kind, err)
		}
	}
}
