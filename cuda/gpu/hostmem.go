//go:build cuda && cgo

package gpu

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"unsafe"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// pinned is the host memory that a device gives out. Pinning costs far more
// than a copy, so what comes back is kept for the next taker of its size.
type pinned struct {
	mu   sync.Mutex
	free map[int][][]byte // by size
	out  map[*byte][]byte // given out, whole
}

// leastPinned is the smallest block, in bytes.
const leastPinned = 4 << 10

// pinnedSize is the size of the block that serves n bytes: at most an eighth
// larger, so that sequences of much the same length share blocks.
func pinnedSize(n int) int {
	step := max(leastPinned, 1<<bits.Len(uint(max(n-1, 1)))/16)
	return (max(n, 1) + step - 1) / step * step
}

// take is a block of at least n bytes, on the card's thread.
func (p *pinned) take(card *driver.Card, n int) ([]byte, error) {
	size := pinnedSize(n)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.free == nil {
		p.free, p.out = map[int][][]byte{}, map[*byte][]byte{}
	}
	var block []byte
	if list := p.free[size]; len(list) > 0 {
		block, p.free[size] = list[len(list)-1], list[:len(list)-1]
	} else {
		var err error
		if block, err = card.Pin(size); err != nil {
			return nil, err
		}
	}
	p.out[unsafe.SliceData(block)] = block
	return block[:n:n], nil
}

// put takes a block back, from any goroutine.
func (p *pinned) put(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	block, ok := p.out[unsafe.SliceData(b)]
	if !ok {
		panic("gpu: host memory is given back that was not taken, or twice")
	}
	delete(p.out, unsafe.SliceData(b))
	p.free[len(block)] = append(p.free[len(block)], block)
}

// holds says whether b lies in a block that is given out.
func (p *pinned) holds(b []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	for first, block := range p.out {
		if lo := uintptr(unsafe.Pointer(first)); at >= lo && at+uintptr(len(b)) <= lo+uintptr(len(block)) {
			return true
		}
	}
	return false
}

// drop unpins what is not given out, and says whether something is: such
// memory must stay, for somebody may read it.
func (p *pinned) drop(card *driver.Card) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, list := range p.free {
		for _, block := range list {
			errs = append(errs, card.Unpin(block))
		}
	}
	p.free = map[int][][]byte{}
	if n := len(p.out); n > 0 {
		errs = append(errs, fmt.Errorf("%w: %d blocks of host memory", errInUse, n))
	}
	return errors.Join(errs...)
}

// errInUse keeps a device open that is closed too early.
var errInUse = errors.New("still in use")

// HostAlloc implements [cuda.Device]: the memory is pinned.
func (d *Device) HostAlloc(n int) (b []byte, err error) {
	if n < 0 || n > maxValues {
		return nil, fmt.Errorf("allocating %d bytes of host memory: %w", n, cuda.ErrMemory)
	}
	if n == 0 {
		return nil, nil
	}
	err = d.card.Do(func() error {
		b, err = d.pinned.take(d.card, n)
		return err
	})
	return b, err
}

// HostFree implements [cuda.Device].
func (d *Device) HostFree(b []byte) {
	if cap(b) > 0 {
		d.pinned.put(b[:1])
	}
}
