//go:build linux

package tap

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// upTo are n ids, those of a prompt.
func upTo(n int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(i*7+i/64) % 90
	}
	return out
}

const (
	someMemory = 1 << 20
	blockSize  = int64(blockRows * 2 * testHidden * 4)
)

// drain reads all sequences.
func (d *daemon) drain(n int) map[string]*got {
	d.t.Helper()
	out := map[string]*got{}
	for range n {
		id, g, err := d.next()
		if err != nil {
			d.t.Fatal(err)
		}
		out[id] = g
	}
	return out
}

func (g *got) completed(t *testing.T, rows int, from string) {
	t.Helper()
	if g.row == nil {
		t.Fatalf("%+v", g.fault)
	}
	want := map[string]string{}
	if rows > 0 {
		want = map[string]string{TagPrefixRows: strconv.Itoa(rows), TagPrefixFrom: from}
	}
	if !maps.Equal(g.row.Tags, want) {
		t.Errorf("tags %v, want %v", g.row.Tags, want)
	}
}

func TestACachedPrefixIsCompletedFromRowsOfTheSameTokens(t *testing.T) {
	for _, n := range []int{1, blockRows - 1, blockRows, blockRows + 1, 3*blockRows - 1} {
		for _, when := range []string{"finished", "open", "in the same step"} {
			t.Run(fmt.Sprint(n, " ", when), func(t *testing.T) {
				d := listen(t)
				e := d.ready(Config{PrefixMemory: someMemory}, 1024)
				first, second := append(upTo(n), 91, 92), append(upTo(n), 93)
				e.begin("a", first...)
				if when == "in the same step" {
					e.beginCached("b", n, second...)
					e.step(e.rows("a", 0, first...), e.rows("b", n, 93, 94))
				} else {
					e.step(e.rows("a", 0, first...))
				}
				if when == "finished" {
					e.finish("a", n+2, append(first, 95)...)
				}
				if when != "in the same step" {
					e.beginCached("b", n, second...)
					e.step(e.rows("b", n, 93, 94))
				}
				if when != "finished" {
					e.finish("a", n+2, append(first, 95)...)
				}
				e.finish("b", n+2, append(second, 94, 95)...)
				// And a third one, which reads what the second was given.
				e.beginCached("c", n, second...)
				e.step(e.rows("c", n, 93))
				e.finish("c", n+1, append(second, 96)...)
				e.bye()
				got := d.drain(3)
				got["a"].check(t, n+2, first...)
				got["a"].completed(t, 0, "")
				got["b"].check(t, n+1, append(second, 94)...)
				got["b"].completed(t, n, "a")
				got["c"].check(t, n+1, second...)
				got["c"].completed(t, n, "b")
				s := d.src.Status()
				if s.Completed != 2 || s.CompletedRows != int64(2*n) || s.Memory != 0 || s.sent() != e.count.sent() {
					t.Errorf("%+v, the engine counts %+v", s, e.count)
				}
			})
		}
	}
}

func TestACachedPrefixIsRefusedWithoutRowsOfTheSameTokens(t *testing.T) {
	prompt := upTo(70)
	other := slices.Clone(prompt)
	other[40] = 99
	for name, tt := range map[string]struct {
		memory int64
		before func(e *engine)
	}{
		"nothing came before": {someMemory, func(*engine) {}},
		"other tokens": {someMemory, func(e *engine) {
			e.begin("x", other...)
			e.step(e.rows("x", 0, other...))
			e.finish("x", 70, append(other, 1)...)
		}},
		"fewer tokens": {someMemory, func(e *engine) {
			e.begin("x", prompt[:60]...)
			e.step(e.rows("x", 0, prompt[:60]...))
			e.finish("x", 60, prompt[:61]...)
		}},
		"a request that was given up": {someMemory, func(e *engine) {
			e.begin("x", prompt...)
			e.step(e.rows("x", 0, prompt...))
			e.abort("x")
		}},
		"no memory for them": {0, func(e *engine) {
			e.begin("x", prompt...)
			e.step(e.rows("x", 0, prompt...))
			e.finish("x", 70, append(prompt, 1)...)
		}},
		"memory that was spent on later ones": {3 * blockSize, func(e *engine) {
			for _, ids := range [][]int32{prompt, other} {
				e.begin(fmt.Sprint("x", ids[40]), ids...)
				e.step(e.rows(fmt.Sprint("x", ids[40]), 0, ids...))
				e.finish(fmt.Sprint("x", ids[40]), 70, append(ids, 1)...)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			d := listen(t)
			e := d.ready(Config{PrefixMemory: tt.memory}, 1024)
			tt.before(e)
			e.beginCached("a", 66, prompt...)
			e.step(e.rows("a", 66, prompt[66:]...))
			e.finish("a", 70, append(prompt, 1)...)
			e.bye()
			g := d.drain(int(e.count.Begun))["a"]
			if g.fault == nil || g.fault.Check != checkRows || !strings.Contains(g.fault.Detail, "the first 66 rows are missing") {
				t.Errorf("%+v, %v", g.fault, g.row)
			}
			if s := d.src.Status(); s.Memory != 0 || s.PrefixBytes > tt.memory {
				t.Errorf("%+v", s)
			}
		})
	}
}

func TestRowsAreLentAmongEnginesThatSayTheyHaveTheSameWeights(t *testing.T) {
	d := listen(t)
	d.ready(Config{PrefixMemory: someMemory}, 8) // the source's first
	prompt := upTo(3)
	for _, tt := range []struct {
		weights string
		cached  bool
		lent    bool
	}{
		{"w1", false, false},
		{"w1", true, true},
		{"w2", true, false},
		{"", false, false},
		{"", true, false}, // it may be any model
	} {
		e := d.another(tt.weights, 8)
		if tt.cached {
			e.beginCached("a", 2, prompt...)
			e.step(e.rows("a", 2, prompt[2]))
		} else {
			e.begin("a", prompt...)
			e.step(e.rows("a", 0, prompt...))
		}
		e.finish("a", 3, append(prompt, 1)...)
		_, g, err := d.next()
		if err != nil || (g.fault == nil) != (tt.lent || !tt.cached) {
			t.Errorf("%+v: %+v, %v", tt, g.fault, err)
		}
		e.bye()
		e.hear(typeBye)
	}
}

// What is lent must not change when either side takes rows back.
func TestRowsThatAreLentStayWhatTheyAre(t *testing.T) {
	d := listen(t)
	e := d.ready(Config{PrefixMemory: someMemory}, 1024)
	prompt := upTo(blockRows * 2)
	e.begin("a", prompt[0])
	e.step(e.rows("a", 0, prompt...))
	e.beginCached("b", len(prompt), append(prompt, 91)...)
	e.step(e.rows("b", len(prompt), 91))
	e.step(e.rows("a", 10, 92)) // the lender takes rows back
	e.beginCached("c", len(prompt), append(prompt, 91)...)
	e.step(e.rows("c", len(prompt), 91))
	e.step(e.rows("c", 70, append(slices.Clone(prompt[70:]), 91)...)) // the borrower was preempted, and computes some rows itself
	e.beginCached("d", len(prompt), append(prompt, 91)...)
	e.step(e.rows("d", len(prompt), 91))
	e.step(e.rows("d", 0, append(slices.Clone(prompt), 91)...)) // and this one all of them
	e.finish("a", 11, append(slices.Clone(prompt[:10]), 92, 93)...)
	for _, r := range "bcd" {
		e.finish(string(r), len(prompt)+1, append(slices.Clone(prompt), 91, 1)...)
	}
	e.bye()
	got := d.drain(4)
	got["a"].check(t, 1, append(slices.Clone(prompt[:10]), 92)...)
	for r, rows := range map[string]int{"b": len(prompt), "c": 70, "d": 0} {
		got[r].check(t, len(prompt)+1, append(slices.Clone(prompt), 91)...)
		from := map[string]string{"b": "a", "c": "b"}[r]
		got[r].completed(t, rows, from)
	}
	if s := d.src.Status(); s.Memory != 0 {
		t.Errorf("%d bytes are still counted", s.Memory)
	}
}

func TestBlocksThatSequencesShareCountOnce(t *testing.T) {
	p := prefixes{bound: 4, unit: 1, refs: map[*block]int{}}
	a, b, c, x := &block{}, &block{}, &block{}, &block{}
	p.add(&kept{id: "one", ids: []int32{1}, blocks: []*block{a, b}})
	p.add(&kept{id: "two", ids: []int32{2}, blocks: []*block{a, c}})
	p.add(&kept{id: "three", ids: []int32{3}, blocks: []*block{a, x}})
	if p.used != 4 || len(p.list) != 3 {
		t.Fatalf("%d used by %d; want 4 by 3", p.used, len(p.list))
	}
	if p.find(nil, []int32{1}) == nil { // it is the latest to be used now
		t.Fatal("one is not there")
	}
	p.add(&kept{id: "four", ids: []int32{4}, blocks: []*block{{}}})
	for id, want := range map[int32]bool{1: true, 2: false, 3: true, 4: true} {
		if got := p.find(nil, []int32{id}); (got != nil) != want {
			t.Errorf("%d: %v, want it %v", id, got, want)
		}
	}
	p.add(&kept{id: "large", blocks: []*block{{}, {}, {}, {}, {}}})
	p.drop(func(*kept) bool { return true })
	if p.used != 0 || len(p.refs) != 0 || len(p.list) != 0 {
		t.Errorf("%+v after all were dropped", p)
	}
}

func TestWhatRanOnBehindAStopStringIsTakenBack(t *testing.T) {
	for _, tt := range []struct {
		rows, taken int
		fault       string
	}{
		{3, 2, ""},
		{4, 1, ""},
		{3, 1, "the engine counts 3 rows, 5 came"},
		{5, -1, "5 rows for 4 tokens"},
	} {
		d := listen(t)
		e := d.ready(Config{}, 16)
		e.begin("a", 1, 2)
		e.step(e.rows("a", 0, 1, 2, 3))
		e.step(e.rows("a", 3, 4, 5))
		e.count.Finished++
		e.send(map[string]any{"type": typeFinish, "r": "a", "reason": "stop", "rows": tt.rows, "taken": tt.taken, "ids": []int{1, 2, 3, 4}})
		_, g, err := d.next()
		switch {
		case err != nil:
			t.Fatal(err)
		case tt.fault == "":
			g.check(t, 2, []int32{1, 2, 3, 4}[:tt.rows]...)
		case g.fault == nil || !strings.Contains(g.fault.Detail, tt.fault):
			t.Errorf("%+v: %+v", tt, g.fault)
		}
	}
}
