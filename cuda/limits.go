package cuda

import (
	"fmt"
	"slices"
	"time"
)

// Work is what a computation cannot do without: floating-point operations, a
// multiplication and an addition counting as two, and values read from the
// device's memory or written there.
type Work struct {
	Flops, Values float64
}

// Add is the work of both, one after the other.
func (w Work) Add(more Work) Work {
	return Work{w.Flops + more.Flops, w.Values + more.Values}
}

// Limits is what a device reaches at its best, as [Device.Limits] measures it.
type Limits struct {
	Flops float64 // floating-point operations a second, in a large product
	Bytes float64 // bytes read and written a second, in a large copy
	Width int     // bytes of a value
}

// Floor is the time below which no version of some work falls: that of its
// arithmetic or that of its memory, whichever is longer.
func (l Limits) Floor(w Work) time.Duration {
	if l.Flops <= 0 || l.Bytes <= 0 {
		return 0
	}
	return time.Duration(float64(time.Second) * max(w.Flops/l.Flops, w.Values*float64(l.Width)/l.Bytes))
}

// String says the limits for people.
func (l Limits) String() string {
	if l.Flops >= 1e12 {
		return fmt.Sprintf("products at %.0f TFLOP/s, copies at %.2f TB/s", l.Flops/1e12, l.Bytes/1e12)
	}
	return fmt.Sprintf("products at %.0f GFLOP/s, copies at %.1f GB/s", l.Flops/1e9, l.Bytes/1e9)
}

// Median is the middle one of a few durations that f measures, after one that
// does not count.
func Median(f func() (time.Duration, error)) (time.Duration, error) {
	took := make([]time.Duration, 6)
	for i := range took {
		var err error
		if took[i], err = f(); err != nil {
			return 0, err
		}
	}
	took = took[1:]
	slices.Sort(took)
	return max(took[len(took)/2], 1), nil
}
