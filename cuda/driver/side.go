//go:build cuda && cgo

package driver

//#include <cuda.h>
import "C"

import (
	"fmt"
	"unsafe"

	"gorgonia.org/cu"
)

// Side is a second stream, for copies to the host that run beside the card's
// work. Its methods are called on the card's thread.
type Side struct {
	card   *Card
	stream cu.Stream
}

// Side makes a stream, on the thread.
func (c *Card) Side() (*Side, error) {
	stream, err := cu.MakeStream(cu.NonBlocking)
	if err != nil {
		return nil, fmt.Errorf("making a second stream on %s: %w", c.Name, err)
	}
	return &Side{c, stream}, nil
}

// Wait returns when the copies under way have ended.
func (s *Side) Wait() error {
	return failed(C.cuStreamSynchronize(s.c()), "copying on %s", s.card.Name)
}

// Close waits, and ends the stream.
func (s *Side) Close() error {
	if err := s.Wait(); err != nil {
		return err
	}
	if err := s.stream.Destroy(); err != nil {
		return fmt.Errorf("ending the second stream of %s: %w", s.card.Name, err)
	}
	return nil
}

func (s *Side) c() C.CUstream { return *(*C.CUstream)(unsafe.Pointer(&s.stream)) }

// After lets what is started next on the side stream wait for e.
func (s *Side) After(e *Event) error {
	return failed(C.cuStreamWaitEvent(s.c(), e.c(), 0), "ordering a copy after kernels")
}

// Record puts e at the present end of the side stream.
func (s *Side) Record(e *Event) error {
	return failed(C.cuEventRecord(e.c(), s.c()), "recording an event of a copy")
}

// ToHost starts the copy of len(host) bytes to pinned memory.
func (s *Side) ToHost(host []byte, src Ptr) error {
	if len(host) == 0 {
		return nil
	}
	return failed(C.cuMemcpyDtoHAsync(unsafe.Pointer(unsafe.SliceData(host)), C.CUdeviceptr(src), C.size_t(len(host)), s.c()),
		"copying %d bytes to the host", len(host))
}

// After lets what is started next on the card's stream wait for e, on the
// thread.
func (c *Card) After(e *Event) error {
	return failed(C.cuStreamWaitEvent(c.c(), e.c(), 0), "ordering kernels after a copy")
}

func (e *Event) c() C.CUevent { return *(*C.CUevent)(unsafe.Pointer(&e.ev)) }
