package cpu

import "math"

// Constants of exp: e^x = 2^n·e^r with n the nearest integer to x/ln 2, and r
// at most ln 2 / 2, where a polynomial of degree 6 is right to a rounding.
const (
	expLog2e = 1.44269504088896341
	expHigh  = 0.693359375             // ln 2 in few bits: n·expHigh is exact
	expLow   = -2.12194440054690583e-4 // ln 2 - expHigh
	expRound = 3 << 22                 // adding it drops the fraction bits
	expMin   = -87.3                   // below, e^x is taken as 0
	expMax   = 88                      // above, 2^n itself nears the end of float32
	expC2    = 5.0000001201e-1
	expC3    = 1.6666665459e-1
	expC4    = 4.1665795894e-2
	expC5    = 8.3334519073e-3
	expC6    = 1.3981999507e-3
	expC7    = 1.9875691500e-4
)

// exp is e^x with a relative error below 2e-7. Results that float32 could
// only hold without full precision (x < -87.3) are 0.
func exp(x float32) float32 {
	if !(x >= expMin) {
		if x < expMin {
			return 0
		}
		return x // NaN
	}
	if x > expMax {
		return float32(math.Exp(float64(x)))
	}
	shifted := float32(x*expLog2e) + expRound
	n := shifted - expRound
	r := x - float32(n*expHigh) - float32(n*expLow)
	p := (((((expC7*r+expC6)*r+expC5)*r+expC4)*r+expC3)*r+expC2)*(r*r) + r + 1
	bits := math.Float32bits(shifted)<<23 + 0x3f800000
	return p * math.Float32frombits(bits)
}
