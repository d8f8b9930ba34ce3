package cpu

import (
	"math"

	"github.com/draftscope/draftscope/cuda"
)

// RoPE implements [cuda.Device]. Pair i of a head is dims i and
// i+rotary/2; its angle is pos·theta^(-2i/rotary), taken in float64 and
// rounded only as cosine and sine.
func (d *Device) RoPE(x cuda.Tensor, pos []int32, headDim, rotary int, theta float64) error {
	if err := cuda.CheckRoPE(x, pos, headDim, rotary); err != nil {
		return err
	}
	m, err := view("rope", x)
	if err != nil {
		return err
	}
	if rotary == 0 || m.rows == 0 || m.cols == 0 {
		return nil
	}
	half := rotary / 2
	freq := make([]float64, half)
	for i := range freq {
		freq[i] = math.Pow(theta, -2*float64(i)/float64(rotary))
	}
	// Blocks of many anchors repeat few positions: one table entry for each.
	entry := make(map[int32]int)
	var distinct []int32
	at := make([]int, len(pos))
	for t, p := range pos {
		e, ok := entry[p]
		if !ok {
			e = len(distinct)
			entry[p] = e
			distinct = append(distinct, p)
		}
		at[t] = e
	}
	table := make([]float32, len(distinct)*rotary) // half cosines, half sines
	d.rows(len(distinct), half*32, func(lo, hi int) {
		for e := lo; e < hi; e++ {
			row := table[e*rotary : (e+1)*rotary]
			for i, f := range freq {
				sin, cos := math.Sincos(float64(distinct[e]) * f)
				row[i], row[half+i] = float32(cos), float32(sin)
			}
		}
	})
	d.rows(m.rows, m.cols*2, func(lo, hi int) {
		for t := lo; t < hi; t++ {
			row := table[at[t]*rotary : (at[t]+1)*rotary]
			cos, sin := row[:half], row[half:]
			heads := m.row(t)
			for h := 0; h < len(heads); h += headDim {
				a, b := heads[h:h+half], heads[h+half:h+rotary]
				for i, c := range cos {
					u, v := a[i], b[i]
					a[i] = float32(u*c) - float32(v*sin[i])
					b[i] = float32(v*c) + float32(u*sin[i])
				}
			}
		}
	})
	return nil
}
