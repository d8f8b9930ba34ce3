//go:build cuda && cgo

package driver

//#include <cuda.h>
import "C"

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
)

// Error is a driver call that failed.
type Error struct {
	Call string // what was tried, "allocating 3 MiB"
	Code int    // as CUresult counts
	Name string // "CUDA_ERROR_OUT_OF_MEMORY"
	Text string // the driver's own words
}

// Error implements error.
func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s (%s)", e.Call, e.Text, e.Name)
}

// Unwrap says which of our own errors this is, if any.
func (e *Error) Unwrap() error {
	switch e.Code {
	case C.CUDA_ERROR_OUT_OF_MEMORY:
		return cuda.ErrMemory
	case C.CUDA_ERROR_NO_DEVICE, C.CUDA_ERROR_NOT_INITIALIZED, C.CUDA_ERROR_INVALID_DEVICE,
		C.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, C.CUDA_ERROR_STUB_LIBRARY:
		return cuda.ErrUnavailable
	}
	return nil
}

// Fatal says whether the context is lost: no later call on it can succeed.
func (e *Error) Fatal() bool {
	switch e.Code {
	case C.CUDA_ERROR_ILLEGAL_ADDRESS, C.CUDA_ERROR_LAUNCH_FAILED, C.CUDA_ERROR_LAUNCH_TIMEOUT,
		C.CUDA_ERROR_HARDWARE_STACK_ERROR, C.CUDA_ERROR_ILLEGAL_INSTRUCTION, C.CUDA_ERROR_MISALIGNED_ADDRESS,
		C.CUDA_ERROR_INVALID_ADDRESS_SPACE, C.CUDA_ERROR_INVALID_PC, C.CUDA_ERROR_ASSERT, C.CUDA_ERROR_ECC_UNCORRECTABLE,
		C.CUDA_ERROR_CONTEXT_IS_DESTROYED, C.CUDA_ERROR_UNKNOWN:
		return true
	}
	return false
}

// failed is nil for CUDA_SUCCESS, and an [Error] otherwise.
func failed(code C.CUresult, format string, args ...any) error {
	if code == C.CUDA_SUCCESS {
		return nil
	}
	e := &Error{Call: fmt.Sprintf(format, args...), Code: int(code), Name: fmt.Sprintf("CUDA error %d", int(code)), Text: "unknown error"}
	var name, text *C.char
	// Both leave their pointer alone when there is no driver to ask.
	if C.cuGetErrorName(code, &name) == C.CUDA_SUCCESS && name != nil {
		e.Name = C.GoString(name)
	}
	if C.cuGetErrorString(code, &text) == C.CUDA_SUCCESS && text != nil {
		e.Text = C.GoString(text)
	}
	return e
}
