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

// scripted is an engine without a model: hidden 2, four layers, f32. What it
// has in a row says which engine computed it.
type scripted struct {
	weights, version string
	value            float32
}

// row is what it has in the state of this number, of a token.
func (e scripted) row(id int32, state int) []float32 {
	return []float32{float32(id) + float32(state)/4, e.value}
}

// serve sends one request, of whose prompt it has so many rows in its cache,
// to the daemon at a socket.
func (e scripted) serve(t *testing.T, socket, id string, cached int, prompt []int32) {
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
	const states, hidden, head = 2, 2, 64
	rows := len(prompt) - cached
	fd, err := unix.MemfdCreate("ring", unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "ring")
	defer file.Close()
	ring := make([]byte, head)
	for _, id := range prompt[cached:] {
		for state := range states {
			ring = schemas.F32.AppendBytes(ring, e.row(id, state))
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
		"model": map[string]any{"label": "m", "fingerprint": e.weights, "layers": 4, "hidden": hidden, "vocab": 1000},
	})
	send("ring", map[string]any{"kind": "memfd", "offset": head, "slot_bytes": states * hidden * 4, "slots": rows}, fd)
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
			t.Fatalf("refused: %s", body)
		}
		if bytes.Contains(body, []byte(`"type":"bye"`)) {
			return
		}
	}
}

func TestATapCompletesPrefixesFromRowsThatEarlierTapsStored(t *testing.T) {
	dir, err := os.MkdirTemp("", "tap") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	ds, prompt := filepath.Join(dir, "ds"), make([]int32, 150)
	for i := range prompt {
		prompt[i] = int32(i*7) % 1000
	}
	tap := func(name string, e scripted, id string, cached int, args ...string) int {
		t.Helper()
		socket := filepath.Join(dir, "s")
		ended := make(chan int, 1)
		var stdout, stderr bytes.Buffer
		go func() {
			ended <- run(t.Context(), append([]string{"tap", "--socket", socket, "--states", "1,4", "--once", "--out", ds, "--run", name}, args...), &stdout, &stderr)
		}()
		e.serve(t, socket, id, cached, prompt)
		code := <-ended
		t.Logf("%s: exit %d, %s%s", name, code, stdout.String(), stderr.String())
		return code
	}
	first := scripted{"w1", "1", 3}
	if code := tap("r1", first, "a", 0); code != exitOK {
		t.Fatalf("exit %d", code)
	}
	second := first
	second.value = 5
	for _, tt := range []struct {
		run  string
		id   string
		e    scripted
		args []string
		lent bool
	}{
		{"r1", "b", second, nil, true},
		{"r2", "c", second, nil, true},
		{"r3", "d", scripted{"w2", "1", 5}, nil, false},
		{"r4", "e", scripted{"", "1", 5}, nil, false},
		{"r5", "f", scripted{"w1", "2", 5}, nil, false},
		{"r6", "g", second, []string{"--dtype", "bf16"}, false},
		{"r7", "h", second, []string{"--states", "1,2"}, false},
		{"r8", "i", second, []string{"--states-encoding", "int8"}, false},
		{"r9", "j", second, []string{"--prefix-index", "0"}, false},
		{"r10", "k", second, []string{"--prefix-memory", "0"}, false},
	} {
		code := tap(tt.run, tt.e, tt.id, 140, tt.args...)
		d, err := data.Open(ds)
		if err != nil {
			t.Fatal(err)
		}
		if !tt.lent {
			faults, err := d.Faults(tt.run)
			if err != nil || code != exitPartial || len(faults) != 1 || faults[0].Check != "K3" || !strings.Contains(faults[0].Detail, "the first 140 rows are missing") {
				t.Errorf("%s: exit %d, %+v, %v", tt.run, code, faults, err)
			}
			continue
		}
		src, err := d.Replay(tt.run, data.ReplayConfig{Want: func(seq string) bool { return seq == tt.id }})
		if err != nil {
			t.Fatal(err)
		}
		q, err := src.Sequence(t.Context())
		if err != nil || code != exitOK {
			t.Fatalf("%s: exit %d, %v", tt.run, code, err)
		}
		want := map[string]string{"draftscope.prefix_rows": "140", "draftscope.prefix_from": "a"}
		if tt.run != "r1" {
			want["draftscope.prefix_from"], want["draftscope.prefix_run"] = "b", "r1" // which was stored after a
		}
		if !maps.Equal(q.Tags, want) {
			t.Errorf("%s: tags %v, want %v", tt.run, q.Tags, want)
		}
		for i, raw := range q.States {
			var values []float32
			for pos, id := range prompt {
				by := first
				if pos >= 140 {
					by = second
				}
				values = append(values, by.row(id, i)...)
			}
			if !slices.Equal(schemas.F32.AppendFloats(nil, raw), values) {
				t.Errorf("%s: state number %d is not 140 rows of the first engine and 10 of the second", tt.run, i)
			}
		}
		if err := src.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
