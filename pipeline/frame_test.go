package pipeline

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/google/go-cmp/cmp"
)

// frames cuts rec and returns headers and payloads.
func frames(t testing.TB, mem memory.Allocator, rec arrow.Record, limit int) (heads []header, payloads [][]byte) {
	t.Helper()
	enc := newEncoder(mem, 4)
	err := enc.split(rec, limit, func(f frame) error {
		heads = append(heads, header{kind: kindData, rows: f.rows, schema: f.schema, digest: f.digest})
		payloads = append(payloads, bytes.Clone(f.buf.Bytes()))
		enc.release(f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return heads, payloads
}

func TestARecordIsCutAtRowBoundariesUnderTheLimit(t *testing.T) {
	mem := checked(t)
	whole := testRecord(mem, "s", 0, 100)
	defer whole.Release()
	slice := whole.NewSlice(13, 88) // a view into larger buffers costs no more
	defer slice.Release()
	empty := whole.NewSlice(5, 5)
	defer empty.Release()
	for _, rec := range []arrow.Record{whole, slice, empty} {
		for _, limit := range []int{1 << 20, 8000, 3000, 1800} {
			t.Run(fmt.Sprintf("%d rows under %d", rec.NumRows(), limit), func(t *testing.T) {
				heads, payloads := frames(t, mem, rec, limit)
				var got []string
				for i, p := range payloads {
					if len(p) > limit {
						t.Errorf("frame %d takes %d bytes", i, len(p))
					}
					part, err := newDecoder(mem).decode(heads[i], p)
					if err != nil {
						t.Fatal(err)
					}
					got = append(got, rowsOf(part)...)
					part.Release()
				}
				if diff := cmp.Diff(rowsOf(rec), got, cmp.Comparer(func(a, b []string) bool { return slices.Equal(a, b) })); diff != "" {
					t.Error(diff)
				}
				if limit == 1<<20 && len(payloads) != 1 {
					t.Errorf("%d frames where one would do", len(payloads))
				}
			})
		}
	}
}

func TestFiveMebibytesOfStatesAreCutUnderOneMebibyte(t *testing.T) {
	mem := checked(t)
	fields := make([]arrow.Field, 5)
	for i := range fields {
		fields[i] = arrow.Field{Name: fmt.Sprint("state_", i), Type: &arrow.FixedSizeBinaryType{ByteWidth: 8192}}
	}
	b := array.NewRecordBuilder(mem, arrow.NewSchema(fields, nil))
	defer b.Release()
	for range 128 {
		for i := range fields {
			b.Field(i).(*array.FixedSizeBinaryBuilder).Append(make([]byte, 8192))
		}
	}
	rec := b.NewRecord()
	defer rec.Release()
	heads, payloads := frames(t, mem, rec, 1<<20-4096)
	var rows int64
	for i, p := range payloads {
		rows += heads[i].rows
		if len(p) > 1<<20-4096 {
			t.Errorf("frame %d takes %d bytes", i, len(p))
		}
	}
	if rows != 128 || len(payloads) != 6 {
		t.Errorf("%d rows in %d frames", rows, len(payloads))
	}
}

func TestOneRowOverTheLimitIsAnErrorThatSaysSo(t *testing.T) {
	mem := checked(t)
	rec := testRecord(mem, strings.Repeat("long", 2000), 0, 1)
	defer rec.Release()
	err := newEncoder(mem, 1).split(rec, 4096, func(frame) error { t.Error("a frame came"); return nil })
	if !errors.Is(err, ErrRowTooLarge) || !strings.Contains(err.Error(), "max_payload") {
		t.Errorf("got %v", err)
	}
}

func TestAFrameCutAnywhereIsAnError(t *testing.T) {
	mem := checked(t)
	rec := testRecord(mem, "s", 0, 5)
	defer rec.Release()
	heads, payloads := frames(t, mem, rec, 1<<20)
	for n := range payloads[0] {
		cut := payloads[0][:n]
		h := heads[0]
		if got, err := newDecoder(mem).decode(h, cut); !errors.Is(err, ErrFrame) {
			t.Fatalf("cut at %d: %v, %v", n, got, err)
		}
		h.digest = digestOf(cut) // the cut itself has to be seen, not only the digest
		if got, err := newDecoder(mem).decode(h, cut); !errors.Is(err, ErrFrame) {
			t.Fatalf("cut at %d with its digest: %v, %v", n, got, err)
		}
	}
	if got, err := newDecoder(mem).decode(heads[0], append(payloads[0], 0)); !errors.Is(err, ErrFrame) {
		t.Errorf("one byte more: %v, %v", got, err)
	}
}

func TestAHeaderThatDisagreesWithItsFrameIsAnError(t *testing.T) {
	mem := checked(t)
	rec := testRecord(mem, "s", 0, 5)
	defer rec.Release()
	heads, payloads := frames(t, mem, rec, 1<<20)
	for name, change := range map[string]func(*header){
		"rows":   func(h *header) { h.rows++ },
		"schema": func(h *header) { h.schema = "0" },
		"digest": func(h *header) { h.digest++ },
	} {
		h := heads[0]
		change(&h)
		if _, err := newDecoder(mem).decode(h, payloads[0]); !errors.Is(err, ErrFrame) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTheFingerprintIsOfColumnsNotOfSchemaMetadata(t *testing.T) {
	base := arrow.NewSchema([]arrow.Field{{Name: "a", Type: arrow.PrimitiveTypes.Int32}}, nil)
	md := arrow.NewMetadata([]string{"k"}, []string{"v"})
	if fingerprint(base) != fingerprint(arrow.NewSchema(base.Fields(), &md)) {
		t.Error("schema metadata changes it")
	}
	seen := map[string]bool{fingerprint(base): true}
	for _, f := range []arrow.Field{
		{Name: "b", Type: arrow.PrimitiveTypes.Int32},
		{Name: "a", Type: arrow.PrimitiveTypes.Int64},
		{Name: "a", Type: arrow.PrimitiveTypes.Int32, Nullable: true},
		{Name: "a", Type: arrow.PrimitiveTypes.Int32, Metadata: md},
	} {
		fp := fingerprint(arrow.NewSchema([]arrow.Field{f}, nil))
		if seen[fp] {
			t.Errorf("%v has a fingerprint seen before", f)
		}
		seen[fp] = true
	}
}

func TestDictionaryColumnsAreRefusedBeforeTheyAreSent(t *testing.T) {
	s := arrow.NewSchema([]arrow.Field{{Name: "d", Type: &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String}}}, nil)
	if err := carries(s); err == nil || !strings.Contains(err.Error(), "column d") {
		t.Errorf("got %v", err)
	}
}

func TestHeadersComeBackAndAreAligned(t *testing.T) {
	for _, h := range []header{
		{kind: kindBegin, attempt: "abc"},
		{kind: kindEndOfRun, attempt: "abc", count: 3, partition: 2},
		{kind: kindData, seq: "a b/ü%\r\n", attempt: "abc.1", chunk: 12, rows: 7, schema: "00ff", digest: 1 << 63},
		{kind: kindData, seq: strings.Repeat("x", maxSeqID), attempt: "abc.1", rows: 7, schema: "00ff", digest: 5},
		{kind: kindEnd, seq: "s", attempt: "abc.1", count: 4, rows: 9, digest: 2},
	} {
		for _, last := range []string{"", "r/s/abc.1/3"} {
			wire := h.marshal("r", last)
			if n := headerBytes(wire); n%64 != 0 {
				t.Errorf("%+v: header of %d bytes", h, n)
			}
			got, err := parseHeader(wire)
			got.partition = h.partition // is in the id only
			if err != nil || got != h {
				t.Errorf("got %+v, %v, want %+v", got, err, h)
			}
		}
	}
}

func TestHeadersThatLackAPartAreRefused(t *testing.T) {
	h := header{kind: kindData, seq: "s", attempt: "abc.1", chunk: 1, rows: 7, schema: "00ff", digest: 5}
	for key, value := range map[string]string{
		hdrVersion: "3", hdrKind: "what", hdrSeq: "", hdrAttempt: "", hdrChunk: "-1", hdrRows: "x", hdrDigest: "xyz",
	} {
		wire := h.marshal("r", "")
		wire.Set(key, value)
		if _, err := parseHeader(wire); !errors.Is(err, ErrFrame) {
			t.Errorf("%s = %q: %v", key, value, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	mem := memory.NewGoAllocator()
	rec := testRecord(mem, "s", 0, 3)
	heads, payloads := frames(f, mem, rec, 1<<20)
	f.Add(payloads[0], heads[0].schema, heads[0].rows)
	var buf bytes.Buffer
	w := ipc.NewWriter(&buf, ipc.WithSchema(rec.Schema()), ipc.WithZstd())
	if err := w.Write(rec); err != nil {
		f.Fatal(err)
	}
	_ = w.Close()
	f.Add(buf.Bytes(), heads[0].schema, heads[0].rows)
	f.Fuzz(func(t *testing.T, data []byte, schema string, rows int64) {
		mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
		h := header{kind: kindData, rows: rows, schema: schema, digest: digestOf(data)}
		got, err := newDecoder(mem).decode(h, data)
		if err != nil {
			if !errors.Is(err, ErrFrame) {
				t.Fatalf("error of another kind: %v", err)
			}
			return
		}
		rowsOf(got) // every value can be read
		got.Release()
	})
}
