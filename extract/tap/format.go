package tap

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/draftscope/draftscope/extract/probe"
	"github.com/draftscope/draftscope/schemas"
)

// format is how the ring holds values, and what becomes of them.
type format struct {
	name string
	size int
	kept schemas.DType // which the stream can hold exactly
	exp  uint32        // the exponent's bits: all set in NaN and Inf
	frac uint32        // the fraction's bits: zero in Inf
}

var formats = []format{
	{"f32", 4, schemas.F32, 0x7f800000, 0x007fffff},
	{"bf16", 2, schemas.BF16, 0x7f80, 0x007f},
	{"f16", 2, schemas.F32, 0x7c00, 0x03ff},
}

func formatOf(name string) (format, error) {
	for _, f := range formats {
		if f.name == name {
			return f, nil
		}
	}
	return format{}, badProtocol("dtype %q; a ring holds f32, bf16 or f16", name)
}

// Kept is the dtype in which the states of an engine that says hello with
// dtype name are recorded without loss.
func Kept(name string) (schemas.DType, error) {
	f, err := formatOf(name)
	return f.kept, err
}

// appendKept appends the values of raw to dst as dtype d.
func (f format) appendKept(dst, raw []byte, d schemas.DType) []byte {
	switch {
	case f.name == string(d):
		return append(dst, raw...)
	case f.name == "f16" && d == schemas.F32:
		for i := 0; i+1 < len(raw); i += 2 {
			dst = binary.LittleEndian.AppendUint32(dst, math.Float32bits(probe.Half(binary.LittleEndian.Uint16(raw[i:]))))
		}
		return dst
	}
	return d.AppendBytes(dst, f.floats(nil, raw))
}

func (f format) floats(dst []float32, raw []byte) []float32 {
	if f.name != "f16" {
		return schemas.DType(f.name).AppendFloats(dst, raw)
	}
	for i := 0; i+1 < len(raw); i += 2 {
		dst = append(dst, probe.Half(binary.LittleEndian.Uint16(raw[i:])))
	}
	return dst
}

// notFinite counts NaN and Inf in raw.
func (f format) notFinite(raw []byte) (nans, infs int) {
	for i := 0; i+f.size <= len(raw); i += f.size {
		var bits uint32
		if f.size == 4 {
			bits = binary.LittleEndian.Uint32(raw[i:])
		} else {
			bits = uint32(binary.LittleEndian.Uint16(raw[i:]))
		}
		if bits&f.exp != f.exp {
			continue
		}
		if bits&f.frac == 0 {
			infs++
		} else {
			nans++
		}
	}
	return nans, infs
}

// checkFinite describes what is wrong with a row of states, "" when nothing.
func (f format) checkFinite(raw []byte, pos int, states []int) string {
	width := len(raw) / max(1, len(states))
	for i, c := range states {
		if nans, infs := f.notFinite(raw[i*width : (i+1)*width]); nans+infs > 0 {
			return fmt.Sprintf("row %d, state %d: %d NaN, %d Inf", pos, c, nans, infs)
		}
	}
	return ""
}
