package tap

import "fmt"

// ring is the engine's memory, mapped read-only, and the place up to which it
// was read.
type ring struct {
	raw     []byte
	store   func(freed uint64) // into the ring's counter
	release func() error
	ad      ringAd
	width   int64 // bytes of a row
	next    uint64
}

// headBytes are the ring's first bytes, of which the daemon writes the first
// eight: how many slots it has read.
const headBytes = 8

// maxRing bounds what an engine may ask the daemon to map.
const maxRing = 1 << 40

// check refuses a description whose sizes do not fit together or that mapped
// memory does not hold.
func (ad ringAd) check(width, have int64) error {
	switch {
	case ad.Kind != kindMemfd:
		return badProtocol("a ring of kind %q; this daemon reads %s", ad.Kind, kindMemfd)
	case ad.SlotBytes < width || ad.SlotBytes > maxRing:
		return badProtocol("slots of %d bytes for rows of %d", ad.SlotBytes, width)
	case ad.Slots < 1 || ad.Offset < headBytes || ad.Offset > maxRing || ad.Slots > maxRing/ad.SlotBytes:
		return badProtocol("a ring of %d slots from byte %d", ad.Slots, ad.Offset)
	case ad.Offset+ad.Slots*ad.SlotBytes > have:
		return badProtocol("a ring of %d bytes in memory of %d", ad.Offset+ad.Slots*ad.SlotBytes, have)
	}
	return nil
}

// row is the bytes of slot i, a view of memory that the engine writes again
// once it has the credit for it.
func (r *ring) row(i uint64) []byte {
	lo := r.ad.Offset + int64(i%uint64(r.ad.Slots))*r.ad.SlotBytes
	return r.raw[lo : lo+r.width]
}

// claim checks that rows [slot, slot+n) are the next ones.
func (r *ring) claim(slot uint64, n int) error {
	if slot != r.next || int64(n) > r.ad.Slots {
		return fmt.Errorf("%w: %d rows in slot %d, the next slot is %d of a ring of %d", ErrProtocol, n, slot, r.next, r.ad.Slots)
	}
	r.next += uint64(n)
	return nil
}

func (r *ring) close() error {
	if r == nil || r.release == nil {
		return nil
	}
	err := r.release()
	r.raw, r.release = nil, nil
	return err
}
