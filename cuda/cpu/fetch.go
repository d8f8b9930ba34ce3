package cpu

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/draftscope/draftscope/cuda"
)

// DType implements [cuda.Device].
func (d *Device) DType() cuda.DType { return cuda.F32 }

// Load implements [cuda.Device].
func (d *Device) Load(dst cuda.Tensor, src []byte, as cuda.DType) error {
	if err := cuda.CheckLoad(dst, src, as); err != nil {
		return err
	}
	m, err := view("load", dst)
	if err != nil {
		return err
	}
	for i := range m.rows {
		row := m.row(i)
		for c := range row {
			at := src[(i*m.cols+c)*as.Size():]
			if as == cuda.BF16 {
				row[c] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(at)) << 16)
			} else {
				row[c] = math.Float32frombits(binary.LittleEndian.Uint32(at))
			}
		}
	}
	return nil
}

// flight is a copy that was over at once.
type flight []int32

// Wait implements [cuda.Flight].
func (f flight) Wait() ([]int32, error) { return f, nil }

// Fetch implements [cuda.Device].
func (d *Device) Fetch(src cuda.Tensor, as cuda.DType, to []cuda.Landing) (cuda.Flight, error) {
	if err := cuda.CheckFetch(src, as, to); err != nil {
		return nil, err
	}
	m, err := view("fetch", src)
	if err != nil {
		return nil, err
	}
	odd := make(flight, m.rows)
	for i := range m.rows {
		for _, v := range m.row(i) {
			odd[i] += odd1(bitsAs(v, as))
		}
	}
	for _, l := range to {
		out := l.To[:0]
		for i := l.Lo; i < l.Hi; i++ {
			for _, v := range m.row(i) {
				if bits := bitsAs(v, as); as == cuda.BF16 {
					out = binary.LittleEndian.AppendUint16(out, uint16(bits>>16))
				} else {
					out = binary.LittleEndian.AppendUint32(out, bits)
				}
			}
		}
	}
	return odd, nil
}

// bitsAs is v in a dtype, as the bits of a float32. A NaN stays one.
func bitsAs(v float32, as cuda.DType) uint32 {
	bits := math.Float32bits(v)
	switch {
	case as == cuda.F32:
	case v != v:
		bits |= 1 << 22
	default:
		bits += 0x7fff + bits>>16&1
		bits &^= 0xffff
	}
	return bits
}

// odd1 is 1 for the bits of NaN and of the infinities.
func odd1(bits uint32) int32 {
	if bits&0x7f800000 == 0x7f800000 {
		return 1
	}
	return 0
}

// HostAlloc implements [cuda.Device]: all memory is the host's.
func (d *Device) HostAlloc(n int) ([]byte, error) {
	if n < 0 || n > 4*maxFloats {
		return nil, fmt.Errorf("allocating %d bytes of host memory: %w", n, cuda.ErrMemory)
	}
	return make([]byte, n), nil
}

// HostFree implements [cuda.Device].
func (d *Device) HostFree([]byte) {}
