package safetensors

import (
	"math"
	"testing"
)

// TestEveryHalfIsConvertedExactly holds all 65,536 codes against the
// definition of the format, computed in float64.
func TestEveryHalfIsConvertedExactly(t *testing.T) {
	for code := range 1 << 16 {
		h := uint16(code)
		sign, exp, frac := 1-2*float64(h>>15), int(h>>10)&31, float64(h&1023)
		var want float64
		switch exp {
		case 0:
			want = sign * math.Ldexp(frac, -24)
		case 31:
			want = sign * math.Inf(1)
			if frac != 0 {
				want = math.NaN()
			}
		default:
			want = sign * math.Ldexp(1024+frac, exp-25)
		}
		got := halfToFloat(h)
		if math.IsNaN(want) {
			if got == got {
				t.Fatalf("half %#04x is %v, want NaN", h, got)
			}
			continue
		}
		if float64(got) != want || math.Signbit(float64(got)) != (h>>15 == 1) {
			t.Fatalf("half %#04x is %v, want %v", h, got, want)
		}
	}
	if got := halfToFloat(1); got != 0x1p-24 {
		t.Errorf("the smallest subnormal is %v, want 2^-24", got)
	}
}

func TestEveryBF16CodeKeepsItsBits(t *testing.T) {
	raw := make([]byte, 2<<16)
	for code := range 1 << 16 {
		raw[2*code], raw[2*code+1] = byte(code), byte(code>>8)
	}
	vals := make([]float32, 1<<16)
	if err := floats(vals, raw, BF16); err != nil {
		t.Fatal(err)
	}
	for code, v := range vals {
		if got := math.Float32bits(v); got != uint32(code)<<16 {
			t.Fatalf("bf16 %#04x reads %#08x", code, got)
		}
	}
}
