//go:build linux

package tap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/schemas"
)

// store is a dataset that daemons of a test store into, one after the other.
type store struct {
	t    *testing.T
	dir  string
	ds   *data.Dataset
	run  data.Run
	sink *data.CaptureSink
	n    uint64
}

// openStore opens a dataset as the daemon of a run does, whose engine says
// that it has these weights.
func openStore(t *testing.T, dir string, run data.Run) *store {
	t.Helper()
	s := &store{t: t, dir: dir, run: run}
	var err error
	if s.ds, err = data.Create(dir, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.ds.AddRun(run); err != nil {
		t.Fatal(err)
	}
	if s.sink, err = s.ds.CaptureSink(run.Name, 0, data.SinkConfig{}); err != nil {
		t.Fatal(err)
	}
	return s
}

func tapRun(name, weights string) data.Run {
	return data.Run{
		Name: name, Target: "m", States: []int{1, 3}, Layers: testLayers, Hidden: testHidden, FinalNorm: data.FinalPreNorm,
		DType: schemas.F32, Engine: "test", EngineVersion: "1", Fingerprints: data.Fingerprints{Weights: weights},
	}
}

// daemon begins a daemon that has an engine of the run's weights.
func (s *store) daemon(memory int64) (*daemon, *engine) {
	s.t.Helper()
	p, err := s.ds.Prefixes(s.run.Name, 1<<20, func(r data.Run) bool {
		return s.run.Fingerprints.Weights != "" && r.Fingerprints.Weights == s.run.Fingerprints.Weights
	})
	if err != nil {
		s.t.Fatal(err)
	}
	d := listen(s.t)
	e := d.dial()
	e.hello(s.run.Fingerprints.Weights)
	d.welcome(Config{Run: s.run.Name, States: s.run.States, DType: s.run.DType, PrefixMemory: memory, Stored: p})
	e.hear(typeWelcome)
	e.offerSlots(1024, int64(len(s.run.States))*testHidden*4, nil, true)
	e.hear(typeCredit)
	return d, e
}

// take stores the next n sequences, makes them durable, and returns what they
// are.
func (s *store) take(d *daemon, n int) map[string]*got {
	s.t.Helper()
	out := map[string]*got{}
	for range n {
		id, g, err := d.nextTo(func(seq string, rec arrow.Record) error { return s.sink.Write(s.t.Context(), seq, rec) })
		if err != nil {
			s.t.Fatal(err)
		}
		s.n++
		if err := s.sink.End(s.t.Context(), id, s.n); err != nil {
			s.t.Fatal(err)
		}
		out[id] = g
	}
	if err := s.sink.Commit(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	return out
}

// close ends a daemon and its dataset.
func (s *store) close(d *daemon, e *engine) {
	s.t.Helper()
	e.bye()
	e.hear(typeBye)
	if id, _, err := d.next(); !errors.Is(err, io.EOF) {
		s.t.Fatalf("%s, %v behind the last", id, err)
	}
	if err := errors.Join(d.src.Close(), d.l.Close(), s.sink.Close(), s.ds.Close()); err != nil {
		s.t.Fatal(err)
	}
}

// serves sends a request that finishes, of whose prompt the engine has so many
// rows in its cache.
func (e *engine) serves(r string, cached int, prompt ...int32) {
	if cached == 0 {
		e.begin(r, prompt...)
	} else {
		e.beginCached(r, cached, prompt...)
	}
	e.step(e.rows(r, cached, prompt[cached:]...))
	e.finish(r, len(prompt), append(slices.Clone(prompt), 1)...)
}

func (g *got) refused(t *testing.T, rows int) {
	t.Helper()
	if want := fmt.Sprintf("the first %d rows are missing", rows); g.fault == nil || g.fault.Check != checkRows || !strings.Contains(g.fault.Detail, want) {
		t.Errorf("%+v, %v; want %s", g.fault, g.row, want)
	}
}

// refill stores one sequence with a daemon that ends.
func refill(t *testing.T, dir string, run data.Run, ids []int32) {
	t.Helper()
	s := openStore(t, dir, run)
	d, e := s.daemon(someMemory)
	e.serves("a", 0, ids...)
	s.take(d, 1)["a"].check(t, len(ids), ids...)
	s.close(d, e)
}

func TestADaemonThatComesLaterCompletesFromWhatIsStored(t *testing.T) {
	for _, n := range []int{1, blockRows - 1, blockRows, blockRows + 1, 3*blockRows - 1} {
		for _, name := range []string{"r1", "r2"} {
			t.Run(fmt.Sprint(n, " in ", name), func(t *testing.T) {
				dir, prompt := t.TempDir(), upTo(n)
				refill(t, dir, tapRun("r1", "w1"), append(slices.Clone(prompt), 91, 92))
				s := openStore(t, dir, tapRun(name, "w1"))
				d, e := s.daemon(someMemory)
				e.serves("b", n, append(slices.Clone(prompt), 93, 94)...)
				e.serves("c", n, append(slices.Clone(prompt), 95)...)         // while b's rows are read, perhaps
				e.serves("d", n+1, append(slices.Clone(prompt), 93, 94)...)   // of b, whose rows are part stored and part its own
				e.serves("e", n, append(slices.Clone(prompt), 93, 94, 95)...) // and once more
				got := s.take(d, 4)
				got["b"].check(t, n+2, append(slices.Clone(prompt), 93, 94)...)
				got["c"].check(t, n+1, append(slices.Clone(prompt), 95)...)
				got["d"].check(t, n+2, append(slices.Clone(prompt), 93, 94)...)
				got["e"].check(t, n+3, append(slices.Clone(prompt), 93, 94, 95)...)
				want := map[string]string{TagPrefixRows: strconv.Itoa(n), TagPrefixFrom: "a"}
				if name != "r1" {
					want[TagPrefixRun] = "r1"
				}
				if !maps.Equal(got["b"].row.Tags, want) {
					t.Errorf("tags %v, want %v", got["b"].row.Tags, want)
				}
				got["d"].completed(t, n+1, "b")
				if st := d.src.Status(); st.Completed != 4 || st.CompletedRows != int64(4*n+1) || st.Memory != 0 || st.sent() != e.count.sent() {
					t.Errorf("%+v, the engine counts %+v", st, e.count)
				}
				s.close(d, e)
			})
		}
	}
}

func TestRowsThatMemoryHasLostAreReadFromTheDataset(t *testing.T) {
	for _, weights := range []string{"w1", ""} { // known, or known of the connection alone
		s := openStore(t, t.TempDir(), tapRun("r1", weights))
		d, e := s.daemon(2 * blockSize)
		prompt, other := upTo(70), slices.Repeat([]int32{9}, 70)
		e.serves("a", 0, prompt...)
		e.serves("x", 0, other...) // takes the memory of a's rows
		s.take(d, 2)
		e.serves("b", 69, prompt...)
		got := s.take(d, 1)["b"]
		got.check(t, 70, prompt...)
		got.completed(t, 69, "a")
		// An engine that comes later has none of it unless its weights are known.
		if weights == "" {
			again := d.another("", 1024)
			again.serves("c", 69, prompt...)
			s.take(d, 1)["c"].refused(t, 69)
			again.bye()
			again.hear(typeBye)
		}
		s.close(d, e)
	}
}

func TestStoredRowsThatMayDifferAreNotLent(t *testing.T) {
	prompt := upTo(70)
	for name, change := range map[string]func(*data.Run){
		"other weights":   func(r *data.Run) { r.Fingerprints.Weights = "w2" },
		"unknown weights": func(r *data.Run) { r.Fingerprints.Weights = "" },
		"another dtype":   func(r *data.Run) { r.DType = schemas.BF16 },
		"other states":    func(r *data.Run) { r.States = []int{1, 2, 3} },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			refill(t, dir, tapRun("r1", "w1"), prompt)
			run := tapRun("r2", "w1")
			change(&run)
			s := openStore(t, dir, run)
			d, e := s.daemon(someMemory)
			e.beginCached("b", 66, prompt...)
			e.step(e.rowsOf(run.States, "b", 66, prompt[66:]...))
			e.finish("b", 70, append(slices.Clone(prompt), 1)...)
			s.take(d, 1)["b"].refused(t, 66)
			if st := d.src.Status(); st.Memory != 0 {
				t.Errorf("%d bytes are still counted", st.Memory)
			}
			s.close(d, e)
		})
	}
	t.Run("unknown weights, and a daemon that comes later", func(t *testing.T) {
		dir := t.TempDir()
		refill(t, dir, tapRun("r1", ""), prompt)
		s := openStore(t, dir, tapRun("r1", ""))
		d, e := s.daemon(someMemory)
		e.serves("b", 66, prompt...)
		s.take(d, 1)["b"].refused(t, 66)
		s.close(d, e)
	})
}

// slow finds rows when it is told to.
type slow struct {
	states  [][]byte
	release chan error
}

func (s slow) Prefix(ctx context.Context, ids []int32, _ func(run, seq string) bool) (run, seq string, states [][]byte, err error) {
	select {
	case <-ctx.Done():
		return "", "", nil, ctx.Err()
	case err := <-s.release:
		return "old", "a", s.states, err
	}
}

func TestNothingWaitsForStoredRowsButTheirRequest(t *testing.T) {
	prompt := upTo(70)
	at := slow{release: make(chan error)}
	for _, state := range []int{1, 3} {
		var vals []float32
		for _, id := range prompt {
			for j := range testHidden {
				vals = append(vals, valueOf(id, state, j))
			}
		}
		at.states = append(at.states, schemas.F32.AppendBytes(nil, vals))
	}
	d := listen(t)
	e := d.dial()
	e.hello("w1")
	d.welcome(Config{PrefixMemory: someMemory, Stored: at})
	e.welcomed(16)
	// More steps than the ring holds, while b's rows are being read: the first
	// takes rows back that are not there yet.
	e.beginCached("b", 70, append(slices.Clone(prompt), 2)...)
	e.step(e.rows("b", 70, 2))
	e.step(e.rows("b", 66, append(slices.Clone(prompt[66:]), 2)...))
	e.beginCached("c", 70, append(slices.Clone(prompt), 3)...) // of b's, of which 66 are not there
	e.step(e.rows("c", 70, 3))
	for p := range 50 {
		e.step(e.rows("c", 71+p, 4))
		if p%8 == 0 {
			for e.hear(typeCredit)["freed"].(float64) < float64(p) {
			}
		}
	}
	e.finish("b", 71, append(slices.Clone(prompt), 2, 1)...)
	e.finish("c", 121, slices.Concat(prompt, []int32{3}, slices.Repeat([]int32{4}, 50), []int32{1})...)
	e.serves("plain", 0, 7, 8) // is published before them
	if id, g, err := d.next(); err != nil || id != "plain" {
		t.Fatal(id, err)
	} else {
		g.check(t, 2, 7, 8)
	}
	at.release <- nil
	got := d.drain(2)
	got["b"].check(t, 71, append(slices.Clone(prompt), 2)...)
	got["c"].check(t, 71, slices.Concat(prompt, []int32{3}, slices.Repeat([]int32{4}, 50))...)
	if want := map[string]string{TagPrefixRows: "66", TagPrefixFrom: "a", TagPrefixRun: "old"}; !maps.Equal(got["b"].row.Tags, want) {
		t.Errorf("tags %v, want %v", got["b"].row.Tags, want)
	}
	got["c"].completed(t, 70, "b")
	// A dataset that cannot be read is a reason, and ends nothing.
	e.serves("x", 2, 50, 51, 52)
	at.release <- errors.New("a broken disk")
	_, g, err := d.next()
	if err != nil || g.fault == nil || !strings.Contains(g.fault.Detail, "a broken disk") {
		t.Errorf("%+v, %v", g.fault, err)
	}
	// A daemon that ends does not wait either.
	e.serves("y", 2, 60, 61, 62)
}
