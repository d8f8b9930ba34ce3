package files

import (
	"fmt"
	"math"

	"github.com/draftscope/draftscope/extract/safetensors"
)

// scaleSuffix ends the name of the tensor that holds what the codes of states
// in 8 bits are multiplied with: a value a token, [tokens], or a value a token
// and slot, [tokens, slots].
const scaleSuffix = "_scale"

// E4M3 says that a tensor holds codes of 8 bits.
func E4M3(info safetensors.Info) bool { return info.DType == "F8_E4M3" }

// FromE4M3 gives the values of a tensor of codes, of so many rows and slots,
// and by how much one may differ from what was rounded.
func FromE4M3(ckpt *safetensors.Checkpoint, tensor string, rows, slots int) (vals []float32, most float32, err error) {
	name := tensor + scaleSuffix
	info, ok := ckpt.Info(name)
	if !ok {
		return nil, 0, fmt.Errorf("%w: %s is F8_E4M3 without %s; its values are unknown by a factor", ErrFormat, tensor, name)
	}
	perSlot := len(info.Shape) == 2 && info.Shape[0] == rows && info.Shape[1] == slots
	if !perSlot && (len(info.Shape) != 1 || info.Shape[0] != rows) {
		return nil, 0, fmt.Errorf("%w: %s has shape %v; want a scale a token, [%d], or a token and slot, [%d %d]", ErrFormat, name, info.Shape, rows, rows, slots)
	}
	scales, err := ckpt.Float32s(name)
	if err != nil {
		return nil, 0, err
	}
	for i, scale := range scales {
		if !(scale > 0) || math.IsInf(float64(scale), 0) {
			return nil, 0, fmt.Errorf("%w: %s[%d] is %v; a scale is more than 0 and finite", ErrFormat, name, i, scale)
		}
	}
	codes, err := ckpt.Raw(tensor)
	if err != nil || len(scales) == 0 {
		return nil, 0, err
	}
	vals = make([]float32, len(codes))
	for i, code := range codes {
		scale := scales[i/(len(codes)/len(scales))]
		vals[i] = e4m3(code) * scale
		// Half of a step: a sixteenth of a value, or half of the smallest.
		most = max(most, float32(math.Max(math.Abs(float64(vals[i]))/16, float64(scale)/1024)))
	}
	return vals, most, nil
}

// e4m3 is the value of a code: a sign, four bits of exponent, three of
// fraction, no infinity, and NaN where all but the sign are ones.
func e4m3(code byte) float32 {
	exp, frac := int(code>>3&15), int(code&7)
	v := math.Ldexp(float64(frac), -9)
	if exp > 0 {
		v = math.Ldexp(float64(8+frac), exp-10)
	}
	if code&0x7f == 0x7f {
		v = math.NaN()
	}
	if code&0x80 != 0 {
		v = -v
	}
	return float32(v)
}
