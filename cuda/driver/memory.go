//go:build cuda && cgo

package driver

//#include <cuda.h>
import "C"

import (
	"fmt"
	"unsafe"

	"gorgonia.org/cu"
)

// maxSharedOptin is CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN.
const maxSharedOptin = cu.DeviceAttribute(C.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)

// Ptr is an address in a device's memory.
type Ptr uint64

// Alloc takes n bytes of device memory, not zeroed, on the thread.
func (c *Card) Alloc(n int) (Ptr, error) {
	var p C.CUdeviceptr
	err := c.noMemory(failed(C.cuMemAlloc(&p, C.size_t(n)), "allocating %s", size(int64(n))))
	return Ptr(p), err
}

// noMemory adds to err, if it is one, how much memory there is and what to do.
func (c *Card) noMemory(err error) error {
	if err == nil {
		return nil
	}
	free, total, e := cu.MemInfo()
	if e != nil {
		return err
	}
	return fmt.Errorf("%s has %s of %s free, other programs may hold the rest (nvidia-smi); ask for less, or use --backend cpu: %w",
		c.Name, size(free), size(total), err)
}

// Free gives memory back once the work under way no longer needs it, on the
// thread.
func (c *Card) Free(p Ptr) error {
	return failed(C.cuMemFree(C.CUdeviceptr(p)), "freeing device memory")
}

// Memory is how many bytes are free and how many there are, on the thread.
func (c *Card) Memory() (free, total int64, err error) {
	if free, total, err = cu.MemInfo(); err != nil {
		return 0, 0, fmt.Errorf("reading the free memory of %s: %w", c.Name, err)
	}
	return free, total, nil
}

// Zero sets n bytes to 0, in the stream's order, on the thread.
func (c *Card) Zero(p Ptr, n int) error {
	return failed(C.cuMemsetD8Async(C.CUdeviceptr(p), 0, C.size_t(n), c.c()), "zeroing device memory")
}

// Pin takes n bytes of host memory that the device copies from and to at full
// rate, on the thread. Unpin gives it back.
func (c *Card) Pin(n int) ([]byte, error) {
	var p unsafe.Pointer
	if err := failed(C.cuMemHostAlloc(&p, C.size_t(n), C.CU_MEMHOSTALLOC_PORTABLE), "pinning %s of host memory", size(int64(n))); err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), n), nil
}

// Unpin gives back what Pin took, on the thread.
func (c *Card) Unpin(b []byte) error {
	return failed(C.cuMemFreeHost(unsafe.Pointer(unsafe.SliceData(b))), "unpinning host memory")
}

// Copy starts the copy of n bytes from one place on the device to another, on
// the thread.
func (c *Card) Copy(dst, src Ptr, n int) error {
	return failed(C.cuMemcpyDtoDAsync(C.CUdeviceptr(dst), C.CUdeviceptr(src), C.size_t(n), c.c()), "copying %s on the device", size(int64(n)))
}

// Rows says how the rows of a copy lie: so many, of Width bytes each, starting
// Pitch bytes after the one before.
type Rows struct {
	Count, Width, Pitch int
}

// ToDevice starts the copy of rows that lie densely in pinned host memory to
// strided rows on the device, on the thread. host must stay as it is until
// the stream has passed.
func (c *Card) ToDevice(dst Ptr, host []byte, r Rows) error {
	var p C.CUDA_MEMCPY2D
	p.srcMemoryType, p.srcHost, p.srcPitch = C.CU_MEMORYTYPE_HOST, unsafe.Pointer(unsafe.SliceData(host)), C.size_t(r.Width)
	p.dstMemoryType, p.dstDevice, p.dstPitch = C.CU_MEMORYTYPE_DEVICE, C.CUdeviceptr(dst), C.size_t(r.Pitch)
	return c.copy2D(&p, host, r)
}

// ToHost is the way back.
func (c *Card) ToHost(host []byte, src Ptr, r Rows) error {
	var p C.CUDA_MEMCPY2D
	p.srcMemoryType, p.srcDevice, p.srcPitch = C.CU_MEMORYTYPE_DEVICE, C.CUdeviceptr(src), C.size_t(r.Pitch)
	p.dstMemoryType, p.dstHost, p.dstPitch = C.CU_MEMORYTYPE_HOST, unsafe.Pointer(unsafe.SliceData(host)), C.size_t(r.Width)
	return c.copy2D(&p, host, r)
}

func (c *Card) copy2D(p *C.CUDA_MEMCPY2D, host []byte, r Rows) error {
	if r.Count == 0 || r.Width == 0 {
		return nil
	}
	if len(host) < r.Count*r.Width {
		return fmt.Errorf("copying %d rows of %d bytes: %d bytes of host memory", r.Count, r.Width, len(host))
	}
	if r.Count == 1 || r.Width == r.Pitch { // a pitch is limited to 2 GiB, and here without use
		n := C.size_t(r.Count * r.Width)
		if p.srcMemoryType == C.CU_MEMORYTYPE_HOST {
			return failed(C.cuMemcpyHtoDAsync(p.dstDevice, p.srcHost, n, c.c()), "copying %d bytes", n)
		}
		return failed(C.cuMemcpyDtoHAsync(p.dstHost, p.srcDevice, n, c.c()), "copying %d bytes", n)
	}
	p.WidthInBytes, p.Height = C.size_t(r.Width), C.size_t(r.Count)
	return failed(C.cuMemcpy2DAsync(p, c.c()), "copying %d rows of %d bytes", r.Count, r.Width)
}

// size writes bytes for people.
func size(n int64) string {
	if n < 1<<20 {
		return fmt.Sprintf("%d bytes", n)
	}
	if n < 1<<30 {
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
}
