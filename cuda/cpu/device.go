// Package cpu runs the operations of [cuda.Device] on the processor. It is the
// backend that is always built, and the readable statement of what every
// operation means.
//
// The few loops that take the time (see kernel.go) exist twice: in Go on
// gonum's vectors, and for AVX2 in assembly, about four times as fast. The
// second is used where the processor allows, and left out by the build tag
// purego. Their last bits differ; each keeps the promise that follows.
//
// Every result is a pure function of its own row: neither the number of rows
// in a call, nor the number of threads, nor where in memory an operand lies
// changes a single bit. Products therefore go through one kernel that sums
// over the whole of K in one fixed order (see kernel.go), and work is split
// among goroutines only along rows, columns and heads, never along a sum.
package cpu

import (
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/draftscope/draftscope/cuda"
)

// maxFloats bounds one allocation (1 TiB), so that a mistaken size is an
// error and not a panic of the runtime.
const maxFloats = 1 << 38

// Config says how a [Device] runs. The zero value uses every processor.
type Config struct {
	// Threads is how many goroutines share one operation; 0 means GOMAXPROCS.
	Threads int
}

// Validate reports a Config that cannot be meant.
func (c Config) Validate() error {
	if c.Threads < 0 {
		return fmt.Errorf("cpu threads: %d is negative; use 0 for all processors", c.Threads)
	}
	return nil
}

// Device is the backend on the processor. Like every [cuda.Device] it serves one
// caller at a time; distinct devices may be used at once.
type Device struct {
	threads int
	limits  headLimits
}

var _ cuda.Device = (*Device)(nil)

// New returns a device that runs cfg.Threads goroutines.
func New(cfg Config) (*Device, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	threads := cfg.Threads
	if threads == 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	return &Device{threads: threads, limits: defaultLimits}, nil
}

// Name implements [cuda.Device].
func (d *Device) Name() string {
	plural := "s"
	if d.threads == 1 {
		plural = ""
	}
	return fmt.Sprintf("cpu %s (%d thread%s)", kernelName(), d.threads, plural)
}

// Close implements [cuda.Device]; there is nothing to give back.
func (d *Device) Close() error { return nil }

// buffer is host memory. data is nil once closed; close may come from
// another goroutine than the calls, as finalisers and defers do.
type buffer struct {
	n    int
	data atomic.Pointer[[]float32]
}

// Len implements [cuda.Buffer].
func (b *buffer) Len() int { return b.n }

// Close implements [cuda.Buffer].
func (b *buffer) Close() { b.data.Store(nil) }

// New implements [cuda.Device]. The memory is zeroed and 64-byte aligned.
func (d *Device) New(n int) (cuda.Buffer, error) {
	if n < 0 {
		return nil, fmt.Errorf("allocating %d values: %w", n, cuda.ErrShape)
	}
	if n > maxFloats {
		return nil, fmt.Errorf("allocating %d values: %w", n, cuda.ErrMemory)
	}
	b := &buffer{n: n}
	data := aligned(n)
	b.data.Store(&data)
	return b, nil
}

// Upload implements [cuda.Device].
func (d *Device) Upload(dst cuda.Tensor, src []float32) error {
	if err := cuda.CheckCopy("upload", dst, len(src)); err != nil {
		return err
	}
	m, err := view("upload", dst)
	if err != nil {
		return err
	}
	for i := range m.rows {
		copy(m.row(i), src[i*m.cols:])
	}
	return nil
}

// Download implements [cuda.Device].
func (d *Device) Download(dst []float32, src cuda.Tensor) error {
	if err := cuda.CheckCopy("download", src, len(dst)); err != nil {
		return err
	}
	m, err := view("download", src)
	if err != nil {
		return err
	}
	for i := range m.rows {
		copy(dst[i*m.cols:], m.row(i))
	}
	return nil
}
