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
	table := d.rotations(pos, rotary, theta)
	d.rows(m.rows, m.cols*2, func(lo, hi int) {
		for t := lo; t < hi; t++ {
			heads := m.row(t)
			for h := 0; h < len(heads); h += headDim {
				table.turn(heads[h:h+headDim], t)
			}
		}
	})
	return nil
}

// rotations are the cosines and sines of rows' positions.
type rotations struct {
	half  int
	at    []int     // row to entry
	table []float32 // half cosines, half sines an entry
}

// rotations has one entry for each position: blocks of many anchors repeat few.
func (d *Device) rotations(pos []int32, rotary int, theta float64) rotations {
	half := rotary / 2
	freq := make([]float64, half)
	for i := range freq {
		freq[i] = math.Pow(theta, -2*float64(i)/float64(rotary))
	}
	entry := make(map[int32]int)
	var distinct []int32
	r := rotations{half: half, at: make([]int, len(pos))}
	for t, p := range pos {
		e, ok := entry[p]
		if !ok {
			e = len(distinct)
			entry[p] = e
			distinct = append(distinct, p)
		}
		r.at[t] = e
	}
	r.table = make([]float32, len(distinct)*rotary)
	d.rows(len(distinct), half*32, func(lo, hi int) {
		for e := lo; e < hi; e++ {
			row := r.table[e*rotary : (e+1)*rotary]
			for i, f := range freq {
				sin, cos := math.Sincos(float64(distinct[e]) * f)
				row[i], row[half+i] = float32(cos), float32(sin)
			}
		}
	})
	return r
}

// turn rotates a head of row t.
func (r rotations) turn(head []float32, t int) {
	row := r.table[r.at[t]*2*r.half:][:2*r.half]
	cos, sin := row[:r.half], row[r.half:]
	a, b := head[:r.half], head[r.half:2*r.half]
	for i, c := range cos {
		u, v := a[i], b[i]
		a[i] = float32(u*c) - float32(v*sin[i])
		b[i] = float32(v*c) + float32(u*sin[i])
	}
}
