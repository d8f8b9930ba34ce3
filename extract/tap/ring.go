package tap

import (
	"fmt"
	"sync/atomic"
)

// ring is the engine's memory, mapped read-only, and the place up to which it
// was read.
type ring struct {
	raw     []byte
	head    *counters
	release func() error
	ad      ringAd
	width   int64 // bytes of a row
	next    uint64
}

// counters are a ring's first bytes.
type counters struct {
	read   uint64 // slots that the daemon has read, which it writes
	_      uint64 // of kinds that order by counters
	filled uint64 // slots that the engine has filled; 0 where it does not say
}

// headBytes is the size of the counters.
const headBytes = 24

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

// waiting is how many filled slots the daemon has not read yet, as far as the
// engine says. It may be called while others use the ring.
func (r *ring) waiting() int64 {
	filled, read := atomic.LoadUint64(&r.head.filled), atomic.LoadUint64(&r.head.read)
	if filled < read || filled-read > uint64(r.ad.Slots) {
		return 0
	}
	return int64(filled - read)
}

func (r *ring) close() error {
	if r == nil || r.release == nil {
		return nil
	}
	err := r.release()
	r.raw, r.head, r.release = nil, nil, nil
	return err
}
