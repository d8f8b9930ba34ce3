package statefile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/draftscope/draftscope/data/statefile/statefiletest"
	"github.com/draftscope/draftscope/schemas"
	"github.com/google/go-cmp/cmp"
	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/format"
)

// rowWriter is what the two writers share.
type rowWriter interface {
	Write(Rows) error
	Flush() error
	SetKeyValueMetadata(key, value string)
	Close() error
	NumRows() int64
}

var (
	_ rowWriter = (*Writer)(nil)
	_ rowWriter = (*PlainWriter)(nil)
)

// writeFile writes all with a writer made by one of the two constructors.
func writeFile[W rowWriter](t testing.TB, open func(io.Writer, Config) (W, error), cfg Config, all []Rows) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := open(&out, cfg)
	if err != nil {
		t.Fatal(err)
	}
	var n int64
	for _, r := range all {
		if err := w.Write(r); err != nil {
			t.Fatal(err)
		}
		n += int64(len(r.Norms))
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	w.SetKeyValueMetadata("k", "v")
	if got := w.NumRows(); got != n {
		t.Errorf("%d rows were counted, want %d", got, n)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// bitRow is a row whose floats are bits: NaN equals itself.
type bitRow struct {
	SeqID      string
	Pos, State int32
	Norm       uint32
	Vec        []uint32
}

func readBits(t testing.TB, file []byte) []bitRow {
	t.Helper()
	f, err := parquet.OpenFile(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	r := parquet.NewGenericReader[schemas.State](f)
	defer r.Close()
	rows := make([]schemas.State, f.NumRows())
	if n, err := r.Read(rows); n != len(rows) || err != nil && !errors.Is(err, io.EOF) {
		t.Fatalf("read %d rows of %d: %v", n, len(rows), err)
	}
	out := make([]bitRow, len(rows))
	vecs := vectorBits(t, f)
	for i, row := range rows {
		n := len(row.Vec)
		out[i] = bitRow{row.SeqID, row.Pos, row.State, math.Float32bits(row.Norm), vecs[:n]}
		vecs = vecs[n:]
	}
	return out
}

// vectorBits reads the column vec page by page: a reader of rows makes quiet
// NaNs of signalling ones on its way through float64.
func vectorBits(t testing.TB, f *parquet.File) (bits []uint32) {
	t.Helper()
	for _, rg := range f.RowGroups() {
		pages := rg.ColumnChunks()[colVec].Pages()
		for {
			page, err := pages.ReadPage()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			data := page.Data()
			for _, v := range data.Float() {
				bits = append(bits, math.Float32bits(v))
			}
			parquet.Release(page)
		}
		if err := pages.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return bits
}

// wantBits are the rows as they were given.
func wantBits(cfg Config, all []Rows) []bitRow {
	out := []bitRow{}
	for _, r := range all {
		for i, norm := range r.Norms {
			b := bitRow{r.SeqID, r.Pos + int32(i), r.State, math.Float32bits(norm), nil}
			for _, v := range cfg.DType.AppendFloats(nil, cfg.slice(r, i, i+1).Raw) {
				b.Vec = append(b.Vec, math.Float32bits(v))
			}
			out = append(out, b)
		}
	}
	return out
}

// randomRows are sequences of the given lengths in each of the given states,
// handed over in batches of different sizes.
func randomRows(rng *rand.Rand, cfg Config, states []int32, lengths []int, bits bool) []Rows {
	var all []Rows
	for _, st := range states {
		for q, n := range lengths {
			for pos := 0; pos < n || n == 0; {
				k := min(n-pos, 1+rng.IntN(70))
				var raw []byte
				if bits { // any bits at all
					raw = randomBytes(rng, k*cfg.width())
				} else {
					raw = cfg.DType.AppendBytes(nil, statefiletest.Like(rng, k*cfg.Hidden, cfg.DType == schemas.BF16))
				}
				all = append(all, Rows{SeqID: fmt.Sprintf("q%d", q), Pos: int32(pos), State: st, Norms: AppendNorms(nil, cfg.DType, cfg.Hidden, raw), Raw: raw})
				if pos += k; n == 0 {
					break
				}
			}
		}
	}
	return all
}

func TestBothWritersGiveTheSameRows(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, d := range []schemas.DType{schemas.BF16, schemas.F32} {
		for _, hidden := range []int{1, 2, 3, 7, 256, 2048, 5120} {
			perPage := 3
			cfg := Config{DType: d, Hidden: hidden, PageBytes: 4 * hidden * perPage, GroupBytes: 4 * hidden * 8}
			lengths := []int{0, 1, 2, perPage, perPage + 1, 8, 9, 16, 17}
			if hidden > 256 {
				lengths = []int{0, 9}
			}
			for _, n := range lengths {
				for _, bits := range []bool{false, true} {
					all := randomRows(rng, cfg, []int32{0, 7}, []int{n, 2, 0, 1}, bits)
					want := wantBits(cfg, all)
					fast := readBits(t, writeFile(t, NewWriter, cfg, all))
					plain := readBits(t, writeFile(t, NewPlainWriter, cfg, all))
					name := fmt.Sprintf("%s, %d values, %d rows, any bits: %t", d, hidden, n, bits)
					if !slices.EqualFunc(want, fast, equalRow) || !slices.EqualFunc(plain, fast, equalRow) {
						t.Errorf("%s: %d rows were written, the plain writer's file gives %d, ours %d, and they differ", name, len(want), len(plain), len(fast))
					}
				}
			}
		}
	}
}

func equalRow(a, b bitRow) bool {
	return a.SeqID == b.SeqID && a.Pos == b.Pos && a.State == b.State && a.Norm == b.Norm && slices.Equal(a.Vec, b.Vec)
}

func TestPagesOfTheDefaultSizeGiveTheSameRows(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, cfg := range []Config{{DType: schemas.BF16, Hidden: 640}, {DType: schemas.F32, Hidden: 5120}, {DType: schemas.BF16, Hidden: 150_000}} {
		all := randomRows(rng, cfg, []int32{3}, []int{cfg.withDefaults().groupRows() + 1}, false)
		if got := readBits(t, writeFile(t, NewWriter, cfg, all)); !slices.EqualFunc(wantBits(cfg, all), got, equalRow) {
			t.Errorf("%s, %d values: the rows differ", cfg.DType, cfg.Hidden)
		}
	}
}

func TestEveryBf16CodeIsKept(t *testing.T) {
	cfg := Config{DType: schemas.BF16, Hidden: 1024}
	r := Rows{SeqID: "p", Norms: make([]float32, 64)}
	for code := range 1 << 16 {
		r.Raw = binary.LittleEndian.AppendUint16(r.Raw, uint16(code))
	}
	code := uint32(0)
	for _, row := range readBits(t, writeFile(t, NewWriter, cfg, []Rows{r})) {
		for _, v := range row.Vec {
			if v != code<<16 {
				t.Fatalf("code %04x came back as %08x", code, v)
			}
			code++
		}
	}
	if code != 1<<16 {
		t.Errorf("%d codes came back", code)
	}
}

func TestBothWritersSayTheSameAboutTheirFiles(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	cfg := Config{DType: schemas.BF16, Hidden: 96, PageBytes: 4 * 96 * 20, GroupBytes: 4 * 96 * 50}
	all := randomRows(rng, cfg, []int32{0, 2, 4}, []int{33, 1, 120}, false)
	open := func(file []byte) *parquet.File {
		f, err := parquet.OpenFile(bytes.NewReader(file), int64(len(file)))
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	fast, plain := open(writeFile(t, NewWriter, cfg, all)), open(writeFile(t, NewPlainWriter, cfg, all))
	if v, _ := fast.Lookup("k"); v != "v" {
		t.Errorf("key-value %q, want v", v)
	}
	f, p := fast.Metadata(), plain.Metadata()
	if diff := cmp.Diff(p.Schema, f.Schema); diff != "" {
		t.Errorf("schemas (-plain +ours):\n%s", diff)
	}
	for i, e := range f.Schema {
		if e.Name == "vec" && (e.LogicalType.Value == nil || !e.ConvertedType.Valid) {
			t.Errorf("schema element %d, vec: logical type %v, converted type %v: want LIST in both", i, e.LogicalType, e.ConvertedType)
		}
	}
	if len(f.RowGroups) != len(p.RowGroups) {
		t.Fatalf("%d row groups, the plain writer makes %d", len(f.RowGroups), len(p.RowGroups))
	}
	for i, rg := range f.RowGroups {
		want := p.RowGroups[i]
		if rg.NumRows != want.NumRows || rg.Ordinal != want.Ordinal {
			t.Errorf("row group %d (%d): %d rows, want %d", i, rg.Ordinal, rg.NumRows, want.NumRows)
		}
		for j, c := range rg.Columns {
			g, w := c.MetaData, want.Columns[j].MetaData
			for what, pair := range map[string][2]any{
				"path": {w.PathInSchema, g.PathInSchema}, "type": {w.Type, g.Type}, "codec": {w.Codec, g.Codec},
				"values": {w.NumValues, g.NumValues}, "encodings": {w.Encoding, g.Encoding},
				"statistics": {w.Statistics, g.Statistics}, "kinds of pages": {stats(w), stats(g)},
			} {
				if diff := cmp.Diff(pair[0], pair[1]); diff != "" {
					t.Errorf("row group %d, column %d, %s (-plain +ours):\n%s", i, j, what, diff)
				}
			}
		}
	}
	if len(fast.OffsetIndexes()) != len(f.RowGroups)*numColumns {
		t.Errorf("%d offset indexes", len(fast.OffsetIndexes()))
	}
}

// stats are the kinds of pages of a chunk, their number left out: the writers
// cut pages at their own places.
func stats(m format.ColumnMetaData) (s []format.PageEncodingStats) {
	for _, e := range m.EncodingStats {
		e.Count = 0
		s = append(s, e)
	}
	return s
}

func TestAnyPageIsFoundByItsRow(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	cfg := Config{DType: schemas.BF16, Hidden: 32, PageBytes: 4 * 32 * 7, GroupBytes: 4 * 32 * 40}
	all := randomRows(rng, cfg, []int32{1, 2}, []int{30, 75}, false)
	file := writeFile(t, NewWriter, cfg, all)
	want := wantBits(cfg, all)
	f, err := parquet.OpenFile(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	r := parquet.NewGenericReader[schemas.State](f)
	defer r.Close()
	for _, row := range rng.Perm(len(want)) {
		if err := r.SeekToRow(int64(row)); err != nil {
			t.Fatal(err)
		}
		var got [1]schemas.State
		if n, err := r.Read(got[:]); n != 1 {
			t.Fatalf("row %d: %v", row, err)
		}
		if got[0].SeqID != want[row].SeqID || got[0].Pos != want[row].Pos || got[0].State != want[row].State || math.Float32bits(got[0].Vec[31]) != want[row].Vec[31] {
			t.Errorf("row %d is %s %d %d, want %s %d %d", row, got[0].SeqID, got[0].Pos, got[0].State, want[row].SeqID, want[row].Pos, want[row].State)
		}
	}
}

func TestTheNumberOfWorkersDoesNotChangeTheFile(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	cfg := Config{DType: schemas.BF16, Hidden: 512, PageBytes: 4 * 512 * 7, GroupBytes: 4 * 512 * 16, Workers: 1}
	all := randomRows(rng, cfg, []int32{0, 1, 2, 3}, []int{100, 31, 64}, false)
	want := writeFile(t, NewWriter, cfg, all)
	for _, workers := range []int{0, 2, 3, 16} {
		cfg.Workers = workers
		if got := writeFile(t, NewWriter, cfg, all); !bytes.Equal(want, got) {
			t.Errorf("with %d workers the file differs from one worker's", workers)
		}
	}
}

func TestNormsAreThoseOfDoublePrecision(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	for _, d := range []schemas.DType{schemas.BF16, schemas.F32} {
		for _, hidden := range []int{1, 2, 3, 4, 5, 127, 5120} {
			raw := d.AppendBytes(nil, statefiletest.Like(rng, 3*hidden, d == schemas.BF16))
			for i, got := range AppendNorms(nil, d, hidden, raw) {
				var sum float64
				for _, v := range d.AppendFloats(nil, raw[i*hidden*d.Size():(i+1)*hidden*d.Size()]) {
					sum += float64(v) * float64(v)
				}
				if want := math.Sqrt(sum); math.Abs(float64(got)-want) > want*1e-7 {
					t.Errorf("%s, %d values: norm %g, want %g", d, hidden, got, want)
				}
			}
		}
		for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
			for at := range 9 {
				vals := make([]float32, 9)
				vals[at] = float32(bad)
				if n := float64(AppendNorms(nil, d, 9, d.AppendBytes(nil, vals))[0]); !math.IsNaN(n) && !math.IsInf(n, 0) {
					t.Errorf("%s: the norm of a row with %g is %g", d, bad, n)
				}
			}
		}
	}
}

// brokenWriter fails after so many bytes.
type brokenWriter struct{ left int }

var errBroken = errors.New("broken")

func (b *brokenWriter) Write(p []byte) (int, error) {
	if len(p) > b.left {
		n := b.left
		b.left = 0
		return n, errBroken
	}
	b.left -= len(p)
	return len(p), nil
}

func TestAWriterThatCannotWriteSaysSo(t *testing.T) {
	cfg := Config{DType: schemas.BF16, Hidden: 64, GroupBytes: 4 * 64 * 10}
	all := randomRows(rand.New(rand.NewPCG(13, 14)), cfg, []int32{0, 1}, []int{40}, false)
	size := len(writeFile(t, NewWriter, cfg, all))
	for left := 0; left < size; left += max(1, size/40) {
		w, err := NewWriter(&brokenWriter{left}, cfg)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range all {
			if err = w.Write(r); err != nil {
				break
			}
		}
		w.SetKeyValueMetadata("k", "v")
		if err = errors.Join(err, w.Close()); !errors.Is(err, errBroken) {
			t.Errorf("after %d bytes: %v, want the disk's error", left, err)
		}
	}
}

func TestRowsThatDoNotFitAreRefused(t *testing.T) {
	for _, cfg := range []Config{{}, {DType: "fp8", Hidden: 4}, {DType: schemas.F32}, {DType: schemas.F32, Hidden: 4, PageBytes: -1}, {DType: schemas.F32, Hidden: 4, GroupBytes: 2 << 30}, {DType: schemas.F32, Hidden: 4, Workers: -1}} {
		if _, err := NewWriter(io.Discard, cfg); err == nil {
			t.Errorf("%+v is accepted", cfg)
		}
		if _, err := NewPlainWriter(io.Discard, cfg); err == nil {
			t.Errorf("%+v is accepted by the plain writer", cfg)
		}
	}
	w, err := NewWriter(io.Discard, Config{DType: schemas.BF16, Hidden: 4})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Write(Rows{Norms: make([]float32, 2), Raw: make([]byte, 15)}); err == nil {
		t.Error("rows of another width are accepted")
	}
}

func BenchmarkWriter(b *testing.B) {
	const tokens = 256
	states := statefiletest.Residual(1, 5, tokens, 5120, schemas.BF16)
	cfg := Config{DType: schemas.BF16, Hidden: 5120}
	norms := make([]float32, tokens)
	raw := float64(len(states) * len(states[0]))
	bench := func(name string, open func(io.Writer) (rowWriter, error)) {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				w, err := open(io.Discard)
				if err != nil {
					b.Fatal(err)
				}
				for i, st := range states {
					if err := w.Write(Rows{SeqID: "p0", State: int32(i), Norms: norms, Raw: st}); err != nil {
						b.Fatal(err)
					}
				}
				if err := w.Close(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(raw*float64(b.N)/1e6/b.Elapsed().Seconds(), "rawMB/s")
		})
	}
	for _, workers := range []int{1, 2} {
		cfg.Workers = workers
		bench(fmt.Sprintf("ours/%d", workers), func(out io.Writer) (rowWriter, error) { return NewWriter(out, cfg) })
	}
	bench("plain", func(out io.Writer) (rowWriter, error) { return NewPlainWriter(out, cfg) })
	b.Run("norms", func(b *testing.B) {
		for b.Loop() {
			for _, st := range states {
				norms = AppendNorms(norms[:0], schemas.BF16, 5120, st)
			}
		}
		b.ReportMetric(raw*float64(b.N)/1e6/b.Elapsed().Seconds(), "rawMB/s")
	})
}
