// Package probe takes states that came from elsewhere: how they are stored
// ([Format]), which of a target's states they are ([Prober]), and what the
// target would have said after them ([Score]).
package probe

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/extract/target"
)

// ErrClaim marks states that are not what somebody says they are.
var ErrClaim = errors.New("wrong claim")

// Prober runs a few rows of sequences natively.
type Prober struct {
	Model  *target.Model
	States []int // what the rows are claimed to be, slot by slot
	// DType is that in which the rows came: for bf16 and f16, a row may be
	// the one that was taken for the other.
	DType string
}

const (
	// probeWindow bounds the tokens that are run again.
	probeWindow = 512
	// probeEdge is how many rows are compared at each end of the window.
	probeEdge = 8
	// probePiece bounds the rows of one forward pass.
	probePiece = 256
	// A state must be this near to what it is said to be. Engines compute in
	// 16 bits and the target in 32, which costs a deep model about 0.5 % of
	// cosine and a tenth of distance; a layer more or less costs more.
	nearCosine   = 0.98
	nearDistance = 0.25
)

// Nearness is how near two sets of rows are, as means over the rows.
type Nearness struct{ Cosine, Distance float64 }

func (n Nearness) fits() bool { return n.Cosine >= nearCosine && n.Distance <= nearDistance }

// String says both.
func (n Nearness) String() string {
	return fmt.Sprintf("cosine %.4f, distance %.3f", n.Cosine, n.Distance)
}

// Rows gives row r of slot i.
type Rows func(i, r int) []float32

// Test compares rows of a sequence of these ids with the target's, the first
// lent of which are those of somebody who was tested before and are not
// compared. An error that wraps [ErrClaim] names, for each state that is not
// what it is claimed to be, what it is.
func (p Prober) Test(ids []int32, lent int, rows Rows) error {
	compared := ownRows(len(ids), lent)
	if len(compared) == 0 {
		return nil // one row says nothing: its state may be any token's
	}
	native, err := p.run(ids, compared)
	if err != nil {
		return fmt.Errorf("running the target: %w", err)
	}
	var wrong []string
	for i, c := range p.States {
		if verdict := p.judge(c, pick(rows, i, compared), native, compared); verdict != "" {
			wrong = append(wrong, fmt.Sprintf("state %d: %s", c, verdict))
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrClaim, strings.Join(wrong, "; "))
}

func pick(rows Rows, i int, window []int) [][]float32 {
	out := make([][]float32, len(window))
	for j, r := range window {
		out[j] = rows(i, r)
	}
	return out
}

// Found is what a slot's rows are.
type Found struct {
	State  int  // the nearest state
	Normed bool // or rather the last one, after the final norm
	Near   Nearness
}

// Find says which states the rows of so many slots are. An error that wraps
// [ErrClaim] names a slot that is none of the target's states.
func (p Prober) Find(ids []int32, slots int, rows Rows) ([]Found, error) {
	window := probeRows(min(len(ids), probeWindow))
	if len(window) == 0 {
		return nil, fmt.Errorf("%w: a sequence of %d tokens is too short to tell", ErrClaim, len(ids))
	}
	native, err := p.run(ids, window)
	if err != nil {
		return nil, fmt.Errorf("running the target: %w", err)
	}
	n := p.Model.Config().Layers
	out := make([]Found, slots)
	for i := range out {
		got := pick(rows, i, window)
		out[i].Near, _ = near(got, native[normed], window, 0)
		out[i].State, out[i].Normed = n, true
		for c := range n + 1 {
			if d, _ := near(got, native[nameOf(c)], window, 0); d.Distance < out[i].Near.Distance {
				out[i] = Found{c, false, d}
			}
		}
		if !out[i].Near.fits() {
			return nil, fmt.Errorf("%w: slot %d is none of the target's states (nearest is state %d: %v)", ErrClaim, i, out[i].State, out[i].Near)
		}
	}
	return out, nil
}

// ownRows are the rows of a sequence that are compared, none of the first lent
// ones. The window reaches at least probeEdge behind these.
func ownRows(rows, lent int) []int {
	window := probeRows(min(rows, max(probeWindow, lent+probeEdge)))
	return slices.DeleteFunc(window, func(r int) bool { return r < lent })
}

// probeRows are the rows of a window that are compared: both ends of it, but
// for the first row, whose state is huge in many models and says little.
func probeRows(window int) []int {
	var rows []int
	for r := 1; r < window; r++ {
		if r <= probeEdge || r >= window-probeEdge {
			rows = append(rows, r)
		}
	}
	return rows
}

// natives are the target's states: by name, then by row.
type natives map[string]map[int][]float32

func nameOf(c int) string { return fmt.Sprintf("state %d", c) }

// run computes all states of the rows around those asked for, and the final
// norm of the last.
func (p Prober) run(ids []int32, rows []int) (natives, error) {
	n, h := p.Model.Config().Layers, p.Model.Config().Hidden
	want := map[int]bool{}
	for _, r := range rows {
		want[r-1], want[r], want[r+1] = true, true, true
	}
	all := make([]int, n+1)
	for c := range all {
		all[c] = c
	}
	seq, err := p.Model.NewSequence()
	if err != nil {
		return nil, err
	}
	defer seq.Close()
	out := natives{normed: {}}
	for _, c := range all {
		out[nameOf(c)] = map[int][]float32{}
	}
	end := min(len(ids), rows[len(rows)-1]+2)
	for lo := 0; lo < end; {
		// A piece is all wanted or all unwanted: states of a piece that nobody
		// compares are not read back.
		hi := lo + 1
		for hi < end && hi < lo+probePiece && want[hi] == want[lo] {
			hi++
		}
		states := all
		if !want[lo] {
			states = nil
		}
		got, err := p.Model.Forward([]*target.Sequence{seq}, [][]int32{ids[lo:hi]}, states)
		if err != nil {
			return nil, err
		}
		if states != nil {
			for c, vals := range got.States {
				for r := lo; r < hi; r++ {
					out[nameOf(c)][r] = vals[(r-lo)*h : (r-lo+1)*h]
				}
			}
			if err := p.normed(out, got.Final, lo, hi); err != nil {
				return nil, err
			}
		}
		lo = hi
	}
	return out, nil
}

const normed = "the last state after the final norm"

func (p Prober) normed(out natives, final cuda.Tensor, lo, hi int) error {
	y, err := p.Model.Normed(final)
	if err != nil {
		return err
	}
	h := y.Cols
	vals := make([]float32, y.Rows*h)
	if err := p.Model.Device().Download(vals, y); err != nil {
		return err
	}
	for r := lo; r < hi; r++ {
		out[normed][r] = vals[(r-lo)*h : (r-lo+1)*h]
	}
	return nil
}

// judge says what is wrong with the rows got, which are claimed to be state
// c; "" when they are.
func (p Prober) judge(c int, got [][]float32, native natives, rows []int) string {
	claimed, _ := near(got, native[nameOf(c)], rows, 0)
	best, bestName := claimed, ""
	try := func(name string, vals [][]float32, of map[int][]float32, shift int) {
		if n, ok := near(vals, of, rows, shift); ok && n.Distance < best.Distance {
			best, bestName = n, name
		}
	}
	for name, of := range native {
		if name != nameOf(c) {
			try("it is "+name, got, of, 0)
		}
	}
	for _, shift := range []int{-1, 1} {
		try(fmt.Sprintf("its rows are those of the token %+d", shift), got, native[nameOf(c)], shift)
	}
	if other, name := p.reread(got); other != nil {
		try(name, other, native[nameOf(c)], 0)
	}
	switch {
	case bestName != "" && best.fits():
		return fmt.Sprintf("%s (%v; as claimed %v)", bestName, best, claimed)
	case claimed.fits():
		return ""
	}
	return fmt.Sprintf("it is none of the target's states (%v; a missing prefix, other weights, or padding taken for tokens?)", claimed)
}

// reread is the same bytes as the other 16-bit type.
func (p Prober) reread(got [][]float32) (vals [][]float32, name string) {
	bits := func(v float32) uint16 { return uint16(math.Float32bits(v) >> 16) }
	read := Half
	name = "its bytes are f16, sent as bf16"
	switch p.DType {
	case "f16":
		bits, name = toHalf, "its bytes are bf16, sent as f16"
		read = func(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }
	case "bf16":
	default:
		return nil, ""
	}
	for _, row := range got {
		out := make([]float32, len(row))
		for i, v := range row {
			out[i] = read(bits(v))
		}
		vals = append(vals, out)
	}
	return vals, name
}

// near compares rows with those of of that lie shift away. It is not ok where
// none is there to compare.
func near(got [][]float32, of map[int][]float32, rows []int, shift int) (n Nearness, ok bool) {
	count := 0.0
	for j, r := range rows {
		want := of[r+shift]
		if want == nil {
			continue
		}
		var dot, gg, ww, dd float64
		for i, v := range got[j] {
			g, w := float64(v), float64(want[i])
			dot, gg, ww, dd = dot+g*w, gg+g*g, ww+w*w, dd+(g-w)*(g-w)
		}
		if gg > 0 && ww > 0 {
			n.Cosine += dot / math.Sqrt(gg*ww)
		}
		n.Distance += math.Sqrt(dd / max(ww, 1e-30))
		count++
	}
	if count == 0 {
		return Nearness{Distance: math.Inf(1)}, false
	}
	return Nearness{n.Cosine / count, n.Distance / count}, true
}
