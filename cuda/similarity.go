package cuda

import "math"

// Similarity is what one pass over a row of two matrices finds, summed in
// float64. NaN in either row comes through in every number.
type Similarity struct {
	Dot                  float64 // Σ a·b
	SquaresA, SquaresB   float64 // Σ a², Σ b²
	SquaresDiff, MaxDiff float64 // Σ (a−b)², max |a−b|
	Equal                bool    // bit for bit
}

// Norms are the lengths of the two rows.
func (s Similarity) Norms() (a, b float64) { return math.Sqrt(s.SquaresA), math.Sqrt(s.SquaresB) }

// Cosine is that of the angle between the rows; a row of zeros has none.
func (s Similarity) Cosine() (c float64, ok bool) {
	if s.SquaresA == 0 || s.SquaresB == 0 {
		return 0, false
	}
	return min(max(s.Dot/math.Sqrt(s.SquaresA*s.SquaresB), -1), 1), true
}

// RelL2 is the distance of b from a in lengths of a; a row of zeros has none.
func (s Similarity) RelL2() (r float64, ok bool) {
	if s.SquaresA == 0 {
		return 0, false
	}
	return math.Sqrt(s.SquaresDiff / s.SquaresA), true
}

// CheckSimilarity checks the operands of [Device.Similarity].
func CheckSimilarity(a, b Tensor) error {
	const op = "similarity"
	if err := valid(op, operand{"a", a}, operand{"b", b}); err != nil {
		return err
	}
	if a.Rows != b.Rows || a.Cols != b.Cols {
		return shapeError(op, "a %s, b %s: want one shape", a, b)
	}
	return nil
}
