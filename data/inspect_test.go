package data

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/data/statefile"
	"github.com/draftscope/draftscope/data/statefile/statefiletest"
	"github.com/draftscope/draftscope/schemas"
	"github.com/google/go-cmp/cmp"
)

// smallDataset holds two commits of run r1, and results by good.
func smallDataset(t testing.TB, dir string) (*Dataset, map[string]sample) {
	t.Helper()
	mem := memory.NewGoAllocator()
	d := mustCreate(t, dir)
	run := testRun("r1", 16, schemas.BF16)
	if err := d.AddRun(run); err != nil {
		t.Fatal(err)
	}
	if err := d.AddDrafter("r1", Drafter{Name: "good", Source: "demo"}); err != nil {
		t.Fatal(err)
	}
	c, err := d.CaptureSink("r1", 0, SinkConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r, err := d.ResultSink("r1", 0, SinkConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	want := map[string]sample{}
	for i, id := range []string{"p0", "p1", "p2", "p3"} {
		want[id] = newSample(run, id, 20)
		feed(t, c, id, uint64(i+1), want[id].records(t, mem, 8))
		feed(t, r, id, uint64(i+1), sampleResults(id, "good").records(mem, "r1"))
		if i%2 == 1 {
			if err := errors.Join(c.Commit(t.Context()), r.Commit(t.Context())); err != nil {
				t.Fatal(err)
			}
		}
	}
	return d, want
}

func TestADatasetIsDescribed(t *testing.T) {
	d, _ := smallDataset(t, t.TempDir())
	got, err := Describe(d.Dir())
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Damaged) > 0 || len(got.Runs) != 1 {
		t.Fatalf("got %+v", got)
	}
	run := got.Runs[0]
	if run.Sequences != 4 || run.Scored["good"] != 4 {
		t.Errorf("%d sequences, %d scored, want 4 and 4", run.Sequences, run.Scored["good"])
	}
	rows := map[string][2]int64{}
	for _, table := range run.Tables {
		rows[table.Table+table.Drafter] = [2]int64{int64(table.Files), table.Rows}
	}
	want := map[string][2]int64{"sequences": {2, 4}, "tokens": {2, 80}, "states": {2, 240}, "draftsgood": {2, 12}, "slotsgood": {2, 36}, "roundsgood": {2, 12}}
	if diff := cmp.Diff(want, rows); diff != "" {
		t.Errorf("files and rows (-want +got):\n%s", diff)
	}
	for _, s := range []string{"dataset of format 1 with 1 run", "3 states of 16 values (bf16) of 4 layers: 0 2 4", "drafter good from demo: 4 sequences scored", "option max_new = 16"} {
		if !strings.Contains(got.String(), s) {
			t.Errorf("the text lacks %q:\n%s", s, got)
		}
	}
}

func TestAParquetFileIsDescribed(t *testing.T) {
	d, _ := smallDataset(t, t.TempDir())
	got, err := Describe(partsOf(t, d, "states")[0])
	if err != nil {
		t.Fatal(err)
	}
	f := got.File
	if f.Rows != 120 || f.RowGroups != 3 || len(f.Columns) != 5 {
		t.Errorf("%d rows, %d row groups, %d columns; want 120, 3, 5", f.Rows, f.RowGroups, len(f.Columns))
	}
	vec := f.Columns[4]
	if vec.Name != "vec.list.element" || vec.Codec != "ZSTD" || !vec.Repeated || !strings.Contains(strings.Join(vec.Encodings, " "), "BYTE_STREAM_SPLIT") {
		t.Errorf("vec is %+v", vec)
	}
	for key, want := range map[string]string{keyRun: "r1", keyTable: "states", keyStates: "0,2,4", keyDType: "bf16", keyHidden: "16", keyLayers: "4", keyRows: "120", keyFirst: "1", keyLast: "2"} {
		if f.Footer[key] != want {
			t.Errorf("footer %s is %q, want %q", key, f.Footer[key], want)
		}
	}
	if !strings.Contains(got.String(), "120 rows in 3 row groups") {
		t.Errorf("text:\n%s", got)
	}
}

// damages are what can happen to a file.
var damages = map[string]func([]byte) []byte{
	"empty":                     func([]byte) []byte { return nil },
	"eight bytes":               func([]byte) []byte { return []byte("PAR1PAR1") },
	"tail cut":                  func(b []byte) []byte { return b[:len(b)-100] },
	"page byte flipped":         func(b []byte) []byte { b[len(b)/4] ^= 0x10; return b },
	"first page header flipped": func(b []byte) []byte { b[5] ^= 0x40; return b },
	"a huge footer":             func(b []byte) []byte { copy(b[len(b)-8:], "\xff\xff\xff\x7f"); return b },
	"no Parquet at all":         func([]byte) []byte { return bytes.Repeat([]byte("hello "), 100) },
}

func TestADamagedFileIsAnErrorThatNamesIt(t *testing.T) {
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			d, _ := smallDataset(t, t.TempDir())
			for _, table := range []string{"states", "sequences", "slots"} {
				path := partsOf(t, d, table)[0]
				spoilFile(t, path, damage)
				if _, err := Describe(path); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), path) {
					t.Errorf("%s: %v, want ErrDamaged naming the file", table, err)
				}
			}
		})
	}
}

func spoilFile(t *testing.T, path string, damage func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, damage(b), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestOneDamagedFileIsNamedAndTheOthersAreRead(t *testing.T) {
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			d, want := smallDataset(t, t.TempDir())
			path := partsOf(t, d, "states")[0] // of p0 and p1
			spoilFile(t, path, damage)
			var damaged []string
			src, err := d.Replay("r1", ReplayConfig{Allocator: checked(t), Damaged: func(path string, err error) {
				damaged = append(damaged, path+": "+err.Error())
			}})
			if err != nil {
				t.Fatal(err)
			}
			defer src.Close()
			got := replayAll(t, src)
			if len(damaged) == 0 {
				t.Error("nothing was reported")
			}
			for _, msg := range damaged {
				if !strings.Contains(msg, path) {
					t.Errorf("report %q does not name %s", msg, path)
				}
			}
			for id, g := range got { // what came is right
				if diff := cmp.Diff(want[id].states, g.states); diff != "" {
					t.Errorf("states of %s differ", id)
				}
			}
			if got["p2"].states == nil || got["p3"].states == nil {
				t.Error("the sequences of the other file did not come")
			}

			src2, err := d.Replay("r1", ReplayConfig{})
			if err != nil {
				t.Fatal(err)
			}
			defer src2.Close()
			for err == nil {
				var rec interface{ Release() }
				_, rec, _, err = src2.Next(t.Context())
				if err == nil {
					rec.Release()
				}
			}
			if errors.Is(err, io.EOF) || !errors.Is(err, ErrDamaged) {
				t.Errorf("without a report function the replay ended with %v", err)
			}
		})
	}
}

func TestDescribeNamesTheDamagedFilesOfADataset(t *testing.T) {
	d, _ := smallDataset(t, t.TempDir())
	bad := []string{partsOf(t, d, "rounds")[1], partsOf(t, d, "states")[0]}
	spoilFile(t, bad[0], damages["page byte flipped"])
	spoilFile(t, bad[1], damages["tail cut"])
	got, err := Describe(d.Dir())
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, f := range got.Damaged {
		for _, path := range bad {
			named[path] = named[path] || strings.Contains(f.Path+f.Reason, path)
		}
	}
	if !named[bad[0]] || !named[bad[1]] {
		t.Errorf("damaged %+v, want %v", got.Damaged, bad)
	}
	if got.Runs[0].Scored["good"] != 2 {
		t.Errorf("%d sequences scored, want the 2 of the other file", got.Runs[0].Scored["good"])
	}
}

func TestResumeTrustsContentAndNotExistence(t *testing.T) {
	dir := t.TempDir()
	d, _ := smallDataset(t, dir)
	path := partsOf(t, d, "states")[0]
	if err := errors.Join(os.Remove(path), d.Close()); err != nil {
		t.Fatal(err)
	}
	d = mustCreate(t, dir)
	if _, err := d.Stored("r1"); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), path) {
		t.Errorf("a marker whose states are gone: %v, want ErrDamaged naming %s", err, path)
	}
}

func TestFilesOfOthersOutliveTheRecovery(t *testing.T) {
	dir := t.TempDir()
	d, _ := smallDataset(t, dir)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	mine := filepath.Join(dir, "tokens", "run=r1", "notes.parquet")
	stray := filepath.Join(dir, "tokens", "run=r1", "part-00-000000000077-000000000099.parquet")
	tmp := filepath.Join(dir, "states", "run=r1", "shard=00", "part-000000000077-000000000099.parquet.tmp")
	state := filepath.Join(dir, "states", "run=r1", "shard=00", "part-000000000077-000000000099-2.parquet")
	for _, path := range []string{mine, stray, tmp, state} {
		if err := os.WriteFile(path, []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	mustCreate(t, dir)
	if !exists(mine) || exists(stray) || exists(tmp) || exists(state) {
		t.Errorf("kept: notes %t, stray %t, temporary %t, states %t; want the notes only", exists(mine), exists(stray), exists(tmp), exists(state))
	}
}

func TestOnlyWantedSequencesAreReplayed(t *testing.T) {
	d, want := smallDataset(t, t.TempDir())
	src, err := d.Replay("r1", ReplayConfig{Allocator: checked(t), Want: func(id string) bool { return id == "p1" || id == "p2" }})
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	got := replayAll(t, src)
	if len(got) != 2 {
		t.Errorf("%d sequences came, want 2", len(got))
	}
	for _, id := range []string{"p1", "p2"} {
		if diff := cmp.Diff(want[id].states, got[id].states); diff != "" {
			t.Errorf("states of %s differ", id)
		}
	}
}

func TestEveryBf16CodeComesBackThroughParquet(t *testing.T) {
	var codes []byte // NaN, infinities and denormals too: the file keeps bits
	for code := range 1 << 16 {
		codes = binary.LittleEndian.AppendUint16(codes, uint16(code))
	}
	const rows = 64
	var file bytes.Buffer
	w, err := statefile.NewWriter(&file, statefile.Config{DType: schemas.BF16, Hidden: 1024})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Write(statefile.Rows{SeqID: "p", Norms: make([]float32, rows), Raw: codes}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	o := &openedPart{path: "memory", size: int64(file.Len())}
	if err := o.open(bytes.NewReader(file.Bytes())); err != nil {
		t.Fatal(err)
	}
	cur := vecCursor{file: o, hidden: 1024, dtype: schemas.BF16}
	raw, err := cur.rows(0, rows)
	if err != nil {
		t.Fatal(err)
	}
	if err := cur.close(); err != nil {
		t.Fatal(err)
	}
	for code := range 1 << 16 {
		want := uint16(code)
		if want&0x7f80 == 0x7f80 && want&0x7f != 0 {
			want |= 0x40 // on its way back to bf16 a signalling NaN becomes quiet
		}
		if got := binary.LittleEndian.Uint16(raw[2*code:]); got != want {
			t.Fatalf("code %04x came back as %04x", code, got)
		}
	}
}

func TestBf16StatesTakeTheirEntropyOnDisk(t *testing.T) {
	run := testRun("r1", 2048, schemas.BF16)
	d := mustCreate(t, t.TempDir(), run)
	s := mustSink(t, d)
	defer s.Close()
	want := newSample(run, "p0", 250)
	feed(t, s, "p0", 1, want.records(t, checked(t), 64))
	if err := s.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	var low, high []byte
	for _, st := range want.states {
		for i := 0; i < len(st); i += 2 {
			low, high = append(low, st[i]), append(high, st[i+1])
		}
	}
	floor := float64(len(low)) * (statefiletest.Entropy(low) + statefiletest.Entropy(high)) / 8
	info, err := os.Stat(partsOf(t, d, "states")[0])
	if err != nil {
		t.Fatal(err)
	}
	if got := float64(info.Size()) / floor; got > 1.02 {
		t.Errorf("the file takes %.4f of the states' order-0 entropy, want at most 1.02", got)
	} else {
		t.Logf("the file takes %.4f of the states' order-0 entropy, %.4f of their bytes", got, float64(info.Size())/float64(2*len(low)))
	}
}

func FuzzFooterNeverPanics(f *testing.F) {
	dir := f.TempDir()
	d, _ := smallDataset(f, dir)
	for _, table := range []string{"sequences", "states", "slots"} {
		b, err := os.ReadFile(partsOf(f, d, table)[0])
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte("PAR1\x15\x00\x00\x00\x03\x00\x00\x00PAR1"))
	f.Fuzz(func(t *testing.T, b []byte) {
		o := &openedPart{path: "fuzz", size: int64(len(b))}
		err := guard(func() error { return o.open(bytes.NewReader(b)) })
		if err == nil {
			err = guard(func() error { o.describe(); return nil })
		}
		if err != nil && !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNewer) {
			t.Fatalf("an error of no kind: %v", err)
		}
	})
}
