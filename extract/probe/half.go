package probe

import "math"

// Half converts an IEEE 754 half exactly.
func Half(h uint16) float32 {
	sign, exp, frac := uint32(h>>15)<<31, uint32(h>>10)&0x1f, uint32(h)&0x3ff
	switch exp {
	case 0x1f: // Inf, and NaN with its payload
		return math.Float32frombits(sign | 0xff<<23 | frac<<13)
	case 0: // zero and subnormals: frac · 2^-24
		return math.Float32frombits(sign | math.Float32bits(float32(frac)*(1.0/(1<<24))))
	}
	return math.Float32frombits(sign | (exp+127-15)<<23 | frac<<13)
}

// toHalf is the half that v, which was a half, came from.
func toHalf(v float32) uint16 {
	bits := math.Float32bits(v)
	sign := uint16(bits>>16) & 0x8000
	exp, frac := int(bits>>23)&0xff-127+15, bits&0x7fffff
	switch {
	case exp >= 0x1f:
		return sign | 0x7c00 | uint16(frac>>13)
	case exp <= 0:
		return sign | uint16(math.Abs(float64(v))*(1<<24))
	}
	return sign | uint16(exp)<<10 | uint16(frac>>13)
}
