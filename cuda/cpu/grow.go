package cpu

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
)

// Grow implements [cuda.Device]. Room doubles, so that growing row by row
// copies each value about once.
func (d *Device) Grow(buf cuda.Buffer, n int) (cuda.Buffer, error) {
	if buf == nil {
		return d.New(n)
	}
	b, ok := buf.(*buffer)
	if !ok {
		return nil, fmt.Errorf("growing: %w: a %T, not of this device's memory", cuda.ErrShape, buf)
	}
	data := b.data.Load()
	switch {
	case data == nil:
		return nil, fmt.Errorf("growing: %w: a closed buffer", cuda.ErrShape)
	case n <= b.n:
		return b, nil
	case n > maxFloats:
		return nil, fmt.Errorf("growing to %d values: %w", n, cuda.ErrMemory)
	}
	grown := *data
	if n > cap(grown) {
		grown = aligned(max(n, min(2*cap(grown), maxFloats)))
		copy(grown, *data)
	}
	grown = grown[:n]
	b.data.Store(&grown)
	b.n = n
	return b, nil
}
