package cpu

import (
	"math"

	"github.com/draftscope/draftscope/cuda"
)

// NormRoPE implements [cuda.Device]: each head has the bits of RMSNorm, turned.
// Pair i of a head is dims i and i+Rotary/2; its angle is pos·Theta^(-2i/Rotary),
// taken in float64 and rounded only as cosine and sine.
func (d *Device) NormRoPE(dst cuda.Tensor, args cuda.NormRoPEArgs) error {
	if err := args.Check(dst); err != nil {
		return err
	}
	var out, in, weight matrix
	if err := views("normrope", operand{dst, &out}, operand{args.X, &in}, operand{args.W, &weight}); err != nil || in.rows == 0 {
		return err
	}
	dim, scale := args.HeadDim, gains(weight.row(0), args.Gain)
	table := d.rotations(args.Pos, args.Rotary, args.Theta)
	d.rows(in.rows, out.cols*4, func(lo, hi int) {
		for t := lo; t < hi; t++ {
			from, to := in.row(t), out.row(t)
			for h := range args.Heads {
				head := to[h*dim : (h+1)*dim]
				rmsnorm(head, from[h*args.Step:][:dim], scale, args.Eps)
				table.turn(head, t)
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
