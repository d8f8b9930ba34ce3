//go:build cuda && cgo

package driver

//#include <cuda.h>
import "C"

import (
	"fmt"
	"strings"
	"time"
	"unsafe"

	"gorgonia.org/cu"
)

// c is the card's stream as C sees it. cu.Stream holds one CUstream.
func (c *Card) c() C.CUstream { return *(*C.CUstream)(unsafe.Pointer(&c.stream)) }

// Stream is the handle of the card's stream, for libraries that launch
// kernels of their own.
func (c *Card) Stream() uintptr { return uintptr(unsafe.Pointer(c.c())) }

// Wait returns when everything that was started on the card's stream has
// ended, on the thread. A kernel that failed is reported here.
func (c *Card) Wait() error {
	err := failed(C.cuStreamSynchronize(c.c()), "running %s on %s", c.launched(), c.Name)
	c.recent = c.recent[:0]
	return err
}

// launched names what Wait waits for.
func (c *Card) launched() string {
	if len(c.recent) == 0 {
		return "copies"
	}
	return "kernels " + strings.Join(c.recent, ", ")
}

// Event is a point in a stream, to wait for or to measure time at.
type Event struct{ ev cu.Event }

// Event makes an event, on the thread.
func (c *Card) Event() (*Event, error) {
	ev, err := cu.MakeEvent(cu.DefaultEvent)
	if err != nil {
		return nil, fmt.Errorf("making an event: %w", err)
	}
	return &Event{ev}, nil
}

// Record puts e at the present end of the card's stream, on the thread.
func (c *Card) Record(e *Event) error {
	if err := e.ev.Record(c.stream); err != nil {
		return fmt.Errorf("recording an event: %w", err)
	}
	return nil
}

// WaitFor returns when the stream has passed e, on the thread.
func (c *Card) WaitFor(e *Event) error {
	return failed(C.cuEventSynchronize(*(*C.CUevent)(unsafe.Pointer(&e.ev))), "running %s on %s", c.launched(), c.Name)
}

// Since is the device's time between two events that have passed, on the
// thread.
func (c *Card) Since(start, end *Event) (time.Duration, error) {
	ms, err := start.ev.Elapsed(end.ev)
	if err != nil {
		return 0, fmt.Errorf("measuring between events: %w", err)
	}
	return time.Duration(ms * float64(time.Millisecond)), nil
}

// Drop destroys e, on the thread.
func (c *Card) Drop(e *Event) error {
	if err := cu.DestroyEvent(&e.ev); err != nil {
		return fmt.Errorf("destroying an event: %w", err)
	}
	return nil
}
