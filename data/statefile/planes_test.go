package statefile

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"
)

// Lengths on both sides of the blocks that the vector loops take, at every
// address within a word.
func TestVectorLoopsEqualPlainOnesBitForBit(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 256, 5120, 5133} {
		for off := range 9 {
			space := make([]byte, 2*n+off)
			for i := range space {
				space[i] = byte(rng.Uint32())
			}
			src := space[off:]
			low, high := bytes.Repeat([]byte{0xa5}, n+1), bytes.Repeat([]byte{0xa5}, n+1)
			wantLow, wantHigh := bytes.Clone(low), bytes.Clone(high)
			splitBF16(low[:n], high[:n], src)
			splitPlain(wantLow[:n], wantHigh[:n], src)
			if !bytes.Equal(low, wantLow) || !bytes.Equal(high, wantHigh) {
				t.Errorf("%d values at %d are split otherwise", n, off)
			}
			for i := range n {
				if low[i] != src[2*i] || high[i] != src[2*i+1] {
					t.Fatalf("value %d of %d is %02x%02x, was split to %02x and %02x", i, n, src[2*i+1], src[2*i], high[i], low[i])
				}
			}
			for i := range n { // finite values, of all magnitudes
				src[2*i+1] &^= 0x40
			}
			var plain [8]float64
			squaresPlain(&plain, src)
			want := plain[0] + plain[1] + (plain[2] + plain[3]) + (plain[4] + plain[5] + (plain[6] + plain[7]))
			if got := sumBF16(src); math.Float64bits(got) != math.Float64bits(want) {
				t.Errorf("squares of %d values at %d sum to %v, want %v", n, off, got, want)
			}
		}
	}
}

func BenchmarkPlanes(b *testing.B) {
	src := make([]byte, 10_240)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range src {
		src[i] = byte(rng.Uint32()) &^ 0x40
	}
	low, high := make([]byte, len(src)/2), make([]byte, len(src)/2)
	for _, c := range []struct {
		name string
		f    func()
	}{
		{"split", func() { splitBF16(low, high, src) }},
		{"split plain", func() { splitPlain(low, high, src) }},
		{"squares", func() { sumBF16(src) }},
		{"squares plain", func() { squaresPlain(new([8]float64), src) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(src)))
			for b.Loop() {
				c.f()
			}
		})
	}
}
