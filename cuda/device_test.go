package cuda_test

import (
	"errors"
	"testing"

	"github.com/draftscope/draftscope/cuda"
	"github.com/google/go-cmp/cmp"
)

// block is a buffer of so many values that nobody reads.
type block int

func (b block) Len() int { return int(b) }
func (b block) Close()   {}

func TestViewsOfViewsStayInTheirBuffer(t *testing.T) {
	m := cuda.Matrix(block(60), 6, 10)
	for name, v := range map[string]struct{ got, want cuda.Tensor }{
		"rows":         {m.RowRange(2, 5), cuda.Tensor{Buf: block(60), Off: 20, Rows: 3, Cols: 10, Stride: 10}},
		"columns":      {m.ColRange(4, 9), cuda.Tensor{Buf: block(60), Off: 4, Rows: 6, Cols: 5, Stride: 10}},
		"columns, row": {m.ColRange(4, 9).RowRange(5, 6), cuda.Tensor{Buf: block(60), Off: 54, Rows: 1, Cols: 5, Stride: 10}},
		"heads":        {m.Heads(5), cuda.Tensor{Buf: block(60), Rows: 12, Cols: 5, Stride: 5}},
		"heads, rows":  {m.RowRange(1, 2).Heads(2), cuda.Tensor{Buf: block(60), Off: 10, Rows: 5, Cols: 2, Stride: 2}},
	} {
		if diff := cmp.Diff(v.want, v.got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if err := v.got.Valid(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestValidRefusesWhatLeavesTheBuffer(t *testing.T) {
	m := cuda.Matrix(block(60), 6, 10)
	for name, v := range map[string]cuda.Tensor{
		"too many rows":   m.RowRange(0, 7),
		"too far right":   m.RowRange(5, 6).ColRange(5, 16),
		"negative offset": m.RowRange(-1, 3),
		"stride":          {Buf: block(60), Rows: 2, Cols: 10, Stride: 9},
		"no buffer":       {Rows: 1, Cols: 1, Stride: 1},
	} {
		if err := v.Valid(); !errors.Is(err, cuda.ErrShape) {
			t.Errorf("%s: %v, want ErrShape", name, err)
		}
	}
	for name, v := range map[string]cuda.Tensor{"zero": {}, "no rows": m.RowRange(6, 6), "no columns": m.ColRange(10, 10)} {
		if err := v.Valid(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
