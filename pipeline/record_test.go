package pipeline

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
)

func TestADecodedRecordDoesAllThatArrowsOwnDoes(t *testing.T) {
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	defer mem.AssertSize(t, 0)
	want := everyLayout(t, mem, 7)
	defer want.Release()
	framer := NewFramer(mem)
	err := framer.Encode(want, 1<<20, func(f Frame) error {
		got, err := framer.Decode(f)
		if err != nil {
			return err
		}
		defer got.Release()
		if got.NumRows() != want.NumRows() || got.NumCols() != want.NumCols() || !got.Schema().Equal(want.Schema()) {
			t.Errorf("%d rows of %d columns, want %d of %d", got.NumRows(), got.NumCols(), want.NumRows(), want.NumCols())
		}
		for i := range int(want.NumCols()) {
			if got.ColumnName(i) != want.ColumnName(i) || !array.Equal(got.Column(i), want.Column(i)) || got.Columns()[i] != got.Column(i) {
				t.Errorf("column %d differs", i)
			}
		}
		if g, w := fmt.Sprint(got), fmt.Sprint(want); g != w {
			t.Errorf("printed as %s, want %s", g, w)
		}
		g, err := json.Marshal(got)
		if err != nil {
			return err
		}
		w, err := json.Marshal(want)
		if err != nil {
			return err
		}
		if string(g) != string(w) {
			t.Errorf("as JSON %s, want %s", g, w)
		}
		gs, ws := got.NewSlice(2, 5), want.NewSlice(2, 5)
		defer gs.Release()
		defer ws.Release()
		if !array.RecordEqual(gs, ws) {
			t.Error("rows 2 to 5 differ")
		}
		swapped, err := got.SetColumn(8, want.Column(8))
		if err != nil {
			return err
		}
		defer swapped.Release()
		if !array.RecordEqual(swapped, want) {
			t.Error("a column set to what it was has changed the record")
		}
		if _, err := got.SetColumn(0, want.Column(8)); err == nil {
			t.Error("a column of another type was taken")
		}
		got.Retain()
		got.Release()
		if got.Column(0) == nil {
			t.Error("a record that is still held has lost its columns")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// The parts of most records come from one allocation; a record of more columns
// or buffers than that has room for must read as well.
func TestARecordOfManyColumnsIsDecoded(t *testing.T) {
	for _, n := range []int{1, 7, 8, 15, 16, 17, 24, 25, 200} {
		var fields []arrow.Field
		for i := range n {
			fields = append(fields, arrow.Field{Name: fmt.Sprint("c", i), Type: arrow.ListOf(arrow.BinaryTypes.String), Nullable: true})
		}
		b := array.NewRecordBuilder(memory.NewGoAllocator(), arrow.NewSchema(fields, nil))
		for i := range n {
			for r := range 5 {
				appendSome(b.Field(i), r+i)
			}
			b.Field(i).AppendNull()
		}
		want := b.NewRecord()
		framer := NewFramer(nil)
		err := framer.Encode(want, 1<<20, func(f Frame) error {
			got, err := framer.Decode(f)
			if err != nil {
				return err
			}
			defer got.Release()
			if !array.RecordEqual(got, want) {
				t.Errorf("%d columns: read %v, want %v", n, got, want)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		want.Release()
		b.Release()
	}
}
