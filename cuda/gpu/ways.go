//go:build cuda && cgo

package gpu

import (
	"encoding/binary"
	"errors"
	"time"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// How cuBLASLt multiplies by a weight is first chosen for canonicalRows rows,
// as the library prefers: that way's results are what the product is. A way
// with tiles for many rows is slow for few, so another may do the work for
// fewer or more rows. It must give the same bits on made-up values: so a row
// does not depend on how many rows there are, nor on which way was measured to
// be the fastest.
const canonicalRows = 2048

// tuned is how large a weight must be, in values, for other ways to be tried:
// below, a product takes no longer than its launch.
const tuned = 1 << 22

// Bounds of a trial.
const (
	triedWays  = 24
	trialBytes = 1 << 30
)

// ways is what a way to multiply is chosen for.
type ways struct {
	n, k  int
	float bool
	rows  int // 0 for the canonical way
}

// rungs are the numbers of rows that ways are chosen for; the last stands for
// all that are larger.
var rungs = [...]int{16, 32, 64, 128, 256, 512, 1024, 2048, 4096}

// rung is the first that is not below rows.
func rung(rows int) int {
	for _, r := range rungs {
		if rows <= r {
			return r
		}
	}
	return rungs[len(rungs)-1]
}

// multiply starts to = x·yᵀ, or adds that, in the way chosen for it.
func (d *Device) multiply(to, x, y driver.Operand, add, float bool) error {
	way, err := d.way(x.Rows, y.Rows, y.Cols, float)
	if err != nil {
		return err
	}
	err = d.blas.Product(way, to, x, y, add, float)
	if canonical := d.ways[ways{n: y.Rows, k: y.Cols, float: float}]; errors.Is(err, driver.ErrWay) && way != canonical {
		// Measured on dense matrices, and not for operands that lie as these do.
		return d.blas.Product(canonical, to, x, y, add, float)
	}
	return err
}

// way chooses how to multiply rows by an n x k weight, on the card's thread.
func (d *Device) way(rows, n, k int, float bool) (*driver.Way, error) {
	first := ways{n: n, k: k, float: float}
	canonical := d.ways[first]
	if canonical == nil {
		list, err := d.blas.Ways(canonicalRows, n, k, float, 1)
		if err != nil {
			return nil, err
		}
		canonical = list[0]
		d.ways[first] = canonical
	}
	if float || n*k < tuned || n%8 != 0 {
		return canonical, nil
	}
	key := first
	key.rows = rung(rows)
	if way := d.ways[key]; way != nil {
		return way, nil
	}
	way, err := d.try(key, canonical)
	if errors.Is(err, cuda.ErrMemory) {
		way, err = canonical, nil // slower, and the same
	}
	d.ways[key] = way
	return way, err
}

// try measures the ways that give the canonical one's bits and returns the
// fastest.
func (d *Device) try(key ways, canonical *driver.Way) (*driver.Way, error) {
	t := &trial{d: d, key: key}
	if t.bytes() > trialBytes {
		return canonical, nil
	}
	list, err := d.blas.Ways(key.rows, key.n, key.k, key.float, triedWays)
	if err != nil {
		return nil, err
	}
	defer t.close()
	if err := t.open(canonical); err != nil {
		return nil, err
	}
	best := canonical
	least, err := t.time(canonical)
	if err != nil {
		return nil, err
	}
	for _, way := range list {
		same, err := t.same(way)
		if err == nil && same {
			var took time.Duration
			if took, err = t.time(way); err == nil && took < least {
				best, least = way, took
			}
		}
		if err != nil && !errors.Is(err, driver.ErrWay) {
			return nil, err
		}
	}
	return best, nil
}

// trial is what ways are compared on: results that are the sums, rounded, and
// what rounding took from them, in which the last bits of a sum show.
type trial struct {
	d                    *Device
	key                  ways
	a, w, sum, rest, got driver.Operand
	memory               driver.Ptr
	start, end           *driver.Event
}

// place lays the matrices out from at on and returns the end.
func (t *trial) place(at driver.Ptr) driver.Ptr {
	n, k, rows := t.key.n, t.key.k, t.key.rows
	for _, m := range []struct {
		to         *driver.Operand
		rows, cols int
	}{{&t.a, rows, k}, {&t.w, n, k}, {&t.sum, rows, n}, {&t.rest, rows, n}, {&t.got, rows, n}} {
		*m.to = driver.Operand{At: at, Rows: m.rows, Cols: m.cols, Stride: m.cols}
		at += driver.Ptr(ceil(m.rows*m.cols*2, 256) * 256)
	}
	return at
}

func (t *trial) bytes() int { return int(t.place(0)) + 256 }

// open makes values up and multiplies them in the canonical way.
func (t *trial) open(canonical *driver.Way) (err error) {
	card := t.d.card
	if t.memory, err = card.Alloc(t.bytes()); err != nil {
		return err
	}
	t.place(t.memory)
	if t.start, err = card.Event(); err != nil {
		return err
	}
	if t.end, err = card.Event(); err != nil {
		return err
	}
	for i, m := range []driver.Operand{t.a, t.w} {
		if err := t.d.launch("ways", "noise", t.d.spread(m.Rows*m.Cols), m.At, m.Rows*m.Cols, i+1); err != nil {
			return err
		}
	}
	return errors.Join(t.multiply(canonical, t.sum, false), t.negate(t.rest), t.multiply(canonical, t.rest, true))
}

func (t *trial) close() {
	card := t.d.card
	// Errors here are of a context that is lost, memory and all.
	if t.memory != 0 {
		_ = card.Free(t.memory)
	}
	for _, e := range []*driver.Event{t.start, t.end} {
		if e != nil {
			_ = card.Drop(e)
		}
	}
}

func (t *trial) multiply(way *driver.Way, to driver.Operand, add bool) error {
	return t.d.blas.Product(way, to, t.a, t.w, add, t.key.float)
}

// negate sets to to -sum.
func (t *trial) negate(to driver.Operand) error {
	n := to.Rows * to.Cols
	return t.d.launch("ways", "negate", t.d.spread(n), to.At, t.sum.At, n)
}

// same says whether a way gives the canonical one's bits.
func (t *trial) same(way *driver.Way) (bool, error) {
	found, err := t.d.room("not the same", 4)
	if err != nil {
		return false, err
	}
	n := t.got.Rows * t.got.Cols
	differ := func(want driver.Operand) error {
		return t.d.launch("ways", "differ", t.d.spread(n), found, want.At, t.got.At, n)
	}
	if err := errors.Join(t.d.card.Zero(found, 4), t.negate(t.got), t.multiply(way, t.got, true), differ(t.rest)); err != nil {
		return false, err
	}
	if differs, err := t.found(found); err != nil || differs {
		return false, err
	}
	if err := errors.Join(t.multiply(way, t.got, false), differ(t.sum)); err != nil {
		return false, err
	}
	differs, err := t.found(found)
	return !differs, err
}

// found reads the int at p.
func (t *trial) found(p driver.Ptr) (bool, error) {
	bytes, err := t.d.read(p, 4)
	return err == nil && binary.LittleEndian.Uint32(bytes) != 0, err
}

// time is the least of a few runs, by the card's clock.
func (t *trial) time(way *driver.Way) (least time.Duration, err error) {
	card := t.d.card
	for i := range 4 {
		if err := errors.Join(card.Record(t.start), t.multiply(way, t.got, false), card.Record(t.end), card.WaitFor(t.end)); err != nil {
			return 0, err
		}
		took, err := card.Since(t.start, t.end)
		if err != nil {
			return 0, err
		}
		if i == 0 || took < least {
			least = took
		}
	}
	return least, nil
}
