package diagnose

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/draftscope/draftscope/drafter"
)

// A CheckpointComparison holds two drafters' weights against each other by
// numbers that do not depend on their scale, which says nothing by itself: a
// factor on a matrix whose output is normed next changes no draft.
type CheckpointComparison struct {
	A       string             `json:"a"`
	B       string             `json:"b"`
	Tensors []TensorComparison `json:"tensors"`
	Taps    []TapUse           `json:"taps"`
	OnlyA   []string           `json:"only_a"`
	OnlyB   []string           `json:"only_b"`
	// Faults are what is wrong with either side's files. Tensors that are not
	// finite are here and not in Tensors.
	Faults []CheckpointFault `json:"faults"`
}

// CheckpointFault is what is wrong with one side of a comparison.
type CheckpointFault struct {
	Side   string `json:"side"`             // a or b
	Tensor string `json:"tensor,omitempty"` // empty for the configuration
	Value  string `json:"value"`
}

// TensorComparison compares one tensor.
type TensorComparison struct {
	Name      string `json:"name"`
	Shape     []int  `json:"shape"` // of A
	Other     []int  `json:"other_shape,omitempty"`
	*Likeness        // nil where there is none: other shapes, zeros, whole numbers
	// Differ is how many entries differ, of tensors of whole numbers.
	Differ *int `json:"differ,omitempty"`
	// A and B are the spectra; nil for vectors.
	SpectrumA *Spectrum `json:"spectrum_a,omitempty"`
	SpectrumB *Spectrum `json:"spectrum_b,omitempty"`
	Note      string    `json:"note,omitempty"`
}

// Likeness compares two tensors as vectors, neither of them zero.
type Likeness struct {
	// Ratio is |B| / |A|, Cosine that of the two, and Rest what is left of B,
	// as a share of |B|, when the best multiple of A is taken off: √(1 − cos²).
	Ratio  float64 `json:"ratio"`
	Cosine float64 `json:"cosine"`
	Rest   float64 `json:"rest"`
}

// Spectrum sums up a matrix's singular values s, whatever its scale. Both
// numbers are estimates: 64 random vectors, 40 steps of power iteration.
type Spectrum struct {
	Top  float64 `json:"top"`            // max s² / Σ s²
	Rank float64 `json:"effective_rank"` // (Σ s²)² / Σ s⁴
}

// TapUse is the share of fc's squared norm that reads one tap.
type TapUse struct {
	Tap int     `json:"tap"` // from 1, in the order of the weights
	A   float64 `json:"a"`
	B   float64 `json:"b"`
}

// gaugeCosine is how near 1 a cosine must be for two tensors to differ by
// their scale alone: bf16 rounding leaves 1 − 3·10⁻⁶.
const gaugeCosine = 1 - 1e-5

// CompareCheckpoints compares the tensors of two drafters by name.
func CompareCheckpoints(a, b Checkpoint) (*CheckpointComparison, error) {
	c := &CheckpointComparison{A: a.Name, B: b.Name, Tensors: []TensorComparison{}, Taps: []TapUse{}, OnlyA: []string{}, OnlyB: []string{}, Faults: []CheckpointFault{}}
	for i, side := range []Checkpoint{a, b} {
		c.layout(sideNames[i], side)
	}
	names := [2]map[string]string{plainNames(a), plainNames(b)}
	for plain := range names[1] {
		if names[0][plain] == "" {
			c.OnlyB = append(c.OnlyB, plain)
		}
	}
	slices.Sort(c.OnlyB)
	var order []string
	for plain := range names[0] {
		order = append(order, plain)
	}
	slices.Sort(order)
	for _, plain := range order {
		if names[1][plain] == "" {
			c.OnlyA = append(c.OnlyA, plain)
			continue
		}
		if err := c.tensor(a, b, plain, names[0][plain], names[1][plain]); err != nil {
			return nil, fmt.Errorf("comparing %s with %s: %w", a.Name, b.Name, err)
		}
	}
	return c, nil
}

// plainNames maps names without the prefix "model." to a checkpoint's own.
func plainNames(c Checkpoint) map[string]string {
	out := map[string]string{}
	for _, name := range c.Weights.Names() {
		out[strings.TrimPrefix(name, "model.")] = name
	}
	return out
}

func (c *CheckpointComparison) tensor(a, b Checkpoint, plain, nameA, nameB string) error {
	shape, _ := a.Weights.Shape(nameA)
	other, _ := b.Weights.Shape(nameB)
	t := TensorComparison{Name: plain, Shape: shape}
	if !slices.Equal(shape, other) {
		t.Other, t.Note = other, "of another shape: not compared"
		c.Tensors = append(c.Tensors, t)
		return nil
	}
	x, xs, err := values(a, nameA)
	if err != nil {
		return err
	}
	y, ys, err := values(b, nameB)
	if err != nil {
		return err
	}
	switch {
	case (xs == nil) != (ys == nil):
		t.Note = "whole numbers on one side and floats on the other: not compared"
		c.Tensors = append(c.Tensors, t)
		return nil
	case xs != nil:
		t.Differ = new(0)
		for i, v := range xs {
			if v != ys[i] {
				*t.Differ++
			}
		}
		t.Note = "equal"
		if *t.Differ > 0 {
			t.Note = fmt.Sprintf("%d of %d entries differ", *t.Differ, len(xs))
		}
		c.Tensors = append(c.Tensors, t)
		return nil
	}
	before := len(c.Faults)
	c.finite("a", plain, shape, x)
	c.finite("b", plain, shape, y)
	if len(c.Faults) > before {
		return nil
	}
	var dot, nx, ny float64
	for i, v := range x {
		v, w := float64(v), float64(y[i])
		dot += v * w
		nx += v * v
		ny += w * w
	}
	switch {
	case nx > 0 && ny > 0:
		cos := min(max(dot/math.Sqrt(nx*ny), -1), 1)
		t.Likeness = &Likeness{Ratio: math.Sqrt(ny / nx), Cosine: cos, Rest: math.Sqrt(max(0, 1-cos*cos))}
		t.Note = gaugeNote(plain, *t.Likeness)
	case nx == 0 && ny == 0:
		t.Note = "all zero on both sides"
	default:
		t.Note = "all zero on one side"
	}
	if len(shape) == 2 && shape[0] > 1 && shape[1] > 1 {
		t.SpectrumA, t.SpectrumB = spectrumOf(x, shape[0], shape[1], nx), spectrumOf(y, shape[0], shape[1], ny)
	}
	if t.Likeness != nil && plain == "fc.weight" && len(shape) == 2 && shape[0] > 0 && shape[1]%shape[0] == 0 {
		c.Taps = tapUses(x, y, shape[0], shape[1], nx, ny)
	}
	c.Tensors = append(c.Tensors, t)
	return nil
}

// sideNames are those of [CheckpointFault.Side].
var sideNames = [2]string{"a", "b"}

// layout holds a side against its own configuration. A family that does not
// run here has no layout, and is compared all the same.
func (c *CheckpointComparison) layout(side string, of Checkpoint) {
	if _, isDrafter, err := drafter.KindOf(of.Config); err == nil && !isDrafter {
		return // two targets are compared by their tensors alone
	}
	layout, err := drafter.CheckLayout(of.Config, of.Weights)
	if err != nil && !errors.Is(err, drafter.ErrFamily) {
		c.Faults = append(c.Faults, CheckpointFault{Side: side, Value: err.Error()})
	}
	for _, f := range layout.Faults {
		c.Faults = append(c.Faults, CheckpointFault{side, f.Tensor, f.String()})
	}
}

// finite notes how many values of a tensor are not, and where the first is.
func (c *CheckpointComparison) finite(side, name string, shape []int, vals []float32) {
	n, first := 0, 0
	for i, v := range vals {
		if f := float64(v); math.IsNaN(f) || math.IsInf(f, 0) {
			if n == 0 {
				first = i
			}
			n++
		}
	}
	if n == 0 {
		return
	}
	place := make([]int, len(shape))
	for i, rest := len(shape)-1, first; i >= 0; i-- {
		place[i], rest = rest%shape[i], rest/shape[i]
	}
	c.Faults = append(c.Faults, CheckpointFault{side, name, fmt.Sprintf("%d of %d values are not finite, the first %v at %v: not compared", n, len(vals), vals[first], place)})
}

// values reads a tensor of floats, or else of whole numbers.
func values(c Checkpoint, name string) ([]float32, []int64, error) {
	floats, err := c.Weights.Float32s(name)
	if err == nil {
		return floats, nil, nil
	}
	if ints, intErr := c.Weights.Ints(name); intErr == nil {
		return nil, ints, nil
	}
	return nil, nil, err
}

// gaugeNote says when a difference is none.
func gaugeNote(name string, t Likeness) string {
	switch {
	case t.Cosine == 1 && t.Ratio == 1:
		return "equal"
	case t.Cosine < gaugeCosine || math.Abs(t.Ratio-1) < 1e-3:
		return ""
	case name == "fc.weight":
		return "a scale alone, and a gauge: hidden_norm follows and takes it out"
	case strings.HasSuffix(name, "self_attn.q_proj.weight"):
		return "a scale alone, and a gauge: q_norm follows and takes it out"
	case strings.HasSuffix(name, "self_attn.k_proj.weight"):
		return "a scale alone, and a gauge: k_norm follows and takes it out"
	}
	return "a scale alone"
}

// spectrumOf estimates the spectrum of w, rows x cols, whose squared norm is
// given.
func spectrumOf(w []float32, rows, cols int, square float64) *Spectrum {
	if square == 0 {
		return nil
	}
	const probes, steps = 64, 40
	rng := rand.New(rand.NewPCG(7, 11))
	v, u := make([]float64, cols), make([]float64, rows)
	// gram makes v ← Wᵀ W v.
	gram := func() {
		for i := range rows {
			var s float64
			for j, x := range w[i*cols : (i+1)*cols] {
				s += float64(x) * v[j]
			}
			u[i] = s
		}
		clear(v)
		for i := range rows {
			for j, x := range w[i*cols : (i+1)*cols] {
				v[j] += float64(x) * u[i]
			}
		}
	}
	var fourth float64
	for range probes {
		for j := range v {
			v[j] = float64(2*rng.IntN(2) - 1)
		}
		gram()
		for _, x := range v {
			fourth += x * x / probes
		}
	}
	if !slices.ContainsFunc(v, func(x float64) bool { return x != 0 }) {
		// The last probe lies where w gives zero: take one that does not.
		for j := range v {
			v[j] = rng.NormFloat64()
		}
		gram()
	}
	var top float64
	for range steps { // from the last probe
		var n float64
		for _, x := range v {
			n += x * x
		}
		n = math.Sqrt(n)
		for j := range v {
			v[j] /= n
		}
		gram()
		top = 0
		for _, x := range v {
			top += x * x
		}
		top = math.Sqrt(top)
	}
	return &Spectrum{Top: top / square, Rank: square * square / fourth}
}

func tapUses(x, y []float32, hidden, cols int, nx, ny float64) []TapUse {
	out := make([]TapUse, cols/hidden)
	for tap := range out {
		out[tap].Tap = tap + 1
		for row := range hidden {
			at := row*cols + tap*hidden
			for i := at; i < at+hidden; i++ {
				out[tap].A += float64(x[i]) * float64(x[i]) / nx
				out[tap].B += float64(y[i]) * float64(y[i]) / ny
			}
		}
	}
	return out
}

// WriteText writes the comparison for people.
func (c *CheckpointComparison) WriteText(w io.Writer) error {
	fmt.Fprintf(w, "Weights of %s against %s, whatever their scale\n", c.A, c.B)
	for _, f := range c.Faults {
		who := c.A
		if f.Side == "b" {
			who = c.B
		}
		if f.Tensor != "" {
			who += ", " + f.Tensor
		}
		fmt.Fprintf(w, "FAULT in %s: %s\n", who, f.Value)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "tensor\tshape\t|B|/|A|\tcosine\trest\ttop A\ttop B\trank A\trank B\t")
	for _, x := range c.Tensors {
		if x.Other != nil {
			fmt.Fprintf(t, "%s\t%v and %v\t\t\t\t\t\t\t\t%s\n", x.Name, x.Shape, x.Other, x.Note)
			continue
		}
		if x.Likeness == nil {
			fmt.Fprintf(t, "%s\t%v\t\t\t\t\t\t\t\t%s\n", x.Name, x.Shape, x.Note)
			continue
		}
		spectra := "\t\t\t"
		if a, b := x.SpectrumA, x.SpectrumB; a != nil && b != nil {
			spectra = fmt.Sprintf("%.3f\t%.3f\t%.0f\t%.0f", a.Top, b.Top, a.Rank, b.Rank)
		}
		fmt.Fprintf(t, "%s\t%v\t%.4f\t%.5f\t%.4f\t%s\t%s\n", x.Name, x.Shape, x.Ratio, x.Cosine, x.Rest, spectra, x.Note)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(c.Taps) > 0 {
		fmt.Fprintln(w, "\nUse of the taps: share of fc's squared norm")
		for _, u := range c.Taps {
			fmt.Fprintf(w, "  tap %d: %.3f and %.3f\n", u.Tap, u.A, u.B)
		}
	}
	for _, only := range []struct {
		who   string
		names []string
	}{{c.A, c.OnlyA}, {c.B, c.OnlyB}} {
		if len(only.names) > 0 {
			fmt.Fprintf(w, "\nonly in %s: %s\n", only.who, strings.Join(only.names, ", "))
		}
	}
	_, err := fmt.Fprintln(w, "\nrest: of B, when the best multiple of A is taken off. top: share of the largest singular value, max s²/Σs². rank: effective, (Σs²)²/Σs⁴.")
	return err
}
