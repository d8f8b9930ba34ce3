//go:build cuda && cgo

package gpu

import (
	"math"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// NormRoPE implements [cuda.Device]; see kernels/normrope.cu.
func (d *Device) NormRoPE(dst cuda.Tensor, args cuda.NormRoPEArgs) error {
	if err := args.Check(dst); err != nil {
		return err
	}
	m, err := d.views("normrope", dst, args.X, args.W)
	if err != nil || dst.Rows == 0 {
		return err
	}
	return d.card.Do(func() error {
		at, err := d.params.send(bytesOf(args.Pos), bytesOf(d.frequencies(args.Rotary, args.Theta)))
		if err != nil {
			return err
		}
		const warps = 8
		g := driver.Grid{Blocks: [3]int{dst.Rows}, Threads: [3]int{32 * warps}, Shared: (args.Rotary + warps*args.HeadDim) * 4}
		return d.launch("normrope", "normrope_", g, m[0].at, m[0].stride, m[1].at, m[1].stride, args.Step, m[2].at, at[0], at[1],
			args.Heads, args.HeadDim, args.Rotary/2, args.Eps, args.Gain)
	})
}

// turning is what frequencies follow from.
type turning struct {
	rotary int
	theta  float64
}

// frequencies are the angles between neighbouring positions, one a pair.
func (d *Device) frequencies(rotary int, theta float64) []float64 {
	key := turning{rotary, theta}
	if freq := d.turns[key]; freq != nil {
		return freq
	}
	freq := make([]float64, rotary/2)
	for i := range freq {
		freq[i] = math.Pow(theta, -2*float64(i)/float64(rotary))
	}
	d.turns[key] = freq
	return freq
}
