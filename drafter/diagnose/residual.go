package diagnose

import (
	"fmt"
	"math"
)

// How noise is told from what another computation leaves, see [residual.drawn]
// and [residual.even]. Values that are drawn have a mean of zero but for their
// number; a share of 2 % that is alike in all rows is allowed beside that.
const (
	systematicMost = 0.02
	unevenMost     = 0.05 // of a variance, over channels and over rows
	alike          = 0.1  // a correlation of two states' residuals
	same           = 0.95 // the same
)

// residual describes stored minus recomputed.
type residual struct {
	sum2, sum4, n, most, ref2 float64
	rows, rowSquares          float64   // rows, and the sum of their squared sums of squares
	mean, square              []float64 // by channel: sums, and sums of squares
}

func (r residual) rms() float64      { return math.Sqrt(r.sum2 / math.Max(r.n, 1)) }
func (r residual) kurtosis() float64 { return r.sum4 * r.n / math.Max(r.sum2*r.sum2, 1e-300) }

// bounded recognises uniform noise, which no arithmetic makes: no value is
// beyond √3 of the mean square, and the kurtosis is that of a box.
func (r residual) bounded() bool {
	return r.sum2 > 0 && r.most < 1.8*r.rms() && math.Abs(r.kurtosis()-1.8) < 0.15
}

// shape names the noise by its kurtosis: 1.8 uniform, 3 Gaussian.
func (r residual) shape() string {
	switch k := r.kurtosis(); {
	case math.Abs(k-1.8) < 0.15:
		return fmt.Sprintf("uniform in ±%.3g", r.rms()*math.Sqrt(3))
	case math.Abs(k-3) < 0.3:
		return fmt.Sprintf("Gaussian of %.3g", r.rms())
	}
	return fmt.Sprintf("of rms %.3g (kurtosis %.1f)", r.rms(), r.kurtosis())
}

func (r *residual) add(stored, clean []float32, width int) {
	if r.mean == nil {
		r.mean, r.square = make([]float64, width), make([]float64, width)
	}
	row := 0.0
	for i, v := range stored {
		d := float64(v) - float64(clean[i])
		r.sum2 += d * d
		r.sum4 += d * d * d * d
		r.most = math.Max(r.most, math.Abs(d))
		r.ref2 += float64(clean[i]) * float64(clean[i])
		r.n++
		r.mean[i%width] += d
		r.square[i%width] += d * d
		if row += d * d; i%width == width-1 {
			r.rows++
			r.rowSquares += row * row
			row = 0
		}
	}
}

// systematic is the share of the squared residual that is alike in all rows;
// of values that are drawn it is one part in rows.
func (r residual) systematic() float64 {
	var s float64
	for _, m := range r.mean {
		s += m * m / (r.rows * r.rows)
	}
	return s / math.Max(r.sum2/r.rows, 1e-300)
}

// drawn says that no part of it is alike in all rows.
func (r residual) drawn() bool {
	return r.systematic() < math.Max(systematicMost, 20/r.rows)
}

// even says that it is of the same size in all rows and in all channels, but
// for what so many draws of its kurtosis differ by.
func (r residual) even() bool {
	width := float64(len(r.mean))
	spread := func(sum, squares, n, draws float64) float64 {
		return squares*n/(sum*sum) - 1 - (r.kurtosis()-1)/draws
	}
	var squares float64
	for _, v := range r.square {
		squares += v * v
	}
	return spread(r.sum2, squares, width, r.rows) < unevenMost && spread(r.sum2, r.rowSquares, r.rows, width) < unevenMost
}

// likeness is the correlation of two states' residuals, over the sequences in
// which neither is explained.
func (s *study) likeness(a, b int, found map[int][]verdictOf) float64 {
	var dot, aa, bb float64
	for i, q := range s.seqs {
		if found[a][i].kind != unexplained || found[b][i].kind != unexplained {
			continue
		}
		for j := range q.States[a] {
			x, y := float64(q.States[a][j])-float64(q.clean[a][j]), float64(q.States[b][j])-float64(q.clean[b][j])
			dot, aa, bb = dot+x*y, aa+x*x, bb+y*y
		}
	}
	return math.Abs(dot) / math.Max(math.Sqrt(aa*bb), 1e-300)
}
