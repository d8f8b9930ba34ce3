// Package statefiletest makes vectors that look like captured states, for
// tests and benchmarks.
package statefiletest

import (
	"encoding/binary"
	"math"
	"math/rand/v2"

	"github.com/draftscope/draftscope/schemas"
)

// Like are n values as a residual stream has them: near gaussian, with
// channels of different scales, rounded to bf16 when asked.
func Like(rng *rand.Rand, n int, bf16 bool) []float32 {
	vals := make([]float32, n)
	for i := range vals {
		scale := math.Pow(10, 2*float64(i%64)/64-1)
		v := float32(rng.NormFloat64() * scale)
		if bf16 {
			v = math.Float32frombits((math.Float32bits(v) + 0x7fff) &^ 0xffff)
		}
		vals[i] = v
	}
	return vals
}

// Residual makes the states of a residual stream, [layers][tokens*hidden]
// values of dtype d: gaussian, channel scales over two decades, six outlier
// channels with a large mean, massive activations on the first two tokens and
// on one in a thousand others, and layers that add to those below.
func Residual(seed uint64, layers, tokens, hidden int, d schemas.DType) [][]byte {
	rng := rand.New(rand.NewPCG(seed, 0xd5))
	scale := make([]float64, hidden)
	mean := make([]float64, hidden)
	for i := range scale {
		scale[i] = math.Pow(10, 2*rng.Float64()-1)
	}
	outliers := rng.Perm(hidden)[:min(6, hidden)]
	for _, i := range outliers {
		mean[i] = (40 + 60*rng.Float64()) * []float64{-1, 1}[rng.IntN(2)]
	}
	massive := make([]bool, tokens)
	for t := range massive {
		massive[t] = t < 2 || rng.IntN(1000) == 0
	}
	acc := make([]float64, tokens*hidden)
	out := make([][]byte, layers)
	vals := make([]float32, hidden)
	for l := range out {
		for t := range tokens {
			row := acc[t*hidden : (t+1)*hidden]
			for i := range row {
				row[i] += rng.NormFloat64() * scale[i]
				v := row[i] + mean[i]
				if massive[t] && i == outliers[0] {
					v = 3000 + 100*rng.NormFloat64()
				}
				vals[i] = float32(v)
			}
			out[l] = d.AppendBytes(out[l], vals)
		}
	}
	return out
}

// Entropy is the order-0 entropy of b in bits a byte.
func Entropy(b []byte) float64 {
	var counts [256]float64
	for _, v := range b {
		counts[v]++
	}
	var h float64
	for _, c := range counts {
		if c > 0 {
			p := c / float64(len(b))
			h -= p * math.Log2(p)
		}
	}
	return h
}

// Floor is what bf16 values take when each of their two bytes takes its
// order-0 entropy, in bytes, and the two entropies in bits.
func Floor(states ...[]byte) (size, low, high float64) {
	var l, h []byte
	for _, raw := range states {
		for ; len(raw) >= 2; raw = raw[2:] {
			v := binary.LittleEndian.Uint16(raw)
			l, h = append(l, byte(v)), append(h, byte(v>>8))
		}
	}
	low, high = Entropy(l), Entropy(h)
	return float64(len(l)) * (low + high) / 8, low, high
}
