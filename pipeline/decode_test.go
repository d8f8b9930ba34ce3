package pipeline

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/endian"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/apache/arrow/go/v17/arrow/memory"
)

// everyLayout is a record with a column of each layout that travels, with and
// without nulls.
func everyLayout(t testing.TB, mem memory.Allocator, rows int) arrow.Record {
	t.Helper()
	inner := arrow.StructOf(
		arrow.Field{Name: "x", Type: arrow.PrimitiveTypes.Float64, Nullable: true},
		arrow.Field{Name: "s", Type: arrow.BinaryTypes.String},
	)
	types := []arrow.DataType{
		arrow.Null, arrow.FixedWidthTypes.Boolean, arrow.PrimitiveTypes.Int8, arrow.PrimitiveTypes.Uint16, arrow.PrimitiveTypes.Int32,
		arrow.PrimitiveTypes.Float32, arrow.PrimitiveTypes.Int64, arrow.FixedWidthTypes.Timestamp_us, &arrow.Decimal128Type{Precision: 10, Scale: 2},
		arrow.BinaryTypes.String, arrow.BinaryTypes.Binary, arrow.BinaryTypes.LargeString, &arrow.FixedSizeBinaryType{ByteWidth: 6},
		arrow.ListOf(arrow.PrimitiveTypes.Int32), arrow.LargeListOf(arrow.BinaryTypes.String), arrow.FixedSizeListOf(3, arrow.PrimitiveTypes.Float32),
		inner, arrow.MapOf(arrow.BinaryTypes.String, arrow.PrimitiveTypes.Int32), arrow.ListOf(inner),
	}
	var fields []arrow.Field
	for i, typ := range types {
		fields = append(fields, arrow.Field{Name: fmt.Sprint("full", i), Type: typ, Nullable: true}, arrow.Field{Name: fmt.Sprint("holes", i), Type: typ, Nullable: true})
	}
	b := array.NewRecordBuilder(mem, arrow.NewSchema(fields, nil))
	defer b.Release()
	for i := range fields {
		for r := range rows {
			if i%2 == 1 && r%3 == 1 {
				b.Field(i).AppendNull()
			} else {
				appendSome(b.Field(i), r)
			}
		}
	}
	return b.NewRecord()
}

func appendSome(b array.Builder, r int) {
	switch b := b.(type) {
	case *array.StructBuilder:
		b.Append(true)
		for i := range b.NumField() {
			appendSome(b.FieldBuilder(i), r)
		}
	case *array.MapBuilder:
		b.Append(true)
		for k := range r % 3 {
			appendSome(b.KeyBuilder(), k)
			appendSome(b.ItemBuilder(), r)
		}
	case *array.FixedSizeListBuilder:
		b.Append(true)
		for k := range 3 {
			appendSome(b.ValueBuilder(), r+k)
		}
	case array.ListLikeBuilder:
		b.Append(true)
		for k := range r % 4 {
			appendSome(b.ValueBuilder(), r*k)
		}
	case *array.FixedSizeBinaryBuilder:
		b.Append([]byte{byte(r), 1, 2, 3, 4, 5})
	case *array.BinaryBuilder:
		b.AppendString(fmt.Sprint("value ", r))
	case *array.NullBuilder:
		b.AppendNull()
	case *array.BooleanBuilder:
		b.Append(r%2 == 0)
	case *array.TimestampBuilder:
		b.Append(arrow.Timestamp(r))
	default:
		if err := b.AppendValueFromString(strconv.Itoa(r % 100)); err != nil {
			panic(err)
		}
	}
}

// arrowRead is the oracle: Arrow's own reader.
func arrowRead(mem memory.Allocator, data []byte) (arrow.Record, error) {
	r, err := ipc.NewReader(bytes.NewReader(data), ipc.WithAllocator(mem))
	if err != nil {
		return nil, err
	}
	defer r.Release()
	rec, err := r.Read()
	if err != nil {
		return nil, err
	}
	rec.Retain()
	return rec, nil
}

// shifted is data at an address that is off modulo eight.
func shifted(data []byte, off int) []byte {
	space := make([]byte, len(data)+16)
	for uintptr(unsafe.Pointer(unsafe.SliceData(space)))%8 != uintptr(off) {
		space = space[1:]
	}
	return space[:copy(space, data)]
}

func TestDecodingEqualsArrowsReaderForEveryLayoutAndAddress(t *testing.T) {
	mem := checked(t)
	for _, rows := range []int{0, 1, 7, 64, 65} {
		rec := everyLayout(t, mem, rows)
		heads, payloads := frames(t, mem, rec, 1<<20)
		for off := range 8 {
			data := shifted(payloads[0], off)
			want, err := arrowRead(mem, data)
			if err != nil {
				t.Fatalf("Arrow's reader: %v", err)
			}
			got, err := newDecoder(mem).decode(heads[0], data)
			if err != nil {
				t.Fatalf("%d rows at address %d: %v", rows, off, err)
			}
			if !got.Schema().Equal(want.Schema()) || !array.RecordEqual(want, got) || !array.RecordEqual(rec, got) {
				t.Errorf("%d rows at address %d: got %v, Arrow's reader %v", rows, off, got, want)
			}
			got.Release()
			want.Release()
		}
		rec.Release()
	}
}

func TestDecodingCopiesNothingThatIsAligned(t *testing.T) {
	mem := checked(t)
	rec := everyLayout(t, mem, 9)
	defer rec.Release()
	heads, payloads := frames(t, mem, rec, 1<<20)
	for off := range 8 {
		data := shifted(payloads[0], off)
		got, err := newDecoder(mem).decode(heads[0], data)
		if err != nil {
			t.Fatal(err)
		}
		from := uintptr(unsafe.Pointer(unsafe.SliceData(data)))
		for i, col := range got.Columns() {
			for _, b := range col.Data().Buffers() {
				if b == nil || b.Len() == 0 {
					continue
				}
				at := uintptr(unsafe.Pointer(unsafe.SliceData(b.Bytes())))
				if inside := at >= from && at < from+uintptr(len(data)); inside != (off == 0) {
					t.Errorf("column %s at address %d: within the payload %t", got.ColumnName(i), off, inside)
				}
				if at%8 != 0 {
					t.Errorf("column %s at address %d: its buffer is at %d modulo 8", got.ColumnName(i), off, at%8)
				}
			}
		}
		got.Release()
	}
}

func TestTheOtherEndiannessIsRefused(t *testing.T) {
	mem := checked(t)
	other := endian.BigEndian
	if endian.NativeEndian == other {
		other = endian.LittleEndian
	}
	native := arrow.NewSchema([]arrow.Field{{Name: "a", Type: arrow.PrimitiveTypes.Int32}}, nil)
	schema := arrow.NewSchemaWithEndian(native.Fields(), nil, other)
	b := array.NewRecordBuilder(mem, schema)
	defer b.Release()
	b.Field(0).(*array.Int32Builder).Append(1)
	rec := b.NewRecord()
	defer rec.Release()
	heads, payloads := frames(t, mem, rec, 1<<20)
	if _, err := newDecoder(mem).decode(heads[0], payloads[0]); !errors.Is(err, ErrFrame) {
		t.Errorf("got %v", err)
	}
}

func TestADecoderRemembersSchemasAndTellsThemApart(t *testing.T) {
	mem := checked(t)
	d := newDecoder(mem)
	for i := range 3 * maxKnown {
		b := array.NewRecordBuilder(mem, arrow.NewSchema([]arrow.Field{{Name: fmt.Sprint("c", i%(maxKnown+3)), Type: arrow.PrimitiveTypes.Int32}}, nil))
		b.Field(0).(*array.Int32Builder).Append(int32(i))
		rec := b.NewRecord()
		heads, payloads := frames(t, mem, rec, 1<<20)
		for range 2 {
			got, err := d.decode(heads[0], payloads[0])
			if err != nil || !array.RecordEqual(got, rec) || !got.Schema().Equal(rec.Schema()) {
				t.Fatalf("record %d: %v, %v", i, got, err)
			}
			got.Release()
		}
		if len(d.known) > maxKnown {
			t.Fatalf("%d schemas are remembered", len(d.known))
		}
		rec.Release()
		b.Release()
	}
}

func TestAnotherLayoutVersionIsRefused(t *testing.T) {
	h := header{kind: kindData, seq: "s", attempt: "abc.1"}
	for _, version := range []string{"", "1", "3", "02"} {
		wire := h.marshal("r", "")
		if _, err := parseHeader(wire); err != nil {
			t.Fatal(err)
		}
		wire.Set(hdrVersion, version)
		if _, err := parseHeader(wire); !errors.Is(err, ErrFrame) || !strings.Contains(err.Error(), "this program reads 2") {
			t.Errorf("version %q: %v", version, err)
		}
	}
}

func TestAFlippedByteAnywhereIsAnErrorOrASoundRecord(t *testing.T) {
	mem := checked(t)
	rec := everyLayout(t, mem, 5)
	defer rec.Release()
	heads, payloads := frames(t, mem, rec, 1<<20)
	for at := range payloads[0] {
		data := shifted(payloads[0], 0)
		data[at] ^= byte(1 << (at % 8))
		if _, err := newDecoder(mem).decode(heads[0], data); !errors.Is(err, ErrFrame) {
			t.Fatalf("byte %d: %v", at, err)
		}
		got, err := newDecoder(mem).record(heads[0], data) // as if the digest had been made of it
		if err != nil {
			if !errors.Is(err, ErrFrame) {
				t.Fatalf("byte %d: error of another kind: %v", at, err)
			}
			continue
		}
		rowsOf(got) // every value can be read
		got.Release()
	}
}

func TestAFramerGivesBackWhatItTook(t *testing.T) {
	mem := checked(t)
	rec := everyLayout(t, mem, 64)
	defer rec.Release()
	f := NewFramer(mem)
	rows := int64(0)
	err := f.Encode(rec, 20_000, func(fr Frame) error {
		fr.Payload = slices.Clone(fr.Payload)
		for _, read := range []func(Frame) (arrow.Record, error){f.Decode, f.Parse} {
			got, err := read(fr)
			if err != nil {
				return err
			}
			want := rec.NewSlice(rows, rows+fr.Rows)
			if !array.RecordEqual(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
			want.Release()
			got.Release()
		}
		fr.Digest++
		if _, err := f.Decode(fr); !errors.Is(err, ErrFrame) {
			t.Errorf("another digest: %v", err)
		}
		rows += fr.Rows
		return nil
	})
	if err != nil || rows != 64 {
		t.Errorf("%d rows, %v", rows, err)
	}
}
