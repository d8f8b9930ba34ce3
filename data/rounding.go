package data

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/draftscope/draftscope/schemas"
)

// Rounding is how exactly a run's states are stored. All but [Lossless] lose
// something: each row is rounded to a grid of 8-bit codes times a scale of the
// row's own, and what is stored are the grid's values. So vec stays a plain
// list of FLOAT, and takes less because its bytes hold less. Scales are powers
// of two: a value of the grid then is a bf16 too, and nothing is lost a second
// time.
type Rounding string

// The roundings. Int8 has 255 evenly spaced values, ±127 times the scale at
// most. E4M3 has those of fp8 e4m3: four bits of exponent, three of mantissa,
// ±448 times the scale at most, so that small values of a row with a large one
// keep their relative precision over some five decades.
const (
	Lossless Rounding = ""
	Int8     Rounding = "int8"
	E4M3     Rounding = "fp8-e4m3"
)

// limit is the largest value of the grid in units of the scale.
func (r Rounding) limit() float64 {
	if r == Int8 {
		return 127
	}
	return 448
}

func (r Rounding) validate() error {
	switch r {
	case Lossless, Int8, E4M3:
		return nil
	}
	return fmt.Errorf("states encoding %q: want nothing, %q or %q", string(r), Int8, E4M3)
}

// RoundingError says what rounding did to the rows of one state. Sums add up
// over files.
type RoundingError struct {
	State int   `json:"state"`
	Rows  int64 `json:"rows"`
	// SumSquares and SumErrors are sums of squares over all values: of the
	// captured ones, and of the differences. SumCosines is over rows, of the
	// captured with the stored; a row of zeros counts as 1.
	SumSquares float64 `json:"sum_squares"`
	SumErrors  float64 `json:"sum_errors"`
	SumCosines float64 `json:"sum_cosines"`
	MinCosine  float64 `json:"min_cosine"` // of any row; 1 without rows
	// LosslessBytes is what the column vec of these rows would take without
	// loss: the frames of the captured values were made and thrown away.
	LosslessBytes int64 `json:"lossless_bytes"`
}

// RelL2 is the length of all differences over that of all values.
func (e RoundingError) RelL2() float64 {
	if e.SumSquares == 0 {
		return 0
	}
	return math.Sqrt(e.SumErrors / e.SumSquares)
}

// MeanCosine is the mean over rows of the cosine of captured and stored.
func (e RoundingError) MeanCosine() float64 {
	if e.Rows == 0 {
		return 1
	}
	return e.SumCosines / float64(e.Rows)
}

func (e *RoundingError) add(o RoundingError) {
	e.Rows += o.Rows
	e.SumSquares += o.SumSquares
	e.SumErrors += o.SumErrors
	e.SumCosines += o.SumCosines
	e.MinCosine = min(e.MinCosine, o.MinCosine)
	e.LosslessBytes += o.LosslessBytes
}

// addErrors adds per state; both lists have a run's states in order.
func addErrors(to, from []RoundingError) {
	for i := range to {
		to[i].add(from[i])
	}
}

// round returns raw, rows of hidden values, rounded row by row, and adds to e
// what that did. Rows with a NaN or an infinity stay as they are; they are
// never stored.
func (r Rounding) round(d schemas.DType, hidden int, raw []byte, e *RoundingError) []byte {
	out := make([]byte, 0, len(raw))
	vals := make([]float32, 0, hidden)
	width := hidden * d.Size()
	for ; len(raw) >= width; raw = raw[width:] {
		vals = d.AppendFloats(vals[:0], raw[:width])
		r.roundRow(vals, e)
		out = d.AppendBytes(out, vals)
	}
	return out
}

func (r Rounding) roundRow(vals []float32, e *RoundingError) {
	var largest float64
	for _, v := range vals {
		a := math.Abs(float64(v))
		if !(a <= math.MaxFloat32) {
			return
		}
		largest = max(largest, a)
	}
	scale, inverse := r.scale(largest)
	var xx, yy, xy, ee float64
	for i, v := range vals {
		x := float64(v)
		y := r.nearest(x*inverse) * scale
		vals[i] = float32(y)
		xx += x * x
		yy += y * y
		xy += x * y
		ee += (x - y) * (x - y)
	}
	e.Rows++
	e.SumSquares += xx
	e.SumErrors += ee
	cosine := 0.0 // of a row that became all zeros
	switch {
	case xx == 0:
		cosine = 1
	case yy > 0:
		cosine = min(1, xy/math.Sqrt(xx*yy))
	}
	e.SumCosines += cosine
	e.MinCosine = min(e.MinCosine, cosine)
}

// scale is the smallest power of two with which the grid reaches largest, and
// its inverse. Below 2^-120 it is no smaller: with it, bf16 still holds all of
// the grid.
func (r Rounding) scale(largest float64) (scale, inverse float64) {
	_, exp := math.Frexp(largest / r.limit())
	if math.Ldexp(r.limit(), exp-1) >= largest {
		exp--
	}
	exp = max(exp, -120)
	return math.Ldexp(1, exp), math.Ldexp(1, -exp)
}

// nearest is the value of the grid that is nearest to x, in units of the
// scale; ties go to the even one.
func (r Rounding) nearest(x float64) float64 {
	if r == Int8 {
		return math.RoundToEven(x)
	}
	// Eight steps a power of two, down to 2^-6; below, the same step.
	exp := max(int(math.Float64bits(x)>>52&0x7ff)-1023, -6) - 3
	step := math.Float64frombits(uint64(1023+exp) << 52)
	unit := math.Float64frombits(uint64(1023-exp) << 52)
	return math.RoundToEven(x*unit) * step
}

// roundingErrors reads what the footer of a states file says.
func (o *openedPart) roundingErrors(states []int) ([]RoundingError, error) {
	var list []RoundingError
	if err := json.Unmarshal([]byte(o.kv(keyRounding)), &list); err != nil || len(list) != len(states) {
		return nil, fmt.Errorf("reading %s: %w: its rounding errors", o.path, ErrDamaged)
	}
	for i, e := range list {
		if e.State != states[i] {
			return nil, fmt.Errorf("reading %s: %w: rounding error of state %d, want %d", o.path, ErrDamaged, e.State, states[i])
		}
	}
	return list, nil
}

// RoundedStates says what rounding did to the states of a run.
type RoundedStates struct {
	Encoding Rounding        `json:"encoding"`
	Bytes    int64           `json:"bytes"`          // that the column vec takes
	Lossless int64           `json:"lossless_bytes"` // that it would take without loss
	Captured int64           `json:"captured_bytes"` // of the values as they were captured
	States   []RoundingError `json:"states"`
}

// RoundedStates says what rounding did to the states of a run. For a run that
// was stored without loss it is nil.
func (d *Dataset) RoundedStates(run string) (*RoundedStates, error) {
	r, err := d.Run(run)
	if err != nil || r.Rounding == Lossless {
		return nil, err
	}
	total := &RoundedStates{Encoding: r.Rounding, States: r.noErrors()}
	err = d.eachStates(r, func(o *openedPart) error {
		list, err := o.roundingErrors(r.States)
		if err == nil {
			addErrors(total.States, list)
			total.Bytes += o.vecBytes()
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading the rounding errors of run %s: %w", run, err)
	}
	for _, e := range total.States {
		total.Lossless += e.LosslessBytes
		total.Captured += e.Rows * int64(r.Hidden*r.DType.Size())
	}
	return total, nil
}

// vecBytes is what the column vec of a states file takes.
func (o *openedPart) vecBytes() (n int64) {
	for _, rg := range o.Metadata().RowGroups {
		for _, c := range rg.Columns {
			if slices.Equal(c.MetaData.PathInSchema, vecPath) {
				n += c.MetaData.TotalCompressedSize
			}
		}
	}
	return n
}

// String names the rounding for people.
func (r Rounding) String() string {
	if r == Lossless {
		return "lossless"
	}
	return string(r)
}

// noErrors is the start of a sum.
func (r Run) noErrors() []RoundingError {
	list := make([]RoundingError, len(r.States))
	for i, c := range r.States {
		list[i].State, list[i].MinCosine = c, 1
	}
	return list
}
