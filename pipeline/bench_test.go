package pipeline

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
)

func wideRecord(rows, width int) arrow.Record {
	b := array.NewRecordBuilder(memory.NewGoAllocator(), arrow.NewSchema([]arrow.Field{
		{Name: "states", Type: &arrow.FixedSizeBinaryType{ByteWidth: width}},
	}, nil))
	defer b.Release()
	v := make([]byte, width)
	for i := range v {
		v[i] = byte(i * 131)
	}
	for range rows {
		b.Field(0).(*array.FixedSizeBinaryBuilder).Append(v)
	}
	return b.NewRecord()
}

// repeatSource gives one record again and again.
type repeatSource struct {
	rec           arrow.Record
	seqs, records int
	at            int
}

func (s *repeatSource) Next(context.Context) (string, arrow.Record, bool, error) {
	if s.at == s.seqs*s.records {
		return "", nil, false, io.EOF
	}
	i := s.at
	s.at++
	s.rec.Retain()
	return fmt.Sprint("seq", i/s.records), s.rec, s.at%s.records == 0, nil
}

// countingSink stores nothing.
type countingSink struct{ pending int64 }

func (k *countingSink) Write(_ context.Context, _ string, rec arrow.Record) error {
	k.pending += int64(rec.Column(0).Data().Buffers()[1].Len())
	return nil
}
func (k *countingSink) End(context.Context, string, uint64) error { return nil }
func (k *countingSink) Drop(string)                               {}
func (k *countingSink) Pending() int64                            { return k.pending }
func (k *countingSink) Commit(context.Context) error              { k.pending = 0; return nil }
func (k *countingSink) Close() error                              { return nil }

func BenchmarkEncode(b *testing.B) {
	rec := wideRecord(16, 61_440)
	defer rec.Release()
	enc := newEncoder(memory.NewGoAllocator(), 2)
	b.SetBytes(16 * 61_440)
	for b.Loop() {
		if err := enc.split(rec, 1<<20, func(f frame) error { enc.release(f); return nil }); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkDecode sets reading a message of 1 MB beside copying it.
func BenchmarkDecode(b *testing.B) {
	fields := []arrow.Field{
		{Name: "seq_id", Type: arrow.BinaryTypes.String},
		{Name: "pos", Type: arrow.PrimitiveTypes.Int32},
		{Name: "token", Type: arrow.PrimitiveTypes.Int32},
	}
	for i := range 6 {
		fields = append(fields, arrow.Field{Name: fmt.Sprint("state_", i), Type: &arrow.FixedSizeBinaryType{ByteWidth: 10_240}})
	}
	mem := memory.NewGoAllocator()
	build := array.NewRecordBuilder(mem, arrow.NewSchema(fields, nil))
	defer build.Release()
	for i := range 16 {
		build.Field(0).(*array.StringBuilder).Append("sequence")
		build.Field(1).(*array.Int32Builder).Append(int32(i))
		build.Field(2).(*array.Int32Builder).Append(int32(i))
		for f := range 6 {
			build.Field(3 + f).(*array.FixedSizeBinaryBuilder).Append(bytes.Repeat([]byte{byte(i), 63}, 5120))
		}
	}
	rec := build.NewRecord()
	defer rec.Release()
	heads, payloads := frames(b, mem, rec, 1<<20)
	h, data := heads[0], payloads[0]
	d := newDecoder(mem)
	into := make([]byte, len(data))
	for name, run := range map[string]func() (arrow.Record, error){
		"record": func() (arrow.Record, error) { return d.record(h, data) },
		"digest": func() (arrow.Record, error) { return nil, map[bool]error{true: ErrFrame}[digestOf(data) != h.digest] },
		"both":   func() (arrow.Record, error) { return d.decode(h, data) },
		"arrow":  func() (arrow.Record, error) { return arrowRead(mem, data) },
		"copy":   func() (arrow.Record, error) { copy(into, data); return nil, nil },
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			for b.Loop() {
				got, err := run()
				if err != nil {
					b.Fatal(err)
				}
				if got != nil {
					got.Release()
				}
			}
		})
	}
}

func BenchmarkEndToEnd(b *testing.B) {
	const rows, width = 16, 61_440 // 1 MB a record: 16 tokens, 6 states of 5,120 bf16 values
	rec := wideRecord(rows, width)
	defer rec.Release()
	const records = 256
	b.SetBytes(records * rows * width)
	for b.Loop() {
		src := &repeatSource{rec: rec, seqs: 16, records: records / 16}
		sink := func(string, int) (Sink, error) { return &countingSink{}, nil }
		if _, err := Run(b.Context(), Config{Run: "bench", Dir: b.TempDir()}, src, nil, sink); err != nil {
			b.Fatal(err)
		}
	}
}
