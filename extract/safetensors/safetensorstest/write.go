// Package safetensorstest writes small safetensors files for tests.
package safetensorstest

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
)

// Tensor is one tensor to write, its data as the file will hold it.
type Tensor struct {
	Name  string
	DType string
	Shape []int
	Data  []byte
}

// F32 is a tensor of float32 values.
func F32(name string, vals []float32, shape ...int) Tensor {
	t := Tensor{Name: name, DType: "F32", Shape: shape}
	for _, v := range vals {
		t.Data = binary.LittleEndian.AppendUint32(t.Data, math.Float32bits(v))
	}
	return t
}

// U16 is a tensor of two-byte values, given as bits; dtype is F16 or BF16.
func U16(name, dtype string, bits []uint16, shape ...int) Tensor {
	t := Tensor{Name: name, DType: dtype, Shape: shape}
	for _, v := range bits {
		t.Data = binary.LittleEndian.AppendUint16(t.Data, v)
	}
	return t
}

// File is a safetensors file that holds the tensors in the order given.
func File(tensors ...Tensor) []byte {
	var header strings.Builder
	header.WriteString(`{"__metadata__":{"format":"pt"}`)
	var data []byte
	for _, t := range tensors {
		shape := strings.ReplaceAll(fmt.Sprint(t.Shape), " ", ",")
		fmt.Fprintf(&header, `,%q:{"dtype":%q,"shape":%s,"data_offsets":[%d,%d]}`, t.Name, t.DType, shape, len(data), len(data)+len(t.Data))
		data = append(data, t.Data...)
	}
	header.WriteByte('}')
	return Raw(header.String(), data)
}

// Raw is a file of any header and data, well formed or not.
func Raw(header string, data []byte) []byte {
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	out = append(out, header...)
	return append(out, data...)
}
