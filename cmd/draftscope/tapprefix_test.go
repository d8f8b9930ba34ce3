//go:build linux

package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/schemas"
	"golang.org/x/sys/unix"
)

// scripted is an engine without a model, of two states in f32.
type scripted struct {
	weights, version      string
	layers, hidden, vocab int
	// row is what it has of a token in its first or second state.
	row func(pos int, id int32, state int) []float32
}

// small computes rows that say whose they are.
func small(weights, version string, value float32) scripted {
	return scripted{weights, version, 4, 2, 1000, func(_ int, id int32, state int) []float32 {
		return []float32{float32(id) + float32(state)/4, value}
	}}
}

// serve sends one request, of whose prompt it has so many rows in its cache,
// to the daemon at a socket. It returns why the daemon refused it.
func (e scripted) serve(t *testing.T, socket, id string, cached int, prompt []int32) (refused string) {
	t.Helper()
	var conn *net.UnixConn
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		var err error
		if conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"}); err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	defer conn.Close()
	const states, head = 2, 64
	rows := len(prompt) - cached
	fd, err := unix.MemfdCreate("ring", unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "ring")
	defer file.Close()
	ring := make([]byte, head)
	for pos := cached; pos < len(prompt); pos++ {
		for state := range states {
			ring = schemas.F32.AppendBytes(ring, e.row(pos, prompt[pos], state))
		}
	}
	if _, err := file.Write(ring); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK); err != nil {
		t.Fatal(err)
	}
	send := func(kind string, m map[string]any, fds ...int) {
		m["type"] = kind
		body, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		frame := append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), body...)
		if _, _, err := conn.WriteMsgUnix(frame, unix.UnixRights(fds...), nil); err != nil {
			t.Fatal(err)
		}
	}
	send("hello", map[string]any{
		"protocol": 1, "engine": "scripted", "engine_version": e.version, "dtype": "f32",
		"model": map[string]any{"label": "m", "fingerprint": e.weights, "layers": e.layers, "hidden": e.hidden, "vocab": e.vocab},
	})
	send("ring", map[string]any{"kind": "memfd", "offset": head, "slot_bytes": states * e.hidden * 4, "slots": rows}, fd)
	send("begin", map[string]any{"r": id, "prompt": prompt, "cached": cached})
	send("step", map[string]any{"n": 0, "rows": []any{map[string]any{"r": id, "pos": cached, "ids": prompt[cached:], "slot": 0}}})
	send("finish", map[string]any{"r": id, "reason": "stop", "ids": append(slices.Clone(prompt), 1), "rows": len(prompt)})
	send("bye", map[string]any{"counts": map[string]any{"begun": 1, "finished": 1, "steps": 1, "rows": rows}})
	in := bufio.NewReader(conn)
	for {
		var size [4]byte
		if _, err := io.ReadFull(in, size[:]); err != nil {
			t.Fatalf("waiting for the daemon's goodbye: %v", err)
		}
		body := make([]byte, binary.LittleEndian.Uint32(size[:]))
		if _, err := io.ReadFull(in, body); err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(body, []byte(`"type":"refuse"`)) {
			return string(body)
		}
		if bytes.Contains(body, []byte(`"type":"bye"`)) {
			return ""
		}
	}
}

// tapsInto runs taps that store into one dataset, each for one request.
type tapsInto struct {
	t          *testing.T
	ds, socket string
}

func newTaps(t *testing.T) tapsInto {
	t.Helper()
	dir, err := os.MkdirTemp("", "tap") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return tapsInto{t, filepath.Join(dir, "ds"), filepath.Join(dir, "s")}
}

// tap returns the tap's exit code, and why it refused the engine.
func (d tapsInto) tap(name string, e scripted, id string, cached int, prompt []int32, args ...string) (code int, refused string) {
	d.t.Helper()
	ended := make(chan int, 1)
	var stdout, stderr bytes.Buffer
	go func() {
		args := append([]string{"tap", "--socket", d.socket, "--once", "--out", d.ds, "--run", name}, args...)
		ended <- run(d.t.Context(), args, &stdout, &stderr)
	}()
	refused = e.serve(d.t, d.socket, id, cached, prompt)
	code = <-ended
	d.t.Logf("%s: exit %d, %s%s", name, code, stdout.String(), stderr.String())
	return code, refused
}

// storedIn reads a sequence of a run.
func storedIn(t *testing.T, ds, name, id string) data.StoredSequence {
	t.Helper()
	d, err := data.Open(ds)
	if err != nil {
		t.Fatal(err)
	}
	src, err := d.Replay(name, data.ReplayConfig{Want: func(seq string) bool { return seq == id }})
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	q, err := src.Sequence(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func TestATapCompletesPrefixesFromRowsThatEarlierTapsStored(t *testing.T) {
	taps, prompt := newTaps(t), make([]int32, 150)
	for i := range prompt {
		prompt[i] = int32(i*7) % 1000
	}
	first, second := small("w1", "1", 3), small("w1", "1", 5)
	if code, _ := taps.tap("r1", first, "a", 0, prompt, "--states", "1,4"); code != exitOK {
		t.Fatalf("exit %d", code)
	}
	for _, tt := range []struct {
		run, id string
		e       scripted
		args    []string
		lent    map[string]string // tags; nil for a refusal
	}{
		{"r1", "b", second, nil, map[string]string{"draftscope.prefix_rows": "140", "draftscope.prefix_from": "a"}},
		{"r2", "c", second, nil, map[string]string{"draftscope.prefix_rows": "140", "draftscope.prefix_from": "b", "draftscope.prefix_run": "r1"}},
		{"r3", "d", small("w2", "1", 5), nil, nil},
		{"r4", "e", small("", "1", 5), nil, nil},
		{"r5", "f", small("w1", "2", 5), nil, nil},
		{"r6", "g", second, []string{"--dtype", "bf16"}, nil},
		{"r7", "h", second, []string{"--states", "1,2"}, nil},
		{"r8", "i", second, []string{"--states-encoding", "int8"}, nil},
		{"r9", "j", second, []string{"--prefix-index", "0"}, nil},
		{"r10", "k", second, []string{"--prefix-memory", "0"}, nil},
	} {
		code, _ := taps.tap(tt.run, tt.e, tt.id, 140, prompt, append([]string{"--states", "1,4"}, tt.args...)...)
		if tt.lent == nil {
			d, err := data.Open(taps.ds)
			if err != nil {
				t.Fatal(err)
			}
			faults, err := d.Faults(tt.run)
			if err != nil || code != exitPartial || len(faults) != 1 || faults[0].Check != "K3" || !strings.Contains(faults[0].Detail, "the first 140 rows are missing") {
				t.Errorf("%s: exit %d, %+v, %v", tt.run, code, faults, err)
			}
			continue
		}
		if code != exitOK {
			t.Fatalf("%s: exit %d", tt.run, code)
		}
		q := storedIn(t, taps.ds, tt.run, tt.id)
		if !maps.Equal(q.Tags, tt.lent) {
			t.Errorf("%s: tags %v, want %v", tt.run, q.Tags, tt.lent)
		}
		for i, raw := range q.States {
			var values []float32
			for pos, id := range prompt {
				by := first
				if pos >= 140 {
					by = second
				}
				values = append(values, by.row(pos, id, i)...)
			}
			if !slices.Equal(schemas.F32.AppendFloats(nil, raw), values) {
				t.Errorf("%s: state number %d is not 140 rows of the first engine and 10 of the second", tt.run, i)
			}
		}
	}
}

// With a target the weights are known of engines that do not know them, and
// what tests an engine are rows of its own.
func TestATapWithATargetLendsToEnginesThatItHasTested(t *testing.T) {
	taps, dir := newTaps(t), t.TempDir()
	native, given := filepath.Join(dir, "native"), filepath.Join(dir, "given.jsonl")
	prompt := make([]int32, 600) // of which a probe looks at 512
	for i := range prompt {
		prompt[i] = int32(i*i+7) % 4096
	}
	line, err := json.Marshal(map[string]any{"id": "n", "input_ids": prompt, "prompt_len": 1})
	if err == nil {
		err = os.WriteFile(given, line, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if code := run(t.Context(), []string{"capture", "--states", "2,4", "--out", native, "--sequences", given}, &out, &out); code != exitOK {
		t.Fatalf("exit %d: %s", code, &out)
	}
	q := storedIn(t, native, "r1", "n")
	engine := func(state ...int) scripted {
		return scripted{"", "1", 8, 256, 4096, func(pos int, _ int32, i int) []float32 {
			return schemas.F32.AppendFloats(nil, q.States[state[i]][pos*256*4:(pos+1)*256*4])
		}}
	}
	honest, mistaken := engine(0, 1), engine(1, 0)
	args := []string{"--target", "demo", "--states", "2,4"}
	cached := len(prompt) - 20
	for i, id := range []string{"a", "b"} {
		if code, refused := taps.tap("r1", honest, id, i*cached, prompt, args...); code != exitOK {
			t.Fatalf("exit %d: %s", code, refused)
		}
		got := storedIn(t, taps.ds, "r1", id)
		for i := range got.States {
			if !bytes.Equal(got.States[i], q.States[i]) {
				t.Errorf("%s: state number %d is not the native one", id, i)
			}
		}
		if from := got.Tags["draftscope.prefix_from"]; from != []string{"", "a"}[i] {
			t.Errorf("%s is completed from %q", id, from)
		}
	}
	code, refused := taps.tap("r1", mistaken, "c", cached, prompt, args...)
	if code != exitUsage || !strings.Contains(refused, "state 2") {
		t.Errorf("exit %d: %s", code, refused)
	}
}
