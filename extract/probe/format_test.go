package probe

import (
	"math"
	"slices"
	"testing"
)

func TestEveryHalfBecomesItsOwnFloat(t *testing.T) {
	for code := range 1 << 16 {
		h := uint16(code)
		got := float64(Half(h))
		exp, frac := int(h>>10)&0x1f, float64(h&0x3ff)
		want := math.Ldexp(1024+frac, exp-25)
		switch exp {
		case 0:
			want = math.Ldexp(frac, -24)
		case 0x1f:
			want = math.Inf(1)
			if frac != 0 {
				want = math.NaN()
			}
		}
		want = math.Copysign(want, 1-2*float64(h>>15))
		if got != want && !(math.IsNaN(got) && math.IsNaN(want)) {
			t.Fatalf("half %04x became %v, want %v", code, got, want)
		}
		if !math.IsNaN(got) && toHalf(Half(h)) != h {
			t.Fatalf("half %04x came back as %04x", code, toHalf(Half(h)))
		}
	}
}

func TestNotFiniteIsCountedInEveryFormat(t *testing.T) {
	for _, f := range formats {
		sign := f.exp + f.frac + 1
		for _, tt := range []struct {
			bits       uint32
			nans, infs int
		}{{0, 0, 0}, {f.exp, 0, 1}, {f.exp | f.frac, 1, 0}, {f.exp | 1, 1, 0}, {f.exp - 1, 0, 0}, {f.exp - f.frac - 1, 0, 0}, {f.frac, 0, 0}, {sign, 0, 0}, {sign | f.exp, 0, 1}, {sign | f.exp | f.frac, 1, 0}, {sign | f.frac, 0, 0}} {
			raw := make([]byte, 2*f.Size)
			for i := range f.Size {
				raw[f.Size+i] = byte(tt.bits >> (8 * i))
			}
			for n := range 5 { // values before and behind it, on all places of a word
				long := slices.Concat(make([]byte, n*f.Size), raw, make([]byte, (7-n)*f.Size))
				if got, want := f.finite(long), tt.nans+tt.infs == 0; got != want {
					t.Errorf("%s %x at %d: finite is %v", f.Name, tt.bits, n+1, got)
				}
				if got, want := f.finite(long[:(n+2)*f.Size]), tt.nans+tt.infs == 0; got != want {
					t.Errorf("%s %x at the end of %d: finite is %v", f.Name, tt.bits, n+2, got)
				}
			}
			if nans, infs := f.notFinite(raw); nans != tt.nans || infs != tt.infs {
				t.Errorf("%s %x: %d NaN, %d Inf; want %d, %d", f.Name, tt.bits, nans, infs, tt.nans, tt.infs)
			}
		}
	}
	if _, ok := FormatOf("fp8"); ok {
		t.Error("fp8 is known")
	}
}
