//go:build cuda && cgo

package driver

import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"sync"

	"github.com/draftscope/draftscope/cuda"
	"gorgonia.org/cu"
)

// Card is one device, with a stream of its own in the device's primary
// context. All cards of one device share that context, and so can read each
// other's memory.
//
// Methods marked "on the thread" may only be called from a function that runs
// in [Card.Do], which holds one thread and the context on it.
type Card struct {
	Name      string // "NVIDIA H200"
	Index     int    // as CUDA counts devices
	Major     int    // compute capability
	Minor     int
	SMs       int   // multiprocessors
	MaxShared int   // bytes of shared memory that one block may ask for
	Total     int64 // bytes of memory
	Page      int   // bytes that [Card.Extend] maps at the least, 0 where it cannot
	Driver    string

	device  cu.Device
	context cu.CUContext
	stream  cu.Stream
	modules map[string]*Module
	recent  []string // kernels launched since the last wait
	lost    error    // set once the context is lost
	data    []uint64 // arguments of the last launch
	offsets []C.uint

	mu     sync.Mutex // held by Do
	closed bool
}

// errClosed is what a closed card answers.
var errClosed = errors.New("the CUDA device is closed")

// Open starts the driver and opens device index.
func Open(index int) (*Card, error) {
	if err := load(); err != nil {
		return nil, err
	}
	c := &Card{Index: index, modules: map[string]*Module{}}
	if err := c.Do(c.open); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// Do runs f, held to one thread with the card's context current on it, and
// returns its error. Calls from several goroutines take turns. It costs a
// fraction of a microsecond: a thread of the card's own would add a wake-up to
// each operation.
func (c *Card) Do(f func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errClosed
	}
	return c.do(f)
}

// do is Do of a card that the caller has locked.
func (c *Card) do(f func() error) error {
	if c.lost != nil {
		return c.lost
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if c.context != (cu.CUContext{}) {
		if err := cu.SetCurrentContext(c.context); err != nil {
			return fmt.Errorf("entering the context of %s: %w", c.Name, err)
		}
	}
	err := f()
	var failure *Error
	if errors.As(err, &failure) && failure.Fatal() {
		c.lost = fmt.Errorf("CUDA device %d is lost to this process, run again, or use --backend cpu: %w", c.Index, err)
	}
	return err
}

// open fills c in, on the thread.
func (c *Card) open() (err error) {
	n, err := cu.NumDevices()
	if err != nil {
		return fmt.Errorf("counting CUDA devices: %w", err)
	}
	if c.Index >= n {
		return fmt.Errorf("%w: there is no CUDA device %d, the machine has %d; choose another, or use --backend cpu", cuda.ErrUnavailable, c.Index, n)
	}
	if c.device, err = cu.GetDevice(c.Index); err != nil {
		return fmt.Errorf("finding CUDA device %d: %w", c.Index, err)
	}
	if c.Name, err = c.device.Name(); err != nil {
		return fmt.Errorf("naming CUDA device %d: %w", c.Index, err)
	}
	c.Driver = versionString(cu.Version())
	for _, a := range []struct {
		what cu.DeviceAttribute
		to   *int
	}{
		{cu.ComputeCapabilityMajor, &c.Major},
		{cu.ComputeCapabilityMinor, &c.Minor},
		{cu.MultiprocessorCount, &c.SMs},
		{maxSharedOptin, &c.MaxShared},
	} {
		if *a.to, err = c.device.Attribute(a.what); err != nil {
			return fmt.Errorf("reading attribute %d of %s: %w", a.what, c.Name, err)
		}
	}
	if c.Major < MinMajor {
		return fmt.Errorf("%w: %s has compute capability %d.%d, this program needs %d.0 (Ampere or later); use another device, or --backend cpu",
			cuda.ErrUnavailable, c.Name, c.Major, c.Minor, MinMajor)
	}
	if c.Total, err = c.device.TotalMem(); err != nil {
		return fmt.Errorf("reading the memory of %s: %w", c.Name, err)
	}
	if c.Page, err = c.pageSize(); err != nil {
		return err
	}
	if c.context, err = c.device.RetainPrimaryCtx(); err != nil {
		return fmt.Errorf("%w: opening a context on %s: %w; another program may hold the device (nvidia-smi), or its memory is full", cuda.ErrUnavailable, c.Name, err)
	}
	if err := cu.SetCurrentContext(c.context); err != nil {
		return fmt.Errorf("entering the context of %s: %w", c.Name, err)
	}
	if c.stream, err = cu.MakeStream(cu.NonBlocking); err != nil {
		return fmt.Errorf("making a stream on %s: %w", c.Name, err)
	}
	return nil
}

// Close waits for the work under way, and gives the device back. Memory of
// the card must be freed before. A second call does nothing.
func (c *Card) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	return c.do(func() error {
		var errs []error
		if c.stream != (cu.Stream{}) {
			errs = append(errs, c.Wait())
			for _, m := range c.modules {
				errs = append(errs, m.unload())
			}
			errs = append(errs, c.stream.Destroy(), c.device.ReleasePrimaryCtx())
		}
		return errors.Join(errs...)
	})
}
