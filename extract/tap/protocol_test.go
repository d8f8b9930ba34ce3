//go:build linux

package tap

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestAnEngineThatDoesNotKeepToTheProtocolIsRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		do   func(e *engine)
		says string
	}{
		"a ring that is not sealed": {func(e *engine) { e.offer(4, nil, false) }, "sealed"},
		"a ring larger than its memory": {func(e *engine) {
			e.offer(4, map[string]any{"slots": 5}, true)
		}, "in memory of"},
		"slots smaller than a row": {func(e *engine) {
			e.offer(4, map[string]any{"slot_bytes": 31}, true)
		}, "for rows of 32"},
		"sizes that overflow": {func(e *engine) {
			e.offer(4, map[string]any{"slots": int64(1) << 62}, true)
		}, "a ring of"},
		"another kind of ring": {func(e *engine) {
			e.offer(4, map[string]any{"kind": "cuda_ipc"}, true)
		}, "kind"},
		"a ring without memory": {func(e *engine) {
			e.send(map[string]any{"type": typeRing, "kind": kindMemfd, "offset": 8, "slot_bytes": 32, "slots": 1})
		}, "without its descriptor"},
		"rows before the ring": {func(e *engine) {
			e.send(map[string]any{"type": typeBegin, "r": "a"})
		}, "before the ring"},
		"an unknown message": {func(e *engine) {
			e.offer(4, nil, true)
			e.send(map[string]any{"type": "greet"})
		}, "greet"},
		"a request that is not open": {func(e *engine) {
			e.offer(4, nil, true)
			e.step(e.rows("a", 0, 1))
		}, "not open"},
		"a request that begins twice": {func(e *engine) {
			e.offer(4, nil, true)
			e.begin("a", 1)
			e.begin("a", 1)
		}, "twice"},
		"a name that is a path": {func(e *engine) {
			e.offer(4, nil, true)
			e.begin("../a", 1)
		}, "called"},
		"a token outside the vocabulary": {func(e *engine) {
			e.offer(4, nil, true)
			e.begin("a", 100)
		}, "vocabulary"},
		"slots out of order": {func(e *engine) {
			e.offer(4, nil, true)
			e.begin("a", 1)
			e.slot = 2
			e.step(e.rows("a", 0, 1))
		}, "next slot is 0"},
		"more rows than slots": {func(e *engine) {
			e.offer(4, nil, true)
			e.begin("a", 1)
			e.step(e.rows("a", 0, 1, 2, 3, 4, 5))
		}, "of a ring of 4"},
		"a step that is skipped": {func(e *engine) {
			e.offer(4, nil, true)
			e.begin("a", 1)
			e.steps = 1
			e.step(e.rows("a", 0, 1))
		}, "step 1, want 0"},
		"bytes that are no message": {func(e *engine) {
			if _, err := e.conn.Write([]byte("GET / HTTP/1.1\r\n\r\n")); err != nil {
				e.t.Error(err)
			}
		}, "bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			d := listen(t)
			e := d.dial()
			e.send(testHello)
			d.welcome(Config{})
			e.hear(typeWelcome)
			tt.do(e)
			if m := e.hear(typeRefuse); !strings.Contains(fmt.Sprint(m["reason"]), tt.says) {
				t.Errorf("refused for %v, want %q", m["reason"], tt.says)
			}
			// What it had begun becomes a tombstone, and that is all.
			for {
				_, g, err := d.next()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil || g.fault == nil || g.fault.Check != stoneDisconnected {
					t.Fatalf("%+v, %v", g, err)
				}
			}
		})
	}
}

func TestAnEngineOfAnotherModelIsRefusedAndTheFirstGoesOn(t *testing.T) {
	d := listen(t)
	e := d.ready(Config{}, 8)
	other := map[string]any{"type": typeHello, "protocol": Protocol, "dtype": "f32", "model": map[string]any{"layers": 7, "hidden": testHidden, "vocab": 100}}
	o := d.dial()
	o.send(other)
	if m := o.hear(typeRefuse); !strings.Contains(fmt.Sprint(m["reason"]), "another model") {
		t.Error(m)
	}
	other["protocol"] = 9
	o = d.dial()
	o.send(other)
	if m := o.hear(typeRefuse); !strings.Contains(fmt.Sprint(m["reason"]), "version 9") {
		t.Error(m)
	}
	e.begin("a", 1)
	e.step(e.rows("a", 0, 1))
	e.finish("a", 1, 1, 2)
	e.bye()
	if _, g, err := d.next(); err != nil {
		t.Fatal(err)
	} else {
		g.check(t, 1, 1)
	}
}

// The run's record names the weights of all its rows.
func TestAnEngineOfOtherWeightsThanTheRunIsRefused(t *testing.T) {
	d := listen(t)
	e := d.dial()
	e.hello("w1")
	d.welcome(Config{})
	e.welcomed(8)
	for _, weights := range []string{"w2", ""} {
		o := d.dial()
		o.hello(weights)
		if m := o.hear(typeRefuse); !strings.Contains(fmt.Sprint(m["reason"]), "the run is of w1") {
			t.Error(m)
		}
	}
	d.another("w1", 8)
}

func TestASocketThatIsInUseIsNotTaken(t *testing.T) {
	d := listen(t)
	if l, err := Listen(d.path); err == nil {
		l.Close()
		t.Error("two daemons listen at one socket")
	}
	d.l.l.SetUnlinkOnClose(false)
	d.l.Close()
	l, err := Listen(d.path) // what a killed daemon leaves
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}

func TestAPathThatCannotBeASocketIsRefusedWithTheReason(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	long := filepath.Join(t.TempDir(), strings.Repeat("x", 200))
	for path, says := range map[string]string{file: "no socket is there; choose another path", long: "choose a shorter one"} {
		if l, err := Listen(path); err == nil || !strings.Contains(err.Error(), says) {
			if err == nil {
				l.Close()
			}
			t.Errorf("listening at %s: %v, want %q", path, err, says)
		}
	}
	if kept, err := os.ReadFile(file); err != nil || string(kept) != "mine" {
		t.Errorf("the file that was there holds %q now (%v)", kept, err)
	}
}

func FuzzReadFrame(f *testing.F) {
	good, err := frame(map[string]any{"type": "step", "n": 1, "rows": []any{map[string]any{"r": "a", "pos": 1, "ids": []int{1}, "slot": 2}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte{255, 255, 255, 0, '{'})
	f.Add([]byte{2, 0, 0, 0, '{', '}'})
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		var buf []byte
		for {
			kind, body, grown, err := readFrame(r, buf)
			buf = grown
			if err != nil {
				return
			}
			// What is decoded of it is an error or a value, never a panic.
			_, _ = decode[Hello](kind, body)
			_, _ = decode[step](kind, body)
			_, _ = decode[ending](kind, body)
			_, _ = decode[ringAd](kind, body)
			if cap(buf) > len(data)+1<<21 {
				t.Fatalf("%d bytes of input cost %d", len(data), cap(buf))
			}
		}
	})
}
