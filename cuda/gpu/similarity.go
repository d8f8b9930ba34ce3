//go:build cuda && cgo

package gpu

import (
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// similarityRows is how many rows are compared in one run.
const similarityRows = 1 << 16

// Similarity implements [cuda.Device]; see kernels/similarity.cu.
func (d *Device) Similarity(a, b cuda.Tensor) ([]cuda.Similarity, error) {
	if err := cuda.CheckSimilarity(a, b); err != nil {
		return nil, err
	}
	m, err := d.views("similarity", a, b)
	if err != nil {
		return nil, err
	}
	out := make([]cuda.Similarity, a.Rows)
	if a.Cols == 0 {
		for i := range out {
			out[i].Equal = true
		}
		return out, nil
	}
	whole := 1
	for _, x := range m {
		if x.at%16 != 0 || x.stride*d.width%16 != 0 {
			whole = 0
		}
	}
	return out, d.card.Do(func() error {
		for lo := 0; lo < a.Rows; lo += similarityRows {
			n := min(similarityRows, a.Rows-lo)
			x, y := d.rowRange(m[0], lo, lo+n), d.rowRange(m[1], lo, lo+n)
			sums := make([][6]float64, n)
			at, err := d.room("similarity", 48*n)
			if err != nil {
				return err
			}
			g := driver.Grid{Blocks: [3]int{n}, Threads: [3]int{256}}
			if err := d.launch("similarity", "similarity_", g, x.at, x.stride, y.at, y.stride, a.Cols, whole, at); err != nil {
				return err
			}
			if err := d.fetch([]fetched{{bytesOf(sums), at}}); err != nil {
				return err
			}
			for i, s := range sums {
				out[lo+i] = cuda.Similarity{Dot: s[0], SquaresA: s[1], SquaresB: s[2], SquaresDiff: s[3], MaxDiff: s[4], Equal: s[5] == 1}
			}
		}
		return nil
	})
}
