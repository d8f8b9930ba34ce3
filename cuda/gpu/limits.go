//go:build cuda && cgo

package gpu

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// What Limits measures with.
const (
	limitsFast   = 8192    // of a product's matrices on cuBLASLt
	limitsPlain  = 2048    // on the plain kernels
	limitsCopied = 1 << 30 // bytes, many times what any card caches
)

// Limits implements [cuda.Device]. Operands are random: a card multiplies
// zeros faster.
func (d *Device) Limits() (l cuda.Limits, err error) {
	n := limitsPlain
	if d.blas != nil {
		n = limitsFast
	}
	values := limitsCopied / d.width
	buf, err := d.New(2 * values)
	if err != nil {
		return l, fmt.Errorf("measuring what %s can do: %w", d.card.Name, err)
	}
	defer func() {
		buf.Close()
		err = errors.Join(err, d.card.Do(func() error { return d.spare.drop(d.card) }))
	}()
	seed := make([]float32, 1<<20)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range seed {
		seed[i] = rng.Float32() - .5
	}
	if err := d.Upload(cuda.Matrix(buf, 1, len(seed)), seed); err != nil {
		return l, err
	}
	at := driver.Ptr(buf.(*buffer).at.Load())
	err = d.card.Do(func() error {
		for have := len(seed) * d.width; have < limitsCopied; have *= 2 {
			if err := d.card.Copy(at+driver.Ptr(have), at, have); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return l, err
	}
	// Three matrices fit into the first half, one after the other.
	m := cuda.Matrix(buf, 3*n, n)
	product, err := d.time(func() error { return d.Gemm(m.RowRange(2*n, 3*n), m.RowRange(0, n), m.RowRange(n, 2*n), false) })
	if err != nil {
		return l, err
	}
	copied, err := d.time(func() error {
		return d.card.Do(func() error { return d.card.Copy(at+limitsCopied, at, limitsCopied) })
	})
	cube := float64(n) * float64(n) * float64(n)
	return cuda.Limits{Flops: 2 * cube / product.Seconds(), Bytes: 2 * limitsCopied / copied.Seconds(), Width: d.width}, err
}

// time is the median of the device's time for what f starts.
func (d *Device) time(f func() error) (time.Duration, error) {
	var start, end *driver.Event
	err := d.card.Do(func() (err error) {
		if start, err = d.card.Event(); err == nil {
			end, err = d.card.Event()
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	took, err := cuda.Median(func() (t time.Duration, err error) {
		if err = d.card.Do(func() error { return d.card.Record(start) }); err != nil {
			return 0, err
		}
		if err = f(); err != nil {
			return 0, err
		}
		err = d.card.Do(func() error {
			err := errors.Join(d.card.Record(end), d.card.Wait())
			if err == nil {
				t, err = d.card.Since(start, end)
			}
			return err
		})
		return t, err
	})
	return took, errors.Join(err, d.card.Do(func() error { return errors.Join(d.card.Drop(start), d.card.Drop(end)) }))
}
