package cpu

import (
	"math"

	"github.com/draftscope/draftscope/cuda"
)

// Similarity implements [cuda.Device].
func (d *Device) Similarity(a, b cuda.Tensor) ([]cuda.Similarity, error) {
	if err := cuda.CheckSimilarity(a, b); err != nil {
		return nil, err
	}
	var x, y matrix
	if err := views("similarity", operand{a, &x}, operand{b, &y}); err != nil {
		return nil, err
	}
	out := make([]cuda.Similarity, a.Rows)
	if a.Cols == 0 {
		for i := range out {
			out[i].Equal = true
		}
		return out, nil
	}
	d.rows(x.rows, 4*x.cols, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			out[i] = similarity(x.row(i), y.row(i))
		}
	})
	return out, nil
}

// similarity compares two vectors, each sum in the order of their values.
func similarity(a, b []float32) cuda.Similarity {
	s := cuda.Similarity{Equal: true}
	for i, v := range a {
		x, y := float64(v), float64(b[i])
		s.Dot += x * y
		s.SquaresA += x * x
		s.SquaresB += y * y
		s.SquaresDiff += (x - y) * (x - y)
		s.MaxDiff = math.Max(s.MaxDiff, math.Abs(x-y))
		s.Equal = s.Equal && math.Float32bits(v) == math.Float32bits(b[i])
	}
	return s
}
