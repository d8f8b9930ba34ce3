//go:build linux

package tap

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"maps"
	"math"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/schemas"
	"golang.org/x/sys/unix"
)

const (
	testHidden = 4
	testLayers = 6
)

var testHello = map[string]any{
	"type": typeHello, "protocol": Protocol, "engine": "test", "engine_version": "1", "pid": 1, "dtype": "f32",
	"model": map[string]any{"label": "m", "layers": testLayers, "hidden": testHidden, "vocab": 100},
}

// daemon is a source that waits for engines at a socket.
type daemon struct {
	t    testing.TB
	path string
	l    *Listener
	src  *Source
}

// listen opens a socket; the daemon's source begins with the first engine.
func listen(t *testing.T) *daemon {
	t.Helper()
	dir, err := os.MkdirTemp("", "tap") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	d := &daemon{t: t, path: filepath.Join(dir, "s")}
	if d.l, err = Listen(d.path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.l.Close() })
	return d
}

// welcome begins the source with the engine that is connecting.
func (d *daemon) welcome(cfg Config) {
	d.t.Helper()
	first, err := d.l.Accept(d.t.Context(), func(err error) { d.t.Error(err) })
	if err != nil {
		d.t.Fatal(err)
	}
	if cfg.Run == "" {
		cfg.Run = "r1"
	}
	if cfg.States == nil {
		cfg.States = []int{1, 3}
	}
	cfg.Once = true
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	d.t.Cleanup(func() { mem.AssertSize(d.t, 0) })
	cfg.Allocator = mem
	if d.src, err = NewSource(d.l, first, cfg); err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { d.src.Close() })
}

// got is a sequence as Next gave it out.
type got struct {
	tokens []schemas.Token
	states [][]float32
	row    *schemas.Sequence
	fault  *schemas.Fault
}

// next reads one sequence; nil at the end.
func (d *daemon) next() (id string, g *got, err error) {
	d.t.Helper()
	return d.nextTo(func(string, arrow.Record) error { return nil })
}

// nextTo reads one sequence, of which every record is given to a sink.
func (d *daemon) nextTo(write func(seq string, rec arrow.Record) error) (id string, g *got, err error) {
	d.t.Helper()
	g = &got{}
	for {
		seq, rec, last, err := d.src.Next(d.t.Context())
		if err != nil {
			return "", nil, err
		}
		if id != "" && seq != id {
			d.t.Fatalf("%s in the middle of %s", seq, id)
		}
		id = seq
		if err := write(seq, rec); err != nil {
			d.t.Fatal(err)
		}
		env, err := schemas.EnvelopeOf(rec)
		if err != nil {
			d.t.Fatal(err)
		}
		switch env.Table {
		case schemas.TableCapture:
			c, err := schemas.ReadCapture(rec)
			if err != nil {
				d.t.Fatal(err)
			}
			g.tokens = append(g.tokens, c.Tokens...)
			for i, raw := range c.States {
				if len(g.states) <= i {
					g.states = append(g.states, nil)
				}
				g.states[i] = c.Spec.DType.AppendFloats(g.states[i], raw)
			}
		case schemas.TableSequences:
			rows, err := schemas.Rows[schemas.Sequence](rec)
			if err != nil {
				d.t.Fatal(err)
			}
			g.row = &rows[0]
		case schemas.TableFaults:
			rows, err := schemas.Rows[schemas.Fault](rec)
			if err != nil {
				d.t.Fatal(err)
			}
			g.fault = &rows[0]
		}
		rec.Release()
		if last {
			return id, g, nil
		}
	}
}

// engine is the other side, which writes what a test tells it to.
type engine struct {
	t     testing.TB
	conn  *net.UnixConn
	in    *bufio.Reader
	ring  []byte
	slots int64
	slot  uint64
	steps int64
	count Counts
}

func (d *daemon) dial() *engine {
	d.t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: d.path, Net: "unix"})
	if err != nil {
		d.t.Fatal(err)
	}
	e := &engine{t: d.t, conn: conn, in: bufio.NewReader(conn)}
	d.t.Cleanup(func() { conn.Close() })
	return e
}

func (e *engine) send(m any) {
	e.t.Helper()
	data, err := frame(m)
	if err != nil {
		e.t.Fatal(err)
	}
	if _, err := e.conn.Write(data); err != nil {
		e.t.Fatal(err)
	}
}

// hear reads until a message of the kind comes.
func (e *engine) hear(kind string) map[string]any {
	e.t.Helper()
	_ = e.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	var buf []byte
	for {
		k, body, grown, err := readFrame(e.in, buf)
		if err != nil {
			e.t.Fatalf("waiting for %s: %v", kind, err)
		}
		buf = grown
		if k != kind {
			continue
		}
		var m map[string]any
		if err := json.Unmarshal(body, &m); err != nil {
			e.t.Fatal(err)
		}
		return m
	}
}

// offer sends a ring of so many slots of two states.
func (e *engine) offer(slots int64, ad map[string]any, seal bool) {
	e.t.Helper()
	e.offerSlots(slots, 2*testHidden*4, ad, seal)
}

func (e *engine) offerSlots(slots, slotBytes int64, ad map[string]any, seal bool) {
	e.t.Helper()
	fd, err := unix.MemfdCreate("ring", unix.MFD_ALLOW_SEALING)
	if err != nil {
		e.t.Fatal(err)
	}
	defer unix.Close(fd)
	size := 64 + slots*slotBytes
	if err := unix.Ftruncate(fd, size); err != nil {
		e.t.Fatal(err)
	}
	if seal {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK); err != nil {
			e.t.Fatal(err)
		}
	}
	if e.ring, err = unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { _ = unix.Munmap(e.ring) })
	e.slots = slots
	m := map[string]any{"type": typeRing, "kind": kindMemfd, "offset": 64, "slot_bytes": slotBytes, "slots": slots}
	maps.Copy(m, ad)
	data, err := frame(m)
	if err != nil {
		e.t.Fatal(err)
	}
	if _, _, err := e.conn.WriteMsgUnix(data, unix.UnixRights(fd), nil); err != nil {
		e.t.Fatal(err)
	}
}

// ready says hello, is welcomed, and offers a ring.
func (d *daemon) ready(cfg Config, slots int64) *engine {
	d.t.Helper()
	e := d.dial()
	e.send(testHello)
	d.welcome(cfg)
	e.welcomed(slots)
	return e
}

// another is one more engine, whose weights have this fingerprint.
func (d *daemon) another(fingerprint string, slots int64) *engine {
	d.t.Helper()
	e := d.dial()
	e.hello(fingerprint)
	e.welcomed(slots)
	return e
}

// hello says that the engine's weights have this fingerprint.
func (e *engine) hello(fingerprint string) {
	e.t.Helper()
	hello, model := maps.Clone(testHello), maps.Clone(testHello["model"].(map[string]any))
	model["fingerprint"] = fingerprint
	hello["model"] = model
	e.send(hello)
}

func (e *engine) welcomed(slots int64) {
	e.t.Helper()
	e.hear(typeWelcome)
	e.offer(slots, nil, true)
	e.hear(typeCredit)
}

func (e *engine) begin(r string, prompt ...int32) {
	e.count.Begun++
	e.send(map[string]any{"type": typeBegin, "r": r, "prompt": prompt})
}

// beginCached says that a prefix cache has the first rows.
func (e *engine) beginCached(r string, cached int, prompt ...int32) {
	e.count.Begun++
	e.send(map[string]any{"type": typeBegin, "r": r, "prompt": prompt, "cached": cached})
}

// valueOf is what an honest engine has in a state of a token.
func valueOf(id int32, state, j int) float32 { return float32(id) + float32(state)/8 + float32(j)/64 }

// rows is an entry whose rows stand in the ring.
func (e *engine) rows(r string, pos int, ids ...int32) map[string]any {
	return e.rowsOf([]int{1, 3}, r, pos, ids...)
}

func (e *engine) rowsOf(states []int, r string, pos int, ids ...int32) map[string]any {
	first := e.slot
	for _, id := range ids {
		lo := 64 + int64(e.slot%uint64(e.slots))*int64(len(states))*testHidden*4
		for i, state := range states {
			for j := range testHidden {
				at := lo + int64(i*testHidden+j)*4
				binary.LittleEndian.PutUint32(e.ring[at:], math.Float32bits(valueOf(id, state, j)))
			}
		}
		e.slot++
	}
	e.count.Rows += int64(len(ids))
	return map[string]any{"r": r, "pos": pos, "ids": ids, "slot": first}
}

func (e *engine) step(rows ...map[string]any) {
	e.send(map[string]any{"type": typeStep, "n": e.steps, "rows": rows})
	e.steps++
	e.count.Steps++
}

func (e *engine) finish(r string, rows int, ids ...int32) {
	e.count.Finished++
	e.send(map[string]any{"type": typeFinish, "r": r, "reason": "stop", "rows": rows, "ids": ids})
}

func (e *engine) abort(r string) {
	e.count.Aborted++
	e.send(map[string]any{"type": typeAbort, "r": r, "reason": "the client hung up"})
}

func (e *engine) bye() { e.send(map[string]any{"type": typeBye, "counts": e.count}) }

// check compares a sequence with what an honest engine fed.
func (g *got) check(t *testing.T, prompt int, ids ...int32) {
	t.Helper()
	if g.fault != nil {
		t.Fatalf("a fault: %+v", *g.fault)
	}
	if g.row == nil || int(g.row.Length) != len(ids) || int(g.row.PromptLen) != prompt || len(g.tokens) != len(ids) {
		t.Fatalf("%d tokens and the row %+v; want %d tokens, %d of the prompt", len(g.tokens), g.row, len(ids), prompt)
	}
	for p, id := range ids {
		if tok := g.tokens[p]; tok.TokenID != id || int(tok.Pos) != p || tok.LossMask != (p >= prompt) {
			t.Errorf("token %d is %+v, want id %d", p, tok, id)
		}
		for i, state := range []int{1, 3} {
			for j := range testHidden {
				if got, want := g.states[i][p*testHidden+j], valueOf(id, state, j); got != want {
					t.Fatalf("state %d of row %d, value %d is %v, want %v", state, p, j, got, want)
				}
			}
		}
	}
}
