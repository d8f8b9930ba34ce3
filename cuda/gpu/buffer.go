//go:build cuda && cgo

package gpu

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// maxValues bounds one allocation (4 TiB of float32), so that a mistaken size
// overflows nothing.
const maxValues = 1 << 40

// maxSpare is how many bytes of closed buffers a device keeps for new ones:
// the driver's own calls wait for all work.
const maxSpare = 4 << 30

// buffer is device memory. at is 0 once closed; close may come from another
// goroutine than the calls, as finalisers and defers do.
type buffer struct {
	d     *Device
	n     int
	taken int // bytes of memory, which may be more than n values
	at    atomic.Uint64
	pages *driver.Pages // where the memory is that of a long buffer, see grow.go
	wide  driver.Ptr    // float32 copy that holds instead, see deltarule.go
}

// Len implements [cuda.Buffer].
func (b *buffer) Len() int { return b.n }

// Close implements [cuda.Buffer].
func (b *buffer) Close() {
	at := driver.Ptr(b.at.Swap(0))
	if at == 0 {
		return
	}
	// An error here is of a context that is lost or closed, memory and all.
	_ = b.d.card.Do(func() error {
		err := b.d.free(at, b.taken, b.pages)
		if b.wide != 0 {
			err = errors.Join(err, b.d.card.Free(b.wide))
			b.wide = 0
		}
		return err
	})
}

// New implements [cuda.Device].
func (d *Device) New(n int) (cuda.Buffer, error) {
	if n < 0 {
		return nil, fmt.Errorf("allocating %d values: %w", n, cuda.ErrShape)
	}
	if n > maxValues {
		return nil, fmt.Errorf("allocating %d values: %w", n, cuda.ErrMemory)
	}
	b := &buffer{d: d, n: n, taken: max(n*d.width, 1)}
	err := d.card.Do(func() error {
		at, err := d.spare.take(d.card, b.taken)
		if err != nil {
			return fmt.Errorf("allocating %d values: %w", n, err)
		}
		if err := d.card.Zero(at, b.taken); err != nil {
			return errors.Join(err, d.card.Free(at))
		}
		b.at.Store(uint64(at))
		return nil
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// spares are closed buffers' memory, by size, and that of long ones. What was
// started before a buffer closed may still read it; what is started after it
// is taken again comes later in the same stream.
type spares struct {
	by    map[int][]driver.Ptr
	long  []*driver.Pages
	bytes int // of both
}

// take is n bytes, on the card's thread.
func (s *spares) take(card *driver.Card, n int) (driver.Ptr, error) {
	if list := s.by[n]; len(list) > 0 {
		s.by[n] = list[:len(list)-1]
		s.bytes -= n
		return list[len(list)-1], nil
	}
	at, err := card.Alloc(n)
	if errors.Is(err, cuda.ErrMemory) && s.bytes > 0 {
		if err := s.drop(card); err != nil {
			return 0, err
		}
		at, err = card.Alloc(n)
	}
	return at, err
}

// put keeps memory for take, or frees it, on the card's thread.
func (s *spares) put(card *driver.Card, at driver.Ptr, n int) error {
	if s.bytes+n > maxSpare {
		return card.Free(at)
	}
	if s.by == nil {
		s.by = map[int][]driver.Ptr{}
	}
	s.by[n] = append(s.by[n], at)
	s.bytes += n
	return nil
}

// drop frees all of it, on the card's thread.
func (s *spares) drop(card *driver.Card) error {
	var errs []error
	for _, list := range s.by {
		for _, at := range list {
			errs = append(errs, card.Free(at))
		}
	}
	for _, p := range s.long {
		errs = append(errs, card.Release(p))
	}
	*s = spares{}
	return errors.Join(errs...)
}
