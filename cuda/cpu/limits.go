package cpu

import (
	"time"

	"github.com/draftscope/draftscope/cuda"
)

// Limits implements [cuda.Device].
func (d *Device) Limits() (cuda.Limits, error) {
	const n = 512          // of a product's matrices, which fit into a cache
	const copied = 1 << 23 // values, which do not
	a, w, dst := dense(n, n), dense(n, n), dense(n, n)
	for i := range a.data {
		a.data[i], w.data[i] = float32(i%251)/251, float32(i%241)/241
	}
	product, err := cuda.Median(timed(func() { d.product(dst, a, w, false) }))
	if err != nil {
		return cuda.Limits{}, err
	}
	from, to := aligned(copied), aligned(copied)
	move, err := cuda.Median(timed(func() {
		d.rows(copied, 1, func(lo, hi int) { copy(to[lo:hi], from[lo:hi]) })
	}))
	return cuda.Limits{Flops: 2 * n * n * n / product.Seconds(), Bytes: 2 * 4 * copied / move.Seconds(), Width: 4}, err
}

// timed measures f.
func timed(f func()) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		start := time.Now()
		f()
		return time.Since(start), nil
	}
}
