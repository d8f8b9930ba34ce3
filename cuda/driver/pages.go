//go:build cuda && cgo

package driver

//#include <cuda.h>
import "C"

import (
	"errors"
	"fmt"

	"gorgonia.org/cu"
)

// Pages is device memory that grows at one address: a range of addresses is
// reserved, and physical memory mapped into it from the front as it is needed,
// in pages of the device's size.
type Pages struct {
	at       C.CUdeviceptr
	reserved int // bytes of addresses
	size     int // bytes mapped
	parts    []part
}

// part is one piece of physical memory, mapped after those before it.
type part struct {
	handle C.CUmemGenericAllocationHandle
	size   int
}

// At is where the memory begins.
func (p *Pages) At() Ptr { return Ptr(p.at) }

// Size is how many bytes can be used.
func (p *Pages) Size() int { return p.size }

// Reserved is how many bytes there can be.
func (p *Pages) Reserved() int { return p.reserved }

// pageSize is the device's page in bytes, 0 where it has no such memory; on
// the thread.
func (c *Card) pageSize() (int, error) {
	has, err := c.device.Attribute(cu.DeviceAttribute(C.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED))
	if err != nil {
		return 0, fmt.Errorf("asking %s for virtual memory: %w", c.Name, err)
	}
	if has == 0 {
		return 0, nil
	}
	where := c.location()
	var n C.size_t
	err = failed(C.cuMemGetAllocationGranularity(&n, &where, C.CU_MEM_ALLOC_GRANULARITY_MINIMUM), "reading the page size of %s", c.Name)
	return int(n), err
}

// location is memory of this card.
func (c *Card) location() (p C.CUmemAllocationProp) {
	p._type = C.CU_MEM_ALLOCATION_TYPE_PINNED
	p.location._type = C.CU_MEM_LOCATION_TYPE_DEVICE
	p.location.id = C.int(c.Index)
	return p
}

// Reserve takes n bytes of addresses, a multiple of the page, and no memory;
// on the thread.
func (c *Card) Reserve(n int) (*Pages, error) {
	p := &Pages{reserved: n}
	return p, failed(C.cuMemAddressReserve(&p.at, C.size_t(n), 0, 0, 0), "reserving %s of addresses", size(int64(n)))
}

// Extend maps n more bytes, a multiple of the page, not zeroed; on the thread.
// On an error p is as it was.
func (c *Card) Extend(p *Pages, n int) error {
	if p.size+n > p.reserved {
		return fmt.Errorf("mapping %s after %s: only %s of addresses are reserved", size(int64(n)), size(int64(p.size)), size(int64(p.reserved)))
	}
	where := c.location()
	add := part{size: n}
	if err := c.noMemory(failed(C.cuMemCreate(&add.handle, C.size_t(n), &where, 0), "allocating %s more of a buffer", size(int64(n)))); err != nil {
		return err
	}
	at := p.at + C.CUdeviceptr(p.size)
	if err := failed(C.cuMemMap(at, C.size_t(n), 0, add.handle, 0), "mapping %s", size(int64(n))); err != nil {
		return errors.Join(err, failed(C.cuMemRelease(add.handle), "freeing device memory"))
	}
	access := C.CUmemAccessDesc{location: where.location, flags: C.CU_MEM_ACCESS_FLAGS_PROT_READWRITE}
	if err := c.noMemory(failed(C.cuMemSetAccess(at, C.size_t(n), &access, 1), "opening %s to the device", size(int64(n)))); err != nil {
		return errors.Join(err, failed(C.cuMemUnmap(at, C.size_t(n)), "unmapping device memory"), failed(C.cuMemRelease(add.handle), "freeing device memory"))
	}
	p.parts = append(p.parts, add)
	p.size += n
	return nil
}

// Release gives memory and addresses back once the work under way on the card
// has ended, on the thread.
func (c *Card) Release(p *Pages) error {
	// Unmapping waits for nothing, unlike [Card.Free].
	errs := []error{failed(C.cuCtxSynchronize(), "waiting to unmap device memory")}
	if p.size > 0 {
		errs = append(errs, failed(C.cuMemUnmap(p.at, C.size_t(p.size)), "unmapping device memory"))
	}
	for _, part := range p.parts {
		errs = append(errs, failed(C.cuMemRelease(part.handle), "freeing device memory"))
	}
	errs = append(errs, failed(C.cuMemAddressFree(p.at, C.size_t(p.reserved)), "freeing addresses"))
	*p = Pages{}
	return errors.Join(errs...)
}
