package safetensors

import (
	"encoding/binary"
	"fmt"
	"math"
)

// halfToFloat converts an IEEE 754 half exactly; every half is a float32.
func halfToFloat(h uint16) float32 {
	sign := uint32(h>>15) << 31
	exp := uint32(h>>10) & 0x1f
	frac := uint32(h) & 0x3ff
	switch exp {
	case 0x1f: // Inf, and NaN with its payload
		return math.Float32frombits(sign | 0xff<<23 | frac<<13)
	case 0: // zero and subnormals: frac · 2^-24, exact in float32
		v := float32(frac) * (1.0 / (1 << 24))
		return math.Float32frombits(sign | math.Float32bits(v))
	}
	return math.Float32frombits(sign | (exp+127-15)<<23 | frac<<13)
}

// floats converts little-endian values to float32, exactly.
func floats(dst []float32, raw []byte, d DType) error {
	switch d {
	case F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
		}
	case BF16:
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(raw[2*i:])) << 16)
		}
	case F16:
		for i := range dst {
			dst[i] = halfToFloat(binary.LittleEndian.Uint16(raw[2*i:]))
		}
	case "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL":
		return fmt.Errorf("%w: %s, which holds whole numbers, where floats are wanted", ErrDType, d)
	default:
		return fmt.Errorf("%w: %s; convert the checkpoint to BF16, F16 or F32", ErrDType, d)
	}
	return nil
}
