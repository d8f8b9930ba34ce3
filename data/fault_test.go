package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/schemas"
)

// failingDisk fails one operation, counted over all, with err.
type failingDisk struct {
	disk
	at, n int
	err   error
	where string // the operation that failed
}

func (d *failingDisk) step(what string) error {
	d.n++
	if d.n == d.at {
		d.where = what
		return &fs.PathError{Op: what, Err: d.err}
	}
	return nil
}

func (d *failingDisk) Create(name string) (diskFile, error) {
	if err := d.step("create"); err != nil {
		return nil, err
	}
	f, err := d.disk.Create(name)
	return &failingFile{f, d}, err
}

func (d *failingDisk) Rename(from, to string) error {
	if err := d.step("rename"); err != nil {
		return err
	}
	return d.disk.Rename(from, to)
}

func (d *failingDisk) SyncDir(name string) error {
	if err := d.step("sync folder"); err != nil {
		return err
	}
	return d.disk.SyncDir(name)
}

type failingFile struct {
	diskFile
	d *failingDisk
}

func (f *failingFile) Write(b []byte) (int, error) {
	if err := f.d.step("write"); err != nil {
		n, _ := f.diskFile.Write(b[:len(b)/2]) // a full disk takes a part
		return n, err
	}
	return f.diskFile.Write(b)
}

func (f *failingFile) Sync() error {
	if err := f.d.step("sync"); err != nil {
		return err
	}
	return f.diskFile.Sync()
}

func TestAFullDiskAnywhereInACommitLosesNothing(t *testing.T) {
	run := testRun("r1", 16, schemas.BF16)
	for at := 1; ; at++ {
		mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
		dir := t.TempDir()
		d := mustCreate(t, dir)
		if err := d.AddRun(run); err != nil {
			t.Fatal(err)
		}
		s := mustSink(t, d)
		want := map[string]sample{}
		for i := range 2 {
			id := fmt.Sprintf("p%d", i)
			want[id] = newSample(run, id, 20)
			feed(t, s, id, uint64(i+1), want[id].records(t, mem, 8))
			if i == 0 {
				if err := s.Commit(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		bad := &failingDisk{disk: osDisk{}, at: at, err: syscall.ENOSPC}
		d.disk = bad
		err := s.Commit(t.Context())
		d.disk = osDisk{}
		if bad.where == "" { // every operation has had its turn
			if err != nil {
				t.Fatal(err)
			}
			if at < 15 {
				t.Errorf("a commit took only %d operations", at)
			}
			s.Close()
			mem.AssertSize(t, 0)
			return
		}
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "free space") {
			t.Fatalf("operation %d (%s): error %v, want one that names file and remedy", at, bad.where, err)
		}
		if n := leftovers(t, dir); n > 0 {
			t.Errorf("operation %d (%s): %d temporary files left", at, bad.where, n)
		}
		got, err := d.Stored("r1")
		if err != nil || len(got) != 1 {
			t.Errorf("operation %d (%s): stored %v (%v), want p0", at, bad.where, got, err)
		}
		compareReplay(t, d, "r1", map[string]sample{"p0": want["p0"]})
		// With space again, the same Commit succeeds.
		if err := s.Commit(t.Context()); err != nil {
			t.Fatalf("operation %d (%s): again: %v", at, bad.where, err)
		}
		compareReplay(t, d, "r1", want)
		s.Close()
		mem.AssertSize(t, 0)
		d.Close()
	}
}

func leftovers(t *testing.T, dir string) (n int) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if strings.HasSuffix(path, tmpSuffix) {
			n++
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestARepeatIsDroppedAndAnotherIsAFault(t *testing.T) {
	run := testRun("r1", 16, schemas.BF16)
	dir := t.TempDir()
	first := newSample(run, "p0", 12)
	second := newSample(run, "p0", 12)
	second.states[1][40] ^= 1
	d := mustCreate(t, dir)
	if err := d.AddRun(run); err != nil {
		t.Fatal(err)
	}
	for attempt, want := range []Counts{{Stored: 1, Repeats: 1, Conflicts: 1}, {Repeats: 2, Conflicts: 1}} {
		mem := checked(t)
		s := mustSink(t, d)
		feed(t, s, "p0", 1, first.records(t, mem, 5)) // first of all, uncommitted
		feed(t, s, "p0", 2, first.records(t, mem, 3)) // cut differently
		feed(t, s, "p0", 3, second.records(t, mem, 5))
		if err := s.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := s.Counts(); got != want {
			t.Errorf("attempt %d: counts %+v, want %+v", attempt, got, want)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		compareReplay(t, d, "r1", map[string]sample{"p0": first})
		faults, err := d.Faults("r1")
		if err != nil || len(faults) != 1 || faults[0].Check != "K15" || faults[0].SeqID != "p0" {
			t.Errorf("attempt %d: faults %+v (%v), want one K15", attempt, faults, err)
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		d = mustCreate(t, dir) // the second attempt knows only the files
	}
}

func TestAFaultyCaptureIsStoredAsItsFaultOnly(t *testing.T) {
	nan, inf := []byte{0xc0, 0x7f}, []byte{0x80, 0xff}
	run := testRun("r1", 8, schemas.BF16)
	put := func(s *sample, state, row, col int, v []byte) { copy(s.states[state][(row*8+col)*2:], v) }
	for name, tt := range map[string]struct {
		spoil         func(*sample)
		check, detail string
	}{
		"NaN in one row":         {func(s *sample) { put(s, 1, 2, 3, nan) }, "K1", "state 2, row 2: NaN count 1, Inf count 0 in 1 rows of this state"},
		"Inf late in the prompt": {func(s *sample) { put(s, 0, 300, 7, inf) }, "K1", "state 0, row 300: NaN count 0, Inf count 1 in 1 rows of this state"},
		"a row missing":          {func(s *sample) { s.sequence.Length++ }, "K3", "length 513 and 512 rows of states"},
		"positions that jump":    {func(s *sample) { s.tokens[7].Pos = 9 }, "K3", `row 7 is position 9 of "bad"`},
		"prompt past the end":    {func(s *sample) { s.sequence.PromptLen = 513 }, "K3", "prompt of 513 tokens in a sequence of 512"},
		"a temperature of NaN":   {func(s *sample) { s.sequence.Temperature = float32(math.NaN()) }, "K1", "temperature is not finite"},
	} {
		t.Run(name, func(t *testing.T) {
			mem := checked(t)
			d := mustCreate(t, t.TempDir(), run)
			s := mustSink(t, d)
			defer s.Close()
			good, bad := newSample(run, "good", 30), newSample(run, "bad", 512)
			tt.spoil(&bad)
			feed(t, s, "bad", 1, bad.records(t, mem, 100))
			feed(t, s, "good", 2, good.records(t, mem, 100))
			if err := s.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := s.Counts(); got != (Counts{Stored: 1, SetAside: 1}) {
				t.Errorf("counts %+v, want one stored and one set aside", got)
			}
			faults, err := d.Faults("r1")
			if err != nil || len(faults) != 1 || faults[0].SeqID != "bad" || faults[0].Check != tt.check || faults[0].Detail != tt.detail {
				t.Errorf("faults %+v (%v), want %s %q", faults, err, tt.check, tt.detail)
			}
			compareReplay(t, d, "r1", map[string]sample{"good": good})
		})
	}
}

func TestAFaultRecordOfTheStreamIsStoredOnce(t *testing.T) {
	mem := checked(t)
	run := testRun("r1", 8, schemas.F32)
	d := mustCreate(t, t.TempDir(), run)
	for range 2 {
		s := mustSink(t, d)
		recs := newSample(run, "p0", 9).records(t, mem, 4)
		recs = append(recs, schemas.Record(mem, schemas.Envelope{Table: schemas.TableFaults, Run: "r1"},
			[]schemas.Fault{{SeqID: "p0", Chunk: 3, Check: "K4", Detail: "ids differ at 1"}}))
		feed(t, s, "p0", 8, recs)
		if err := s.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.Close()
	}
	faults, err := d.Faults("r1")
	if err != nil || len(faults) != 1 || faults[0].Chunk != 3 {
		t.Errorf("faults %+v (%v), want the one of the stream", faults, err)
	}
	if got := partsOf(t, d, schemas.TableStates); len(got) > 0 {
		t.Errorf("states are stored: %v", got)
	}
}

func TestADroppedSequenceLeavesNothing(t *testing.T) {
	mem := checked(t)
	run := testRun("r1", 8, schemas.F32)
	d := mustCreate(t, t.TempDir(), run)
	s := mustSink(t, d)
	recs := newSample(run, "p0", 9).records(t, mem, 4)
	for i, rec := range recs {
		if i < 2 {
			if err := s.Write(t.Context(), "p0", rec); err != nil {
				t.Fatal(err)
			}
		}
		rec.Release()
	}
	s.Drop("p0")
	if err := s.End(t.Context(), "p0", 1); !errors.Is(err, ErrRecord) {
		t.Errorf("End after Drop: %v, want ErrRecord", err)
	}
	want := newSample(run, "p0", 9)
	feed(t, s, "p0", 2, want.records(t, mem, 9)) // sent again, from its start
	feed(t, s, "p1", 3, newSample(run, "p1", 5).records(t, mem, 9))
	if err := s.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	feed(t, s, "p2", 4, newSample(run, "p2", 5).records(t, mem, 9))
	if err := s.Close(); err != nil { // p2 was not committed
		t.Fatal(err)
	}
	got, err := d.Stored("r1")
	if err != nil || fmt.Sprint(sorted(got)) != "[p0 p1]" {
		t.Errorf("stored %v (%v), want p0 and p1", got, err)
	}
}

func TestNumbersThatStartAgainOverwriteNothing(t *testing.T) {
	mem := checked(t)
	run := testRun("r1", 8, schemas.F32)
	d := mustCreate(t, t.TempDir(), run)
	want := map[string]sample{}
	for i := range 3 {
		s, err := d.CaptureSink("r1", 0, SinkConfig{Stream: "STATES"})
		if err != nil {
			t.Fatal(err)
		}
		id := fmt.Sprintf("p%d", i)
		want[id] = newSample(run, id, 6)
		feed(t, s, id, 1, want[id].records(t, mem, 6)) // message 1 of a new stream
		if err := s.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.Close()
	}
	if got := partsOf(t, d, schemas.TableStates); len(got) != 3 {
		t.Errorf("files %v, want three", got)
	}
	compareReplay(t, d, "r1", want)
}

func TestACancelledCommitStoresNothing(t *testing.T) {
	mem := checked(t)
	run := testRun("r1", 8, schemas.F32)
	d := mustCreate(t, t.TempDir(), run)
	s := mustSink(t, d)
	defer s.Close()
	feed(t, s, "p0", 1, newSample(run, "p0", 6).records(t, mem, 6))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Commit(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Commit: %v, want context.Canceled", err)
	}
	if got := partsOf(t, d, "*"); len(got) > 0 {
		t.Errorf("files %v", got)
	}
}
