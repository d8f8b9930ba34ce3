//go:build cuda && cgo

package gpu

import (
	"bytes"
	"encoding/binary"
	"errors"
	"iter"
	"math"
	"unsafe"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// Pinned memory that copies go through.
const (
	stagingBytes = 8 << 20 // of each of the two halves
	paramsBytes  = 4 << 20 // to begin with; grows with the largest call
)

// staging is pinned host memory in two halves: while one is copied, the other
// is filled or emptied.
type staging struct {
	card *driver.Card
	half [2][]byte
	free [2]*driver.Event // passed when the half's copy has ended
}

func newStaging(card *driver.Card) (s staging, err error) {
	s.card = card
	for i := range s.half {
		if s.half[i], err = card.Pin(stagingBytes); err != nil {
			return s, err
		}
		if s.free[i], err = card.Event(); err != nil {
			return s, err
		}
		if err = card.Record(s.free[i]); err != nil {
			return s, err
		}
	}
	return s, nil
}

func (s *staging) close() error {
	var errs []error
	for i := range s.half {
		if s.half[i] != nil {
			errs = append(errs, s.card.Unpin(s.half[i]))
		}
		if s.free[i] != nil {
			errs = append(errs, s.card.Drop(s.free[i]))
		}
	}
	*s = staging{}
	return errors.Join(errs...)
}

// piece is a part of a copy that fits into one half: rows of cols values of a
// matrix, which begin at value at of the matrix and value first of the slice.
type piece struct {
	rows, cols, at, first int
}

// pieces cuts a matrix into parts of at most room values.
func pieces(m matrix, room int) iter.Seq[piece] {
	if m.stride == m.cols {
		m.rows, m.cols = 1, m.rows*m.cols
	}
	return func(yield func(piece) bool) {
		down := max(1, room/m.cols)
		for r := 0; r < m.rows; r += down {
			for c := 0; c < m.cols; c += room {
				p := piece{min(down, m.rows-r), min(room, m.cols-c), r*m.stride + c, r*m.cols + c}
				if !yield(p) {
					return
				}
			}
		}
	}
}

// Upload implements [cuda.Device]. It returns when the values have arrived.
func (d *Device) Upload(dst cuda.Tensor, src []float32) error {
	return d.load("upload", dst, bytesOf(src), cuda.F32)
}

// Load implements [cuda.Device]. It returns when the values have arrived.
func (d *Device) Load(dst cuda.Tensor, src []byte, as cuda.DType) error {
	if err := cuda.CheckLoad(dst, src, as); err != nil {
		return err
	}
	return d.load("load", dst, src, as)
}

func (d *Device) load(op string, dst cuda.Tensor, src []byte, as cuda.DType) error {
	size := as.Size()
	b, m, width, err := d.copied(op, dst, len(src)/size)
	if err != nil || b == nil {
		return err
	}
	return d.card.Do(func() error {
		turn := 0
		for p := range pieces(m, stagingBytes/width) {
			half, free := d.host.half[turn%2], d.host.free[turn%2]
			if err := d.card.WaitFor(free); err != nil {
				return err
			}
			encode(half, src[p.first*size:(p.first+p.rows*p.cols)*size], as, width)
			rows := driver.Rows{Count: p.rows, Width: p.cols * width, Pitch: m.stride * width}
			if err := errors.Join(d.card.ToDevice(m.at+driver.Ptr(p.at*width), half, rows), d.card.Record(free)); err != nil {
				return err
			}
			turn++
		}
		return d.card.Wait()
	})
}

// Download implements [cuda.Device].
func (d *Device) Download(dst []float32, src cuda.Tensor) error {
	b, m, width, err := d.copied("download", src, len(dst))
	if err != nil || b == nil {
		return err
	}
	return d.card.Do(func() error {
		var under [2]*piece // copies under way into each half
		take := func(i int) error {
			p := under[i]
			if p == nil {
				return nil
			}
			under[i] = nil
			if err := d.card.WaitFor(d.host.free[i]); err != nil {
				return err
			}
			decode(dst[p.first:p.first+p.rows*p.cols], d.host.half[i], width)
			return nil
		}
		turn := 0
		for p := range pieces(m, stagingBytes/width) {
			i := turn % 2
			if err := take(i); err != nil {
				return err
			}
			rows := driver.Rows{Count: p.rows, Width: p.cols * width, Pitch: m.stride * width}
			if err := errors.Join(d.card.ToHost(d.host.half[i], m.at+driver.Ptr(p.at*width), rows), d.card.Record(d.host.free[i])); err != nil {
				return err
			}
			under[i] = &p
			turn++
		}
		return errors.Join(take(turn%2), take((turn+1)%2), d.card.Wait())
	})
}

// copied is what all copies share: the checked tensor as a matrix of
// values of width bytes. The buffer is nil for an empty one.
func (d *Device) copied(op string, t cuda.Tensor, n int) (b *buffer, m matrix, width int, err error) {
	if err := cuda.CheckCopy(op, t, n); err != nil {
		return nil, matrix{}, 0, err
	}
	if b, err = d.owner(op, t); err != nil || b == nil {
		return nil, matrix{}, 0, err
	}
	m = matrix{rows: t.Rows, cols: t.Cols, stride: t.Stride}
	if b.wide != 0 {
		m.at = b.wide + driver.Ptr(t.Off*4)
		return b, m, 4, nil
	}
	m.at = driver.Ptr(b.at.Load()) + driver.Ptr(t.Off*d.width)
	return b, m, d.width, nil
}

// encode writes values of a dtype as the device keeps them.
func encode(to, from []byte, as cuda.DType, width int) {
	switch {
	case as.Size() == width:
		copy(to, from)
	case width == 2:
		half := unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(to))), len(from)/4)
		for i := range half {
			half[i] = narrow(math.Float32frombits(binary.LittleEndian.Uint32(from[4*i:])))
		}
	default:
		for i := range len(from) / 2 {
			binary.LittleEndian.PutUint32(to[4*i:], uint32(binary.LittleEndian.Uint16(from[2*i:]))<<16)
		}
	}
}

// decode reads what the device keeps.
func decode(values []float32, from []byte, width int) {
	if width == 4 {
		copy(bytesOf(values), from)
		return
	}
	half := unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(from))), len(values))
	for i, v := range half {
		values[i] = math.Float32frombits(uint32(v) << 16)
	}
}

// narrow rounds to bfloat16, to nearest, ties to even; a NaN stays one.
func narrow(v float32) uint16 {
	bits := math.Float32bits(v)
	if v != v {
		return uint16(bits>>16) | 0x40
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// bytesOf is the memory of values.
func bytesOf[T any](values []T) []byte {
	var t T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(values))), len(values)*int(unsafe.Sizeof(t)))
}

// params is where the small arrays of a call (positions, rows, labels, spans)
// travel: pinned memory and as much on the device, used from front to back
// and then again. What is there already is not sent again: the layers of a
// model pass the same positions and spans.
type params struct {
	card *driver.Card
	host []byte
	at   driver.Ptr
	used int
	last []sent // the latest arrays, in no particular order
	next int    // of last to be replaced
}

// sent is where an array lies.
type sent struct{ first, n int }

// lastSent is how many arrays are remembered.
const lastSent = 64

func newParams(card *driver.Card) (params, error) {
	p := params{card: card}
	return p, p.grow(paramsBytes)
}

// grow replaces the memory by n bytes, when nothing is under way.
func (p *params) grow(n int) (err error) {
	if err = p.close(); err != nil {
		return err
	}
	if p.host, err = p.card.Pin(n); err != nil {
		return err
	}
	p.at, err = p.card.Alloc(n)
	return err
}

func (p *params) close() error {
	var errs []error
	if p.host != nil {
		errs = append(errs, p.card.Unpin(p.host))
	}
	if p.at != 0 {
		errs = append(errs, p.card.Free(p.at))
	}
	*p = params{card: p.card}
	return errors.Join(errs...)
}

// send starts the copy of arrays to the device and returns where each will
// be; they stay until the kernels that are launched next have read them.
func (p *params) send(arrays ...[]byte) ([]driver.Ptr, error) {
	const align = 256
	total := 0
	for _, a := range arrays {
		total += (len(a) + align - 1) / align * align
	}
	if p.used+total > len(p.host) {
		// Kernels under way may still read the front.
		if err := p.card.Wait(); err != nil {
			return nil, err
		}
		p.used, p.last, p.next = 0, p.last[:0], 0
		if total > len(p.host) {
			if err := p.grow(2 * total); err != nil {
				return nil, err
			}
		}
	}
	start := p.used
	out := make([]driver.Ptr, len(arrays))
	for i, a := range arrays {
		at, ok := p.find(a)
		if !ok {
			at = p.used
			copy(p.host[at:], a)
			p.used += (len(a) + align - 1) / align * align
			p.keep(sent{at, len(a)})
		}
		out[i] = p.at + driver.Ptr(at)
	}
	if p.used == start {
		return out, nil
	}
	n := p.used - start
	return out, p.card.ToDevice(p.at+driver.Ptr(start), p.host[start:p.used], driver.Rows{Count: 1, Width: n, Pitch: n})
}

// find says where an array of the same bytes lies already.
func (p *params) find(a []byte) (int, bool) {
	for _, s := range p.last {
		if s.n == len(a) && bytes.Equal(p.host[s.first:][:s.n], a) {
			return s.first, true
		}
	}
	return 0, len(a) == 0
}

// keep remembers an array, in place of the oldest.
func (p *params) keep(s sent) {
	if len(p.last) < lastSent {
		p.last = append(p.last, s)
		return
	}
	p.last[p.next] = s
	p.next = (p.next + 1) % lastSent
}

// room is scratch memory of a device, which grows with the calls.
type room struct {
	at driver.Ptr
	n  int
}

// room is at least n bytes of scratch memory of that name, for the kernels
// launched next; its contents do not survive the call.
func (d *Device) room(name string, n int) (driver.Ptr, error) {
	r := d.rooms[name]
	if r == nil {
		r = &room{}
		d.rooms[name] = r
	}
	if r.n >= n {
		return r.at, nil
	}
	if r.at != 0 {
		if err := d.card.Free(r.at); err != nil {
			return 0, err
		}
		*r = room{}
	}
	at, err := d.card.Alloc(n)
	if err != nil {
		return 0, err
	}
	*r = room{at, n}
	return at, nil
}
