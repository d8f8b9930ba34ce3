package data

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/data/statefile"
	"github.com/draftscope/draftscope/data/statefile/statefiletest"
	"github.com/draftscope/draftscope/schemas"
)

// manyParts commits n sequences of the shard one by one, from stream number
// from on.
func manyParts(t testing.TB, d *Dataset, run Run, shard, from, n int, cfg SinkConfig, want map[string]sample) {
	t.Helper()
	s, err := d.CaptureSink(run.Name, shard, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i := range n {
		id := fmt.Sprintf("p%04d", 9999-from-i) // against the stream's order
		want[id] = newSample(run, id, 5+7*i%30)
		feed(t, s, id, uint64(from+i), want[id].records(t, memory.NewGoAllocator(), 8))
		if err := s.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestACompactedRunHoldsWhatItHeld(t *testing.T) {
	for _, dtype := range []schemas.DType{schemas.BF16, schemas.F32} {
		t.Run(string(dtype), func(t *testing.T) {
			run := testRun("r1", 96, dtype)
			d := mustCreate(t, t.TempDir(), run)
			want := map[string]sample{}
			cfg := SinkConfig{RowGroupBytes: 4 * 96 * 10, Stream: "s", StreamCreated: time.Unix(1e9, 5)}
			manyParts(t, d, run, 0, 1, 6, cfg, want)
			manyParts(t, d, run, 3, 101, 2, cfg, want)
			cfg.StreamCreated = time.Unix(2e9, 0)
			manyParts(t, d, run, 0, 11, 1, cfg, want) // of another stream: stays alone
			before, err := d.Stored("r1")
			if err != nil {
				t.Fatal(err)
			}
			done, err := d.Compact(t.Context(), "r1", CompactConfig{})
			if err != nil || done.Groups != 8 || done.Into != 2 {
				t.Fatalf("%+v, %v; want 8 groups in 2", done, err)
			}
			var names []string
			for _, p := range partsOf(t, d, "states") {
				names = append(names, strings.TrimPrefix(p, filepath.Join(d.Dir(), "states", "run=r1")+"/"))
			}
			if want := []string{
				"shard=00/part-000000000001-000000000006.parquet", "shard=00/part-000000000011-000000000011.parquet",
				"shard=03/part-000000000101-000000000102.parquet",
			}; !slices.Equal(names, want) {
				t.Errorf("files %q, want %q", names, want)
			}
			for _, table := range []string{"states", "tokens", "sequences"} {
				if n := len(partsOf(t, d, table)); n != 3 {
					t.Errorf("%d files of %s, want 3", n, table)
				}
			}
			if exists(filepath.Join(d.Dir(), journalName)) {
				t.Error("the journal is still there")
			}
			compareReplay(t, d, "r1", want)
			d.indexes = map[string]*index{} // read the footers again
			if after, err := d.Stored("r1"); err != nil || !mapsEqual(before, after) {
				t.Errorf("stored %v (%v), before %v", after, err, before)
			}
			// A repeat is still known as one, and a second compaction has nothing to do.
			s, err := d.CaptureSink("r1", 0, cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			feed(t, s, "p9998", 77, want["p9998"].records(t, memory.NewGoAllocator(), 3))
			if got := s.Counts(); got != (Counts{Repeats: 1}) {
				t.Errorf("%+v, want one repeat", got)
			}
			if done, err := d.Compact(t.Context(), "r1", CompactConfig{}); err != nil || done != (Compaction{}) {
				t.Errorf("again: %+v, %v; want nothing to do", done, err)
			}
		})
	}
}

func mapsEqual(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if b[k] != v {
			return false
		}
	}
	return true
}

func TestCompactionStopsAtTheTarget(t *testing.T) {
	run := testRun("r1", 96, schemas.BF16)
	d := mustCreate(t, t.TempDir(), run)
	want := map[string]sample{}
	manyParts(t, d, run, 0, 1, 9, SinkConfig{}, want)
	var size int64
	for _, p := range partsOf(t, d, "states") {
		info, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		size += info.Size()
	}
	if _, err := d.Compact(t.Context(), "r1", CompactConfig{TargetBytes: size / 3}); err != nil {
		t.Fatal(err)
	}
	parts := partsOf(t, d, "states")
	if len(parts) < 3 || len(parts) > 6 {
		t.Errorf("%d files, want about 4", len(parts))
	}
	for _, p := range parts {
		if info, err := os.Stat(p); err != nil || info.Size() > size/3 {
			t.Errorf("%s has %d bytes (%v), want at most %d", p, info.Size(), err, size/3)
		}
	}
	compareReplay(t, d, "r1", want)
	if _, err := d.Compact(t.Context(), "r1", CompactConfig{TargetBytes: -1}); err == nil {
		t.Error("a negative target is accepted")
	}
}

// Every operation of a compaction fails once, as on a full disk, and as when
// the program dies there. Afterwards all is there, once.
func TestACompactionThatFailsAnywhereLosesAndDoublesNothing(t *testing.T) {
	run := testRun("r1", 16, schemas.BF16)
	made, want := t.TempDir(), map[string]sample{}
	d := mustCreate(t, made)
	if err := d.AddRun(run); err != nil {
		t.Fatal(err)
	}
	manyParts(t, d, run, 0, 1, 2, SinkConfig{}, want)
	d.Close()
	for _, dies := range []bool{false, true} {
		for at := 1; ; at++ {
			dir := filepath.Join(t.TempDir(), "copy")
			if err := os.CopyFS(dir, os.DirFS(made)); err != nil {
				t.Fatal(err)
			}
			d := mustCreate(t, dir)
			bad := &failingDisk{disk: osDisk{}, at: at, err: syscall.ENOSPC}
			d.disk = bad
			if dies {
				d.disk = &deadDisk{failingDisk: bad}
			}
			_, err := d.Compact(t.Context(), "r1", CompactConfig{})
			d.disk = osDisk{}
			if bad.where == "" {
				if err != nil || at < 20 {
					t.Fatalf("%d operations, %v", at, err)
				}
				break
			}
			if !errors.Is(err, syscall.ENOSPC) {
				t.Fatalf("operation %d (%s): %v, want ENOSPC", at, bad.where, err)
			}
			where := fmt.Sprintf("operation %d (%s), dies: %t", at, bad.where, dies)
			// A reader sees all of it, once, at this moment.
			r, err := Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			compareReplay(t, r, "r1", want)
			if dies { // and so does the next writer
				d.Close()
				d = mustCreate(t, dir)
			}
			compareReplay(t, d, "r1", want)
			if _, err := d.Compact(t.Context(), "r1", CompactConfig{}); err != nil {
				t.Fatalf("%s: again: %v", where, err)
			}
			compareReplay(t, d, "r1", want)
			if n := len(partsOf(t, d, "states")); n != 1 || leftovers(t, dir) > 0 || exists(filepath.Join(dir, journalName)) {
				t.Errorf("%s: %d files of states and %d leftovers", where, n, leftovers(t, dir))
			}
			d.Close()
		}
	}
}

// deadDisk does nothing after the first failure: the program has died.
type deadDisk struct{ *failingDisk }

func (d *deadDisk) Remove(name string) error {
	if d.where != "" {
		return syscall.ENOSPC
	}
	if err := d.step("remove"); err != nil {
		return err
	}
	return d.failingDisk.Remove(name)
}

func (d *deadDisk) Rename(from, to string) error {
	if d.where != "" {
		return syscall.ENOSPC
	}
	return d.failingDisk.Rename(from, to)
}

func TestADamagedPartIsNotCompacted(t *testing.T) {
	run := testRun("r1", 96, schemas.BF16)
	d := mustCreate(t, t.TempDir(), run)
	manyParts(t, d, run, 0, 1, 3, SinkConfig{}, map[string]sample{})
	parts := partsOf(t, d, "states")
	spoilFile(t, parts[1], func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
	if _, err := d.Compact(t.Context(), "r1", CompactConfig{}); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), parts[1]) {
		t.Errorf("%v, want ErrDamaged that names %s", err, parts[1])
	}
	if got := partsOf(t, d, "states"); !slices.Equal(got, parts) || leftovers(t, d.Dir()) > 0 {
		t.Errorf("files %q, want %q", got, parts)
	}
}

func TestAJournalOfOtherSequencesRemovesNothing(t *testing.T) {
	dir := t.TempDir()
	d := mustCreate(t, dir)
	run := testRun("r1", 16, schemas.BF16)
	if err := d.AddRun(run); err != nil {
		t.Fatal(err)
	}
	manyParts(t, d, run, 0, 1, 2, SinkConfig{}, map[string]sample{})
	var names []string
	for _, p := range partsOf(t, d, "sequences") {
		names = append(names, filepath.Base(p))
	}
	d.Close()
	for name, content := range map[string]string{"lies": mustJSON(t, journal{"r1", names[0], names[1:]}), "is no journal": `{"run": "../..", "new": "x", "old": ["y"]}`, "is cut": "{"} {
		if err := os.WriteFile(filepath.Join(dir, journalName), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Create(dir, nil); err == nil {
			t.Errorf("a journal that %s is followed", name)
		}
		if inv, err := Take(t.Context(), dir); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "elsewhere") {
			t.Errorf("a reader of a journal that %s: %d files, %v", name, len(inv.Files["sequences"]), err)
		}
		if got := partsOf(t, d, "sequences"); len(got) != 2 {
			t.Errorf("a journal that %s: %d files left", name, len(got))
		}
	}
}

func mustJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func BenchmarkCompact(b *testing.B) {
	const hidden, tokens, parts = 5120, 256, 8
	dir := b.TempDir()
	var files [][]byte
	var size int
	for i := range parts {
		var out bytes.Buffer
		w, err := statefile.NewWriter(&out, statefile.Config{DType: schemas.BF16, Hidden: hidden})
		if err != nil {
			b.Fatal(err)
		}
		raw := statefiletest.Residual(uint64(i), 1, tokens, hidden, schemas.BF16)[0]
		if err := errors.Join(w.Write(statefile.Rows{SeqID: "p", Norms: make([]float32, tokens), Raw: raw}), w.Close()); err != nil {
			b.Fatal(err)
		}
		files, size = append(files, out.Bytes()), size+out.Len()
		if err := os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), out.Bytes(), 0o600); err != nil {
			b.Fatal(err)
		}
	}
	runtime.GC()
	b.SetBytes(int64(size))
	for b.Loop() {
		var out bytes.Buffer
		out.Grow(size + 1<<20)
		w := statefile.NewSplicer(&out)
		for i := range files {
			o, err := openPart(filepath.Join(dir, strconv.Itoa(i)))
			if err != nil {
				b.Fatal(err)
			}
			src := statefile.Source{ReaderAt: o.file, Size: o.size, Metadata: o.Metadata()}
			for g := range src.Metadata.RowGroups {
				if err := w.Append(src, g); err != nil {
					b.Fatal(err)
				}
			}
			o.Close()
		}
		if err := w.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

func TestACompactionWithoutItsStatesSaysWhatToDo(t *testing.T) {
	d := mustCreate(t, t.TempDir())
	defer d.Close()
	run := testRun("r1", 16, schemas.BF16)
	if err := d.AddRun(run); err != nil {
		t.Fatal(err)
	}
	manyParts(t, d, run, 0, 1, 2, SinkConfig{}, map[string]sample{})
	if err := os.Remove(partsOf(t, d, "states")[0]); err != nil {
		t.Fatal(err)
	}
	if _, _, err := d.CaptureSize("r1"); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "restore it, or remove") {
		t.Errorf("measuring: %v", err)
	}
	if _, err := d.Compact(t.Context(), "r1", CompactConfig{}); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "restore the file") {
		t.Errorf("got %v", err)
	}
}
