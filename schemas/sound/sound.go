// Package sound says what a captured sequence must be, wherever it comes by:
// the sink that stores it and the stage that drafts on it ask the same
// questions and set the same sequences aside. Values are finite (K1), states
// are alive (K2), their rows are of the size that the target gives them (K7),
// and what the target answered is what it then wrote (K5).
package sound

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/draftscope/draftscope/schemas"
)

// Fault is one thing that is wrong with a state of a sequence.
type Fault struct {
	Check  string
	State  int
	Row    int // the first
	Detail string
}

// String says where and what.
func (f Fault) String() string { return fmt.Sprintf("state %d, row %d: %s", f.State, f.Row, f.Detail) }

// Checker looks at a captured sequence as its records come, in order. What it
// finds does not depend on how the sequence is cut into records.
type Checker struct {
	profile Profile
	before  schemas.Token // the last token of the record before
	rows    int
	states  []state
}

// state is what is known of one state so far.
type state struct {
	number int
	finite counts
	alive  Alive
	last   []byte
	rms    []float64
}

// counts are of values that are not finite.
type counts struct{ nan, inf, rows, first int }

// NewChecker begins a sequence. Without a profile no sizes are checked.
func NewChecker(profile Profile) *Checker { return &Checker{profile: profile} }

// Add takes the next rows. norms are the L2 norms of each state's rows, or nil
// to have them computed.
func (c *Checker) Add(rec schemas.Capture, norms [][]float32) {
	if c.states == nil {
		c.states = make([]state, len(rec.Spec.States))
		for i, n := range rec.Spec.States {
			c.states[i].number = n
		}
	}
	width := rec.Spec.Hidden * rec.Spec.DType.Size()
	scale := math.Sqrt(float64(rec.Spec.Hidden))
	for i := range min(len(c.states), len(rec.States)) {
		s, raw := &c.states[i], rec.States[i]
		last, before := s.last, c.before
		s.rms = slices.Grow(s.rms, len(rec.Tokens))
		for r, token := range rec.Tokens {
			row := raw[r*width : (r+1)*width]
			var norm float32
			if norms != nil {
				norm = norms[i][r]
			} else {
				norm = Norm(rec.Spec.DType, row)
			}
			at := c.rows + r
			if norm != norm || math.IsInf(float64(norm), 0) {
				s.finite.add(rec.Spec.DType, row, at)
			} else {
				s.alive.Add(at, norm == 0 && !MayBeZero(s.number, token),
					norm != 0 && at > 0 && !MayRepeat(before, token) && bytes.Equal(row, last))
				s.rms = append(s.rms, float64(norm)/scale)
			}
			last, before = row, token
		}
		s.last = append(s.last[:0], last...) // the record is the caller's
	}
	c.rows += len(rec.Tokens)
	if n := len(rec.Tokens); n > 0 {
		c.before = schemas.Token{TokenID: rec.Tokens[n-1].TokenID}
	}
}

// Found lists what is wrong so far, state by state: K1, and where there is
// none, K2.
func (c *Checker) Found() (faults []Fault) {
	for _, s := range c.states {
		if f := s.finite; f.rows > 0 {
			faults = append(faults, Fault{"K1", s.number, f.first, fmt.Sprintf("NaN count %d, Inf count %d in %d rows of this state", f.nan, f.inf, f.rows)})
		}
	}
	if faults != nil {
		return faults
	}
	for _, s := range c.states {
		for _, f := range s.alive.Faults(c.rows) {
			f.State = s.number
			faults = append(faults, f)
		}
	}
	return faults
}

// End lists what is wrong with the whole: what [Checker.Found] has, and where
// there is nothing, K7.
func (c *Checker) End() []Fault {
	faults := c.Found()
	if faults != nil {
		return faults
	}
	for _, s := range c.states {
		if detail := c.profile.Check(s.number, s.rms); detail != "" {
			faults = append(faults, Fault{"K7", s.number, 0, detail})
		}
	}
	return faults
}

func (n *counts) add(d schemas.DType, row []byte, at int) {
	before := n.nan + n.inf
	for _, v := range d.AppendFloats(nil, row) {
		switch {
		case v != v:
			n.nan++
		case math.IsInf(float64(v), 0):
			n.inf++
		}
	}
	if n.nan+n.inf == before { // the norm is past float32, though no value is
		n.inf++
	}
	if n.rows == 0 {
		n.first = at
	}
	n.rows++
}

// Alive counts rows of a state that no target computes: of zeros, and
// bit-equal to the row before.
type Alive struct{ zero, firstZero, same, firstSame int }

// Add counts a row.
func (a *Alive) Add(row int, zero, same bool) {
	if zero {
		if a.zero++; a.zero == 1 {
			a.firstZero = row
		}
	}
	if same {
		if a.same++; a.same == 1 {
			a.firstSame = row
		}
	}
}

// Faults is K2, of so many rows.
func (a *Alive) Faults(rows int) (out []Fault) {
	if a.zero > 0 {
		out = append(out, Fault{Check: "K2", Row: a.firstZero, Detail: fmt.Sprintf("%d of %d rows are zero", a.zero, rows)})
	}
	if a.same > 0 {
		out = append(out, Fault{Check: "K2", Row: a.firstSame, Detail: fmt.Sprintf("%d of %d rows equal the row before bit for bit, and belong to another token", a.same, rows)})
	}
	return out
}

// MayBeZero says that a row of a state may be zero: an embedding, of a token
// that is not supervised. That of padding often is zero; the states behind it
// are not.
func MayBeZero(state int, t schemas.Token) bool { return state == 0 && !t.LossMask }

// MayRepeat says that a row may equal the row before bit for bit: where the
// token repeats. Its embedding does; and the states behind that do where all
// that the token sees is this one token, as at the beginning of a text, within
// a window, or in padding.
func MayRepeat(before, t schemas.Token) bool { return before.TokenID == t.TokenID }

// Norm is the L2 norm of a row.
func Norm(d schemas.DType, row []byte) float32 {
	var sums [4]float64
	square := func(bits uint32) float64 {
		v := float64(math.Float32frombits(bits))
		return v * v
	}
	if d == schemas.BF16 {
		for ; len(row) >= 8; row = row[8:] {
			x := binary.LittleEndian.Uint64(row)
			sums[0] += square(uint32(x) << 16)
			sums[1] += square(uint32(x) & 0xffff0000)
			sums[2] += square(uint32(x>>32) << 16)
			sums[3] += square(uint32(x>>32) & 0xffff0000)
		}
	} else {
		for ; len(row) >= 16; row = row[16:] {
			x, y := binary.LittleEndian.Uint64(row), binary.LittleEndian.Uint64(row[8:])
			sums[0] += square(uint32(x))
			sums[1] += square(uint32(x >> 32))
			sums[2] += square(uint32(y))
			sums[3] += square(uint32(y >> 32))
		}
	}
	for _, v := range d.AppendFloats(nil, row) {
		sums[0] += float64(v) * float64(v)
	}
	return float32(math.Sqrt(sums[0] + sums[1] + sums[2] + sums[3]))
}
