package target

import (
	"fmt"
	"slices"

	"github.com/draftscope/draftscope/cuda"
)

// arena is where the attention layers keep keys, after norm and rotation, and
// values: a matrix a layer, in which a sequence has the same rows everywhere.
// So one call of attention serves the sequences of a batch. Each begins at a
// multiple of [cuda.KeyTile]: where it lies changes no bit.
type arena struct {
	dev    cuda.Device
	cols   int           // of a row's keys, and as many of its values after them
	layers []cuda.Tensor // [rows, 2*cols]
	held   []*extent     // by where they begin
}

// extent is rows lo..lo+n-1 of an arena, which one sequence has.
type extent struct{ lo, n int }

// firstRoom is how many tokens a sequence has room for at first, unless it
// says.
const firstRoom = cuda.KeyTile

// add begins the matrix of another layer and returns its number.
func (a *arena) add() int {
	a.layers = append(a.layers, cuda.Tensor{})
	return len(a.layers) - 1
}

// keys and values are those of layer i.
func (a *arena) keys(i int) cuda.Tensor   { return a.layers[i].ColRange(0, a.cols) }
func (a *arena) values(i int) cuda.Tensor { return a.layers[i].ColRange(a.cols, 2*a.cols) }

// reserve gives a sequence of used tokens room for n, at least twice what it
// had: it may move.
func (a *arena) reserve(e *extent, used, n int) (*extent, error) {
	if len(a.layers) == 0 || e != nil && n <= e.n {
		return e, nil
	}
	had := 0
	if e != nil {
		had = e.n
	}
	fresh, rows := a.place(max(n, 2*had, firstRoom)), 0
	for _, h := range a.held {
		rows = max(rows, h.lo+h.n)
	}
	for i, t := range a.layers {
		if t.Rows < rows {
			buf, err := a.dev.Grow(t.Buf, rows*2*a.cols)
			if err != nil {
				a.release(fresh)
				return e, fmt.Errorf("growing the keys and values to %d tokens: %w", rows, err)
			}
			a.layers[i] = cuda.Matrix(buf, rows, 2*a.cols)
		}
	}
	if used > 0 {
		from := make([]int32, used)
		for i := range from {
			from[i] = int32(e.lo + i)
		}
		for _, t := range a.layers {
			if err := a.dev.GatherRows(t.RowRange(fresh.lo, fresh.lo+used), t, from); err != nil {
				a.release(fresh)
				return e, fmt.Errorf("moving the keys and values of %d tokens: %w", used, err)
			}
		}
	}
	a.release(e)
	return fresh, nil
}

// place takes the first free rows for n tokens.
func (a *arena) place(n int) *extent {
	e := &extent{n: (n + cuda.KeyTile - 1) / cuda.KeyTile * cuda.KeyTile}
	i := 0
	for i < len(a.held) && a.held[i].lo-e.lo < e.n {
		e.lo = a.held[i].lo + a.held[i].n
		i++
	}
	a.held = slices.Insert(a.held, i, e)
	return e
}

// release gives rows back; nil holds none.
func (a *arena) release(e *extent) {
	a.held = slices.DeleteFunc(a.held, func(h *extent) bool { return h == e })
}

func (a *arena) close() {
	for _, t := range a.layers {
		if t.Buf != nil {
			t.Buf.Close()
		}
	}
	a.layers = nil
}
