package diagnose

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

// madeUp is a checkpoint in memory.
type madeUp map[string]struct {
	shape []int
	vals  []float32
}

func (c madeUp) Names() (names []string) {
	for n := range c {
		names = append(names, n)
	}
	return names
}

func (c madeUp) Shape(name string) ([]int, bool) { t, ok := c[name]; return t.shape, ok }

func (c madeUp) Float32s(name string) ([]float32, error) { return c[name].vals, nil }

func (c madeUp) Ints(name string) ([]int64, error) { return nil, fmt.Errorf("no integers in %s", name) }

func (c madeUp) with(name string, scale float32, vals []float32, shape ...int) madeUp {
	scaled := make([]float32, len(vals))
	for i, v := range vals {
		scaled[i] = scale * v
	}
	c[name] = struct {
		shape []int
		vals  []float32
	}{shape, scaled}
	return c
}

func TestAScaleBeforeANormIsAGauge(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	random := func(n int) []float32 {
		out := make([]float32, n)
		for i := range out {
			out[i] = float32(rng.NormFloat64())
		}
		return out
	}
	const h = 32
	fc, q, down, norm := random(h*3*h), random(h*h), random(h*h), random(h)
	for i := range fc { // the second tap is read twice as strongly
		if i%(3*h)/h == 1 {
			fc[i] *= 2
		}
	}
	a := madeUp{}.with("fc.weight", 1, fc, h, 3*h).with("layers.0.self_attn.q_proj.weight", 1, q, h, h).
		with("layers.0.mlp.down_proj.weight", 1, down, h, h).with("norm.weight", 1, norm, h).with("old", 1, norm, h).with("wide", 1, norm, h)
	b := madeUp{}.with("model.fc.weight", 3, fc, h, 3*h).with("layers.0.self_attn.q_proj.weight", 0.5, q, h, h).
		with("layers.0.mlp.down_proj.weight", 2, down, h, h).with("norm.weight", 1, random(h), h).with("wide", 1, norm, 2, h/2)
	c, err := CompareCheckpoints(Checkpoint{Name: "a", Weights: a}, Checkpoint{Name: "b", Weights: b})
	if err != nil {
		t.Fatal(err)
	}
	notes := map[string]TensorComparison{}
	for _, x := range c.Tensors {
		notes[x.Name] = x
	}
	for name, want := range map[string]string{
		"fc.weight": "hidden_norm", "layers.0.self_attn.q_proj.weight": "q_norm", "layers.0.mlp.down_proj.weight": "a scale alone", "norm.weight": "", "wide": "another shape",
	} {
		if got := notes[name].Note; !strings.Contains(got, want) || (want == "") != (got == "") || strings.Contains(got, "gauge") != strings.Contains(want, "_norm") {
			t.Errorf("%s: %q", name, got)
		}
	}
	if x := notes["fc.weight"]; math.Abs(x.Ratio-3) > 1e-6 || x.Cosine < gaugeCosine || math.Abs(x.SpectrumA.Rank-x.SpectrumB.Rank) > 1e-3 {
		t.Errorf("fc: %+v, %+v, %+v", x, x.SpectrumA, x.SpectrumB)
	}
	if x := notes["norm.weight"]; math.Abs(x.Cosine) > 0.6 || x.Rest < 0.8 || x.SpectrumA != nil {
		t.Errorf("norm: %+v", x)
	}
	if len(c.Taps) != 3 || math.Abs(c.Taps[1].A-4./6) > 0.05 || math.Abs(c.Taps[1].A-c.Taps[1].B) > 1e-6 {
		t.Errorf("taps: %+v", c.Taps)
	}
	if len(c.OnlyA) != 1 || c.OnlyA[0] != "old" || len(c.OnlyB) != 0 {
		t.Errorf("only: %v and %v", c.OnlyA, c.OnlyB)
	}
}

// A matrix with known singular values: 3, 1, 1, 1 on the diagonal.
func TestSpectraAreThoseOfTheMatrix(t *testing.T) {
	w := make([]float32, 16)
	for i := range 4 {
		w[5*i] = 1
	}
	w[0] = 3
	s := spectrumOf(w, 4, 4, 12)
	if math.Abs(s.Top-9./12) > 1e-9 || math.Abs(s.Rank-144./84) > 1e-9 {
		t.Errorf("%+v, want a top of %v and a rank of %v", s, 9./12, 144./84)
	}
}

// Probes of ±1 whose signs differ at the two entries see nothing of such a
// matrix; the last probe is one of these for some of the columns.
func TestASpectrumOfRankOneIsFinite(t *testing.T) {
	const cols = 8
	for j := 1; j < cols; j++ {
		w := make([]float32, 2*cols)
		w[0], w[j] = 1, 1
		if s := spectrumOf(w, 2, cols, 2); !(math.Abs(s.Top-1) < 1e-9) || math.IsNaN(s.Rank) {
			t.Errorf("entries 0 and %d: %+v, want a top of 1", j, s)
		}
	}
}
