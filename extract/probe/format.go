package probe

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/draftscope/draftscope/schemas"
)

// Format is how somebody else stores values, and what becomes of them here.
type Format struct {
	Name string        // f32, bf16 or f16
	Size int           // bytes of a value
	Kept schemas.DType // which the stream can hold exactly
	exp  uint32        // the exponent's bits: all set in NaN and Inf
	frac uint32        // the fraction's bits: zero in Inf
}

var formats = []Format{
	{"f32", 4, schemas.F32, 0x7f800000, 0x007fffff},
	{"bf16", 2, schemas.BF16, 0x7f80, 0x007f},
	{"f16", 2, schemas.F32, 0x7c00, 0x03ff},
}

// FormatOf is the format of a name.
func FormatOf(name string) (Format, bool) {
	for _, f := range formats {
		if f.Name == name {
			return f, true
		}
	}
	return Format{}, false
}

// Append appends the values of raw to dst as dtype d.
func (f Format) Append(dst, raw []byte, d schemas.DType) []byte {
	switch {
	case f.Name == string(d):
		return append(dst, raw...)
	case f.Name == "f16" && d == schemas.F32:
		for i := 0; i+1 < len(raw); i += 2 {
			dst = binary.LittleEndian.AppendUint32(dst, math.Float32bits(Half(binary.LittleEndian.Uint16(raw[i:]))))
		}
		return dst
	}
	return d.AppendBytes(dst, f.Floats(nil, raw))
}

// Floats appends the values of raw to dst, exactly.
func (f Format) Floats(dst []float32, raw []byte) []float32 {
	if f.Name != "f16" {
		return schemas.DType(f.Name).AppendFloats(dst, raw)
	}
	for i := 0; i+1 < len(raw); i += 2 {
		dst = append(dst, Half(binary.LittleEndian.Uint16(raw[i:])))
	}
	return dst
}

// finite says whether all values of raw are. It takes eight bytes at a time:
// the lowest bit of an exponent that is all ones carries into the sign's
// place when it is added once more, and no other exponent gets that far.
func (f Format) finite(raw []byte) bool {
	exp, low := uint64(f.exp), uint64(f.frac)+1
	for n := 8 * f.Size; n < 64; n *= 2 {
		exp |= exp << n
		low |= low << n
	}
	sign := exp + low
	var over uint64
	for ; len(raw) >= 8; raw = raw[8:] {
		over |= binary.LittleEndian.Uint64(raw)&exp + low
	}
	if len(raw) > 0 {
		nans, infs := f.notFinite(raw)
		return over&sign == 0 && nans+infs == 0
	}
	return over&sign == 0
}

// notFinite counts NaN and Inf in raw.
func (f Format) notFinite(raw []byte) (nans, infs int) {
	for i := 0; i+f.Size <= len(raw); i += f.Size {
		var bits uint32
		if f.Size == 4 {
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

// CheckFinite describes what is wrong with a row of states, "" when nothing.
func (f Format) CheckFinite(raw []byte, pos int, states []int) string {
	if f.finite(raw) {
		return ""
	}
	width := len(raw) / max(1, len(states))
	for i, c := range states {
		if nans, infs := f.notFinite(raw[i*width : (i+1)*width]); nans+infs > 0 {
			return fmt.Sprintf("row %d, state %d: %d NaN, %d Inf", pos, c, nans, infs)
		}
	}
	return ""
}
