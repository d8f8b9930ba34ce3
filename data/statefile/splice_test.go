package statefile

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go"
)

func source(t testing.TB, file []byte) Source {
	t.Helper()
	f, err := parquet.OpenFile(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	return Source{ReaderAt: bytes.NewReader(file), Size: int64(len(file)), Metadata: f.Metadata()}
}

func TestSplicedRowGroupsAreVerbatim(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, d := range []schemas.DType{schemas.BF16, schemas.F32} {
		cfg := Config{DType: d, Hidden: 96, PageBytes: 4 * 96 * 7, GroupBytes: 4 * 96 * 25}
		a := randomRows(rng, cfg, []int32{0, 2}, []int{60, 1}, true)
		b := randomRows(rng, cfg, []int32{0, 2}, []int{33, 90, 4}, true)
		files := [][]byte{writeFile(t, NewWriter, cfg, a), writeFile(t, NewPlainWriter, cfg, b)}
		var out bytes.Buffer
		s := NewSplicer(&out)
		var want []bitRow
		for turn := range 3 { // the files in turn, the first again
			src := source(t, files[turn%2])
			for g := range src.Metadata.RowGroups {
				if err := s.Append(src, g); err != nil {
					t.Fatal(err)
				}
			}
			want = append(want, wantBits(cfg, [][]Rows{a, b}[turn%2])...)
		}
		s.SetKeyValueMetadata("k", "v")
		if err := errors.Join(s.Flush(), s.Close()); err != nil {
			t.Fatal(err)
		}
		if got := readBits(t, out.Bytes()); !slices.EqualFunc(want, got, equalRow) || s.NumRows() != int64(len(want)) {
			t.Errorf("%s: %d rows, want %d equal ones", d, len(got), len(want))
		}
		body := files[0][4:source(t, files[0]).Metadata.RowGroups[0].Columns[0].ColumnIndexOffset]
		if !bytes.HasPrefix(out.Bytes()[4:], body) {
			t.Error("the first file's pages were not copied as they are")
		}
		// Any row is found by way of the new indexes.
		f, err := parquet.OpenFile(bytes.NewReader(out.Bytes()), int64(out.Len()))
		if err != nil {
			t.Fatal(err)
		}
		r := parquet.NewGenericReader[schemas.State](f)
		for _, row := range rng.Perm(len(want))[:40] {
			var got [1]schemas.State
			if err := r.SeekToRow(int64(row)); err != nil {
				t.Fatal(err)
			}
			if n, err := r.Read(got[:]); n != 1 || got[0].SeqID != want[row].SeqID || got[0].Pos != want[row].Pos || got[0].State != want[row].State {
				t.Errorf("row %d is %+v (%v), want %+v", row, got[0].SeqID, err, want[row].SeqID)
			}
		}
		r.Close()
	}
}

func TestFilesOfAnotherLayoutAreNotSpliced(t *testing.T) {
	var file bytes.Buffer
	if err := parquet.Write(&file, []schemas.Fault{{SeqID: "p"}}); err != nil {
		t.Fatal(err)
	}
	if err := NewSplicer(&bytes.Buffer{}).Append(source(t, file.Bytes()), 0); !errors.Is(err, ErrForeign) {
		t.Errorf("another table: %v, want ErrForeign", err)
	}
	cfg := Config{DType: schemas.BF16, Hidden: 8}
	good := writeFile(t, NewWriter, cfg, randomRows(rand.New(rand.NewPCG(3, 4)), cfg, []int32{1}, []int{9}, false))
	for name, spoil := range map[string]func(*Source){
		"no such row group":     func(s *Source) { s.Metadata.RowGroups = nil },
		"a hole":                func(s *Source) { s.Metadata.RowGroups[0].Columns[2].MetaData.DataPageOffset++ },
		"past the end":          func(s *Source) { s.Metadata.RowGroups[0].Columns[4].MetaData.TotalCompressedSize = 1 << 40 },
		"no dictionary":         func(s *Source) { s.Metadata.RowGroups[0].Columns[0].MetaData.DictionaryPageOffset = 0 },
		"an index past the end": func(s *Source) { s.Metadata.RowGroups[0].Columns[0].OffsetIndexLength = 1 << 30 },
		"no index":              func(s *Source) { s.Metadata.RowGroups[0].Columns[0].OffsetIndexOffset = 0 },
		"a column too few":      func(s *Source) { s.Metadata.RowGroups[0].Columns = s.Metadata.RowGroups[0].Columns[:4] },
	} {
		src := source(t, good)
		spoil(&src)
		if err := NewSplicer(&bytes.Buffer{}).Append(src, 0); !errors.Is(err, ErrForeign) {
			t.Errorf("%s: %v, want ErrForeign", name, err)
		}
	}
}

func FuzzScanThriftNeverPanics(f *testing.F) {
	cfg := Config{DType: schemas.BF16, Hidden: 8}
	good := writeFile(f, NewWriter, cfg, randomRows(rand.New(rand.NewPCG(5, 6)), cfg, []int32{1}, []int{9}, false))
	c := source(f, good).Metadata.RowGroups[0].Columns[4]
	f.Add(good[c.OffsetIndexOffset : c.OffsetIndexOffset+int64(c.OffsetIndexLength)])
	f.Add([]byte{0x19, 0xfc, 0xff, 0xff, 0xff, 0x0f})
	f.Fuzz(func(t *testing.T, b []byte) {
		src := Source{ReaderAt: bytes.NewReader(b), Size: int64(len(b))}
		chunk := c
		chunk.OffsetIndexOffset, chunk.OffsetIndexLength, chunk.ColumnIndexOffset = 1, int32(len(b))-1, 0
		_, _ = src.pageIndex(&chunk) // an error or not, no panic and no huge allocation
		_ = ScanThrift(b)
	})
}
