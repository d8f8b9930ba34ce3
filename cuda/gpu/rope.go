//go:build cuda && cgo

package gpu

import (
	"math"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// RoPE implements [cuda.Device]; see kernels/rope.cu.
func (d *Device) RoPE(x cuda.Tensor, pos []int32, headDim, rotary int, theta float64) error {
	if err := cuda.CheckRoPE(x, pos, headDim, rotary); err != nil {
		return err
	}
	m, err := d.views("rope", x)
	if err != nil || rotary == 0 || x.Rows == 0 || x.Cols == 0 {
		return err
	}
	half, freq := rotary/2, d.frequencies(rotary, theta)
	return d.card.Do(func() error {
		at, err := d.params.send(bytesOf(pos), bytesOf(freq))
		if err != nil {
			return err
		}
		g := driver.Grid{Blocks: [3]int{x.Rows}, Threads: [3]int{256}, Shared: rotary * 4}
		return d.launch("rope", "rope_", g, m[0].at, m[0].stride, at[0], at[1], x.Cols/headDim, headDim, half)
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
