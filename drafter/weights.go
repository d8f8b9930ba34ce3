package drafter

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/cuda"
)

// Weights are the tensors of a checkpoint, by name.
type Weights interface {
	Names() []string
	Shape(name string) (shape []int, ok bool)
	// Float32s is a tensor's values, row-major.
	Float32s(name string) ([]float32, error)
	// Ints is a tensor of whole numbers or bits.
	Ints(name string) ([]int64, error)
}

// loader takes tensors out of a checkpoint and remembers which, so that what
// is left over can be refused. Names may carry the prefix "model.".
type loader struct {
	weights Weights
	dev     cuda.Device
	names   map[string]string // plain name to the checkpoint's own
	taken   map[string]bool
	buffers []cuda.Buffer
}

const modelPrefix = "model."

func newLoader(w Weights, dev cuda.Device) (*loader, error) {
	l := &loader{weights: w, dev: dev, names: map[string]string{}, taken: map[string]bool{}}
	for _, name := range w.Names() {
		plain := strings.TrimPrefix(name, modelPrefix)
		if other, ok := l.names[plain]; ok {
			return nil, fmt.Errorf("%w: both %s and %s are there", ErrWeights, other, name)
		}
		l.names[plain] = name
	}
	return l, nil
}

// has says whether the checkpoint holds a tensor.
func (l *loader) has(name string) bool {
	_, ok := l.names[name]
	return ok
}

// shape is the shape of a tensor that must be there.
func (l *loader) shape(name string) ([]int, error) {
	own, ok := l.names[name]
	if !ok {
		return nil, fmt.Errorf("%w: %s is missing", ErrWeights, name)
	}
	shape, ok := l.weights.Shape(own)
	if !ok {
		return nil, fmt.Errorf("%w: %s is missing", ErrWeights, name)
	}
	return shape, nil
}

// floats reads a tensor of exactly the given shape.
func (l *loader) floats(name string, shape ...int) ([]float32, error) {
	got, err := l.shape(name)
	if err != nil {
		return nil, err
	}
	if !slices.Equal(got, shape) {
		return nil, fmt.Errorf("%w: %s has shape %v, want %v", ErrWeights, name, got, shape)
	}
	l.taken[name] = true
	vals, err := l.weights.Float32s(l.names[name])
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", name, err)
	}
	n := 1
	for _, d := range shape {
		n *= d
	}
	if len(vals) != n {
		return nil, fmt.Errorf("%w: %s has %d values, want %d", ErrWeights, name, len(vals), n)
	}
	for i, v := range vals {
		if !finite(v) {
			return nil, fmt.Errorf("%w: %s holds %v at value %d", ErrWeights, name, v, i)
		}
	}
	return vals, nil
}

// matrix uploads a tensor of rows x cols; rows = 0 stands for a vector.
func (l *loader) matrix(name string, rows, cols int) (cuda.Tensor, error) {
	shape := []int{rows, cols}
	if rows == 0 {
		shape = []int{cols}
	}
	vals, err := l.floats(name, shape...)
	if err != nil {
		return cuda.Tensor{}, err
	}
	t, err := l.room(max(rows, 1), cols)
	if err != nil {
		return cuda.Tensor{}, fmt.Errorf("placing %s: %w", name, err)
	}
	return t, l.upload(name, t, vals)
}

// room is memory for rows x cols weights.
func (l *loader) room(rows, cols int) (cuda.Tensor, error) {
	buf, err := l.dev.New(rows * cols)
	if err != nil {
		return cuda.Tensor{}, err
	}
	l.buffers = append(l.buffers, buf)
	return cuda.Matrix(buf, rows, cols), nil
}

// into uploads a tensor of dst's shape to dst.
func (l *loader) into(name string, dst cuda.Tensor) error {
	vals, err := l.floats(name, dst.Rows, dst.Cols)
	if err != nil {
		return err
	}
	return l.upload(name, dst, vals)
}

func (l *loader) upload(name string, dst cuda.Tensor, vals []float32) error {
	if err := l.dev.Upload(dst, vals); err != nil {
		return fmt.Errorf("placing %s: %w", name, err)
	}
	return nil
}

// unknown refuses tensors that nobody took.
func (l *loader) unknown() error {
	var left []string
	for name, own := range l.names {
		if !l.taken[name] {
			left = append(left, own)
		}
	}
	if len(left) == 0 {
		return nil
	}
	slices.Sort(left)
	more := ""
	if len(left) > 4 {
		left, more = left[:4], fmt.Sprintf(" and %d more", len(left)-4)
	}
	return fmt.Errorf("%w: unknown tensors %s%s", ErrWeights, strings.Join(left, ", "), more)
}

func (l *loader) close() {
	for _, b := range l.buffers {
		b.Close()
	}
	l.buffers = nil
}

func finite(v float32) bool {
	return math.Float32bits(v)&0x7f800000 != 0x7f800000
}

// copyOf says whether a tensor of the checkpoint holds exactly the values of
// t, as the device keeps them: it may round. If so the tensor counts as taken.
func (l *loader) copyOf(name string, t cuda.Tensor) (bool, error) {
	vals, err := l.floats(name, t.Rows, t.Cols)
	if err != nil {
		return false, err
	}
	// A slab at a time: a vocabulary head can have a billion values.
	const slab = 1024
	rows := min(slab, t.Rows)
	buf, err := l.dev.New(rows * t.Cols)
	if err != nil {
		return false, fmt.Errorf("comparing %s with the target's: %w", name, err)
	}
	defer buf.Close()
	own, theirs := make([]float32, rows*t.Cols), make([]float32, rows*t.Cols)
	for lo := 0; lo < t.Rows; lo += slab {
		hi := min(lo+slab, t.Rows)
		n, kept := (hi-lo)*t.Cols, cuda.Matrix(buf, hi-lo, t.Cols)
		err := errors.Join(l.dev.Upload(kept, vals[lo*t.Cols:hi*t.Cols]), l.dev.Download(own[:n], kept),
			l.dev.Download(theirs[:n], t.RowRange(lo, hi)))
		if err != nil {
			return false, fmt.Errorf("comparing %s with the target's: %w", name, err)
		}
		if !slices.Equal(own[:n], theirs[:n]) {
			return false, nil
		}
	}
	return true, nil
}

// reader takes tensors in a row, in the shapes that are wanted, and keeps the
// first error.
type reader struct {
	l      *loader
	want   map[string][]int
	prefix string
	err    error
}

func shapesOf(list []Misshapen) map[string][]int {
	out := make(map[string][]int, len(list))
	for _, t := range list {
		out[t.Tensor] = t.Want
	}
	return out
}

func (r *reader) shape(name string) []int { return r.want[r.prefix+name] }

func (r *reader) matrix(name string) cuda.Tensor {
	if r.err != nil {
		return cuda.Tensor{}
	}
	rows, cols := 0, r.shape(name)[0]
	if shape := r.shape(name); len(shape) == 2 {
		rows, cols = shape[0], shape[1]
	}
	var t cuda.Tensor
	t, r.err = r.l.matrix(r.prefix+name, rows, cols)
	return t
}

// into is matrix for a part of memory that is there.
func (r *reader) into(name string, dst cuda.Tensor) {
	if r.err == nil {
		r.err = r.l.into(r.prefix+name, dst)
	}
}
