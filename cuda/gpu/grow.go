//go:build cuda && cgo

package gpu

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// longAddresses is how many bytes of addresses a long buffer reserves at the
// least: a million rows of most models' keys. Addresses are 128 TiB in all, and
// take no memory.
const longAddresses = 4 << 30

// Grow implements [cuda.Device]. A buffer of less than a page doubles, and its
// values are copied. A longer one lies in pages, mapped behind one address as
// they are needed: nothing is copied, and it takes the memory that it uses.
func (d *Device) Grow(buf cuda.Buffer, n int) (cuda.Buffer, error) {
	b := &buffer{d: d}
	if buf != nil {
		var ok bool
		if b, ok = buf.(*buffer); !ok || b.d != d {
			return nil, fmt.Errorf("growing: %w: a %T of other memory than this device's", cuda.ErrShape, buf)
		}
		if b.at.Load() == 0 || b.wide != 0 {
			return nil, fmt.Errorf("growing: %w: a buffer that is closed, or a state of the delta rule", cuda.ErrShape)
		}
		if n <= b.n {
			return b, nil
		}
	}
	switch {
	case n < 0:
		return nil, fmt.Errorf("growing to %d values: %w", n, cuda.ErrShape)
	case n > maxValues:
		return nil, fmt.Errorf("growing to %d values: %w", n, cuda.ErrMemory)
	}
	if err := d.card.Do(func() error { return d.grow(b, n) }); err != nil {
		return nil, fmt.Errorf("growing from %d to %d values: %w", b.n, n, err)
	}
	return b, nil
}

// grow makes room for n values and zeroes the new ones, on the card's thread.
func (d *Device) grow(b *buffer, n int) error {
	used, need := b.n*d.width, max(n*d.width, 1)
	if need > b.taken {
		moved, err := d.extend(b, need)
		if err != nil {
			return err
		}
		if moved.at != 0 {
			old := driver.Ptr(b.at.Load())
			if used > 0 {
				if err := d.card.Copy(moved.at, old, used); err != nil {
					return errors.Join(err, d.free(moved.at, moved.taken, moved.pages))
				}
			}
			taken, pages := b.taken, b.pages
			b.at.Store(uint64(moved.at))
			b.taken, b.pages = moved.taken, moved.pages
			if old != 0 {
				if err := d.free(old, taken, pages); err != nil {
					return err
				}
			}
		}
	}
	if err := d.card.Zero(driver.Ptr(b.at.Load())+driver.Ptr(used), need-used); err != nil {
		return err
	}
	b.n = n
	return nil
}

// memory is what a buffer lies in.
type memory struct {
	at    driver.Ptr
	taken int
	pages *driver.Pages
}

// extend gives b need bytes where it lies, or other memory of at least as
// many, on the card's thread.
func (d *Device) extend(b *buffer, need int) (moved memory, err error) {
	page := d.card.Page
	if page == 0 || need <= page/2 {
		// Powers of two, so that what one buffer leaves fits the next.
		moved.taken = max(1<<bits.Len(uint(need-1)), 4096)
		moved.at, err = d.spare.take(d.card, moved.taken)
		return moved, err
	}
	p := b.pages
	if p == nil || need > p.Reserved() {
		if p, err = d.spare.takeLong(d.card, need, ceil(max(longAddresses, 4*need), page)*page); err != nil {
			return moved, err
		}
	}
	if more := ceil(need, page)*page - p.Size(); more > 0 {
		err = d.card.Extend(p, more)
		if errors.Is(err, cuda.ErrMemory) && d.spare.bytes > 0 {
			if err = d.spare.drop(d.card); err == nil {
				err = d.card.Extend(p, more)
			}
		}
		if err != nil && p != b.pages {
			err = errors.Join(err, d.card.Release(p))
		}
		if err != nil {
			return moved, err
		}
	}
	if p == b.pages {
		b.taken = p.Size()
		return moved, nil
	}
	return memory{p.At(), p.Size(), p}, nil
}

// free puts a buffer's memory among the spares.
func (d *Device) free(at driver.Ptr, n int, pages *driver.Pages) error {
	if pages != nil {
		return d.spare.putLong(d.card, pages)
	}
	return d.spare.put(d.card, at, n)
}

// takeLong is memory in pages for need bytes at the least: the spare that has
// the fewest pages which suffice, or else the most, or a new one.
func (s *spares) takeLong(card *driver.Card, need, addresses int) (*driver.Pages, error) {
	best := -1
	for i, p := range s.long {
		if p.Reserved() < need {
			continue
		}
		if best < 0 {
			best = i
			continue
		}
		has, had := p.Size(), s.long[best].Size()
		if has >= need && (had < need || has < had) || has < need && had < has {
			best = i
		}
	}
	if best < 0 {
		return card.Reserve(addresses)
	}
	p := s.long[best]
	s.long[best] = s.long[len(s.long)-1]
	s.long = s.long[:len(s.long)-1]
	s.bytes -= p.Size()
	return p, nil
}

// putLong keeps memory for takeLong, or frees it, on the card's thread.
func (s *spares) putLong(card *driver.Card, p *driver.Pages) error {
	if s.bytes+p.Size() > maxSpare {
		return card.Release(p)
	}
	s.long = append(s.long, p)
	s.bytes += p.Size()
	return nil
}
