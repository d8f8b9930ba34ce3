package diagnose

import (
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"text/tabwriter"
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
}

// TensorComparison compares one tensor.
type TensorComparison struct {
	Name  string `json:"name"`
	Shape []int  `json:"shape"` // of A
	Other []int  `json:"other_shape,omitempty"`
	// Ratio is |B| / |A|, Cosine that of the two as vectors, and Rest what is
	// left of B, as a share of |B|, when the best multiple of A is taken off:
	// √(1 − cos²).
	Ratio  float64 `json:"ratio"`
	Cosine float64 `json:"cosine"`
	Rest   float64 `json:"rest"`
	// A and B are the spectra; nil for vectors.
	SpectrumA *Spectrum `json:"spectrum_a,omitempty"`
	SpectrumB *Spectrum `json:"spectrum_b,omitempty"`
	Note      string    `json:"note,omitempty"`
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
	c := &CheckpointComparison{A: a.Name, B: b.Name, Tensors: []TensorComparison{}, Taps: []TapUse{}, OnlyA: []string{}, OnlyB: []string{}}
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
	x, err := a.Weights.Float32s(nameA)
	if err != nil {
		return err
	}
	y, err := b.Weights.Float32s(nameB)
	if err != nil {
		return err
	}
	var dot, nx, ny float64
	for i, v := range x {
		v, w := float64(v), float64(y[i])
		dot += v * w
		nx += v * v
		ny += w * w
	}
	if nx > 0 && ny > 0 {
		t.Ratio = math.Sqrt(ny / nx)
		t.Cosine = min(max(dot/math.Sqrt(nx*ny), -1), 1)
		t.Rest = math.Sqrt(max(0, 1-t.Cosine*t.Cosine))
	}
	t.Note = gaugeNote(plain, t)
	if len(shape) == 2 && shape[0] > 1 && shape[1] > 1 {
		t.SpectrumA, t.SpectrumB = spectrumOf(x, shape[0], shape[1], nx), spectrumOf(y, shape[0], shape[1], ny)
	}
	if plain == "fc.weight" && len(shape) == 2 && shape[0] > 0 && shape[1]%shape[0] == 0 {
		c.Taps = tapUses(x, y, shape[0], shape[1], nx, ny)
	}
	c.Tensors = append(c.Tensors, t)
	return nil
}

// gaugeNote says when a difference is none.
func gaugeNote(name string, t TensorComparison) string {
	switch {
	case t.Ratio == 0:
		return "all zero on one side"
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
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "tensor\tshape\t|B|/|A|\tcosine\trest\ttop A\ttop B\trank A\trank B\t")
	for _, x := range c.Tensors {
		if x.Other != nil {
			fmt.Fprintf(t, "%s\t%v and %v\t\t\t\t\t\t\t\t%s\n", x.Name, x.Shape, x.Other, x.Note)
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
