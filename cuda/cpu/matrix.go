package cpu

import (
	"fmt"
	"unsafe"

	"github.com/draftscope/draftscope/cuda"
)

// matrix is a row-major view of host memory: row i is
// data[i*stride : i*stride+cols].
type matrix struct {
	data               []float32
	rows, cols, stride int
}

// row is row i; its capacity ends with it.
func (m matrix) row(i int) []float32 {
	lo := i * m.stride
	return m.data[lo : lo+m.cols : lo+m.cols]
}

// block is the view of rows r0..r1-1 and columns c0..c1-1.
func (m matrix) block(r0, r1, c0, c1 int) matrix {
	sub := matrix{rows: r1 - r0, cols: c1 - c0, stride: m.stride}
	if sub.rows > 0 && sub.cols > 0 {
		lo := r0*m.stride + c0
		sub.data = m.data[lo : lo+(sub.rows-1)*m.stride+sub.cols]
	}
	return sub
}

// dense allocates a zeroed rows x cols matrix. Rows are padded so that each
// starts on a 32-byte boundary.
func dense(rows, cols int) matrix {
	stride := (cols + 7) &^ 7
	return matrix{data: aligned(rows * stride), rows: rows, cols: cols, stride: stride}
}

// aligned allocates n zeroed values that start on a 64-byte boundary. The
// collector does not move heap memory, so the boundary holds for good.
func aligned(n int) []float32 {
	const lines = 64 / 4
	data := make([]float32, n+lines-1)
	skip := 0
	if r := int(uintptr(unsafe.Pointer(unsafe.SliceData(data))) / 4 % lines); r != 0 {
		skip = lines - r
	}
	return data[skip : skip+n : skip+n]
}

// view is a checked operand of op as a matrix. It must lie in this backend's
// memory.
func view(op string, t cuda.Tensor) (matrix, error) {
	m := matrix{rows: t.Rows, cols: t.Cols, stride: t.Stride}
	if t.Rows == 0 || t.Cols == 0 {
		return m, nil
	}
	b, ok := t.Buf.(*buffer)
	if !ok {
		return matrix{}, fmt.Errorf("%s: %w: %s lies in a %T, not in this device's memory", op, cuda.ErrShape, t, t.Buf)
	}
	data := b.data.Load()
	if data == nil {
		return matrix{}, fmt.Errorf("%s: %w: %s lies in a closed buffer", op, cuda.ErrShape, t)
	}
	m.data = (*data)[t.Off : t.Off+(t.Rows-1)*t.Stride+t.Cols]
	return m, nil
}

// operand is a tensor and where views puts it.
type operand struct {
	t cuda.Tensor
	m *matrix
}

// views is view for several operands.
func views(op string, operands ...operand) error {
	for _, o := range operands {
		m, err := view(op, o.t)
		if err != nil {
			return err
		}
		*o.m = m
	}
	return nil
}
