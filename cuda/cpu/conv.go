package cpu

import "github.com/draftscope/draftscope/cuda"

// Conv implements [cuda.Device]: tap taps-1 multiplies the present row, tap 0
// the oldest.
func (d *Device) Conv(dst, x, w, history cuda.Tensor) error {
	if err := cuda.CheckConv(dst, x, w, history); err != nil {
		return err
	}
	var out, in, taps, past matrix
	if err := views("conv", operand{dst, &out}, operand{x, &in}, operand{w, &taps}, operand{history, &past}); err != nil {
		return err
	}
	if in.rows == 0 || in.cols == 0 {
		return nil
	}
	k := taps.cols
	// Taps by age, so that a row is built by whole-row sums.
	byTap := dense(k, in.cols)
	for c := range in.cols {
		for j, v := range taps.row(c) {
			byTap.row(j)[c] = v
		}
	}
	// source is the row t places after the first of x; t may be negative.
	source := func(t int) []float32 {
		if t < 0 {
			return past.row(past.rows + t)
		}
		return in.row(t)
	}
	ones := make([]float32, in.cols)
	for c := range ones {
		ones[c] = 1
	}
	d.rows(in.rows, in.cols*(k+8), func(lo, hi int) {
		sum := make([]float32, in.cols)
		for t := lo; t < hi; t++ {
			clear(sum)
			for j := range k {
				e, tap := source(t-k+1+j), byTap.row(j)
				for c := range sum {
					sum[c] += float32(tap[c] * e[c])
				}
			}
			kernels.gate(out.row(t), sum, ones, true)
		}
	})
	// Row i of the new history is row T+i of the old followed by x. Ascending
	// order reads every old row before it is overwritten.
	for i := range past.rows {
		copy(past.row(i), source(in.rows-past.rows+i))
	}
	return nil
}
