//go:build cuda && cgo

package gpu

import (
	"errors"
	"fmt"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// smallFetch is up to how many bytes a fetch goes to pinned memory in one
// copy, from where Wait brings it to its landings: a copy of a few kilobytes
// costs no less to start than one of a megabyte.
const smallFetch = 2 << 20

// snapshots are copies of fetched tensors, in turn: while one is on its way to
// the host, the next is taken.
type snapshots struct {
	side   *driver.Side
	ready  *driver.Event    // a snapshot is taken
	passed [3]*driver.Event // the turn's copies have ended
	turn   int
	spare  []*driver.Event
}

// DType implements [cuda.Device].
func (d *Device) DType() cuda.DType {
	if d.precision == BF16 {
		return cuda.BF16
	}
	return cuda.F32
}

// prepare makes streams and events, at the first fetch.
func (s *snapshots) prepare(card *driver.Card) (err error) {
	if s.side != nil {
		return nil
	}
	if s.ready, err = card.Event(); err != nil {
		return err
	}
	for i := range s.passed {
		if s.passed[i], err = card.Event(); err != nil {
			return err
		}
	}
	s.side, err = card.Side()
	return err
}

// event is one that nobody waits for.
func (s *snapshots) event(card *driver.Card) (*driver.Event, error) {
	if n := len(s.spare); n > 0 {
		e := s.spare[n-1]
		s.spare = s.spare[:n-1]
		return e, nil
	}
	return card.Event()
}

func (s *snapshots) close(card *driver.Card) error {
	var errs []error
	if s.side != nil {
		errs = append(errs, s.side.Close())
	}
	for _, e := range append(append(s.spare, s.ready), s.passed[:]...) {
		if e != nil {
			errs = append(errs, card.Drop(e))
		}
	}
	*s = snapshots{}
	return errors.Join(errs...)
}

// flight is a fetch under way.
type flight struct {
	d      *Device
	landed *driver.Event
	odd    []byte // pinned: a count a row
	all    []byte // pinned: all rows, where landings did not get them directly
	width  int    // bytes of a row
	late   []cuda.Landing
}

// Fetch implements [cuda.Device]. A kernel takes a snapshot and counts; the
// snapshot is copied on a stream of its own.
func (d *Device) Fetch(src cuda.Tensor, as cuda.DType, to []cuda.Landing) (cuda.Flight, error) {
	if err := cuda.CheckFetch(src, as, to); err != nil {
		return nil, err
	}
	b, m, from, err := d.copied("fetch", src, src.Rows*src.Cols)
	if err != nil {
		return nil, err
	}
	f := &flight{d: d, width: src.Cols * as.Size()}
	if b == nil {
		return f, nil
	}
	err = d.card.Do(func() error {
		if err := d.shots.prepare(d.card); err != nil {
			return err
		}
		if f.landed, err = d.shots.event(d.card); err != nil {
			return err
		}
		if f.odd, err = d.pinned.take(d.card, m.rows*4); err != nil {
			return err
		}
		return d.fly(f, m, from, as, to)
	})
	if err != nil {
		return nil, errors.Join(err, f.abandon())
	}
	return f, nil
}

// fly starts the snapshot and the copies, on the card's thread.
func (d *Device) fly(f *flight, m matrix, from int, as cuda.DType, to []cuda.Landing) error {
	s := &d.shots
	turn := s.turn % len(s.passed)
	s.turn++
	// Values, then counts, then what fast_pack leaves besides: norms, checksums.
	values := (m.rows*f.width + 15) / 16 * 16
	at, err := d.room(fmt.Sprintf("snapshot %d", turn), values+m.rows*16+16)
	if err != nil {
		return err
	}
	if s.turn > len(s.passed) {
		if err := d.card.After(s.passed[turn]); err != nil {
			return err
		}
	}
	odd := at + driver.Ptr(values)
	if err := errors.Join(d.snapshot(at, odd, m, from, as), d.card.Record(s.ready), s.side.After(s.ready), s.side.ToHost(f.odd, odd)); err != nil {
		return err
	}
	direct := m.rows*f.width > smallFetch
	for _, l := range to {
		if direct && d.pinned.holds(l.To) {
			if err := s.side.ToHost(l.To, at+driver.Ptr(l.Lo*f.width)); err != nil {
				return err
			}
		} else if len(l.To) > 0 {
			f.late = append(f.late, l)
		}
	}
	if len(f.late) > 0 {
		if f.all, err = d.pinned.take(d.card, m.rows*f.width); err != nil {
			return err
		}
		if err := s.side.ToHost(f.all, at); err != nil {
			return err
		}
	}
	return errors.Join(s.side.Record(s.passed[turn]), s.side.Record(f.landed))
}

// snapshot starts the kernel that writes the rows of m, whose values have from
// bytes, densely to at, and how many of each are not finite to odd.
func (d *Device) snapshot(at, odd driver.Ptr, m matrix, from int, as cuda.DType) error {
	g := driver.Grid{Blocks: [3]int{ceil(m.rows, 8)}, Threads: [3]int{256}}
	if d.hopper() && from == 2 && as == cuda.BF16 && m.at%16 == 0 && m.stride%8 == 0 && m.cols%8 == 0 {
		where, err := d.params.send(bytesOf([]driver.Ptr{m.at}), bytesOf([]int64{int64(m.stride)}))
		if err != nil {
			return err
		}
		sums := odd + driver.Ptr((m.rows*4+15)/16*16)
		return d.launch("fast_ops", "fast_pack", g, at, where[0], where[1], driver.Ptr(0), sums+driver.Ptr(m.rows*8), odd, sums, m.rows, 1, m.cols)
	}
	names := map[int]string{2: "bf16", 4: "f32"}
	return d.launch("fetch", fmt.Sprintf("fetch_%s_%s", names[as.Size()], names[from]), g, at, odd, m.at, m.stride, m.rows, m.cols)
}

// Wait implements [cuda.Flight].
func (f *flight) Wait() ([]int32, error) {
	if f.landed == nil {
		return nil, nil
	}
	err := f.d.card.Do(func() error { return f.d.card.WaitFor(f.landed) })
	odd := make([]int32, len(f.odd)/4)
	if err == nil {
		copy(bytesOf(odd), f.odd)
		for _, l := range f.late {
			copy(l.To, f.all[l.Lo*f.width:l.Hi*f.width])
		}
	}
	f.giveBack() // after an error the context is lost, and nothing lands any more
	return odd, err
}

// abandon ends what an incomplete fetch has started, before its memory is used
// again.
func (f *flight) abandon() error {
	if f.landed == nil {
		return nil
	}
	err := f.d.card.Do(f.d.shots.side.Wait)
	f.giveBack()
	return err
}

func (f *flight) giveBack() {
	for _, b := range [][]byte{f.odd, f.all} {
		if b != nil {
			f.d.pinned.put(b)
		}
	}
	f.d.shots.spare = append(f.d.shots.spare, f.landed)
	f.landed = nil
}
