package cpu

import (
	"math"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// The vectors in this file were worked out by hand or by an independent
// implementation; the figures have six decimals.
const vectorTolerance = 2e-6

// fill uploads rows of values.
func fill(t *testing.T, d *Device, cols int, values ...float32) cuda.Tensor {
	t.Helper()
	buf, err := d.New(len(values))
	if err != nil {
		t.Fatal(err)
	}
	m := cuda.Matrix(buf, len(values)/cols, cols)
	if err := d.Upload(m, values); err != nil {
		t.Fatal(err)
	}
	return m
}

func wantNear(t *testing.T, d *Device, what string, got cuda.Tensor, want ...float64) {
	t.Helper()
	values := make([]float32, got.Rows*got.Cols)
	if err := d.Download(values, got); err != nil {
		t.Fatal(err)
	}
	if len(values) != len(want) {
		t.Fatalf("%s has %d values, want %d", what, len(values), len(want))
	}
	for i, w := range want {
		if math.Abs(float64(values[i])-w) > vectorTolerance {
			t.Errorf("%s[%d] = %.7f, want %.6f", what, i, values[i], w)
		}
	}
}

func device(t *testing.T) *Device {
	t.Helper()
	d, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestTheDeltaRuleGivesTheVectorByRowsAndAsOneChunk(t *testing.T) {
	for _, chunk := range []int{0, 1, 2, 64} {
		d := device(t)
		state := fill(t, d, 2, .5, -.25, .1, .2)
		o := fill(t, d, 2, 9, 9, 9, 9)
		err := d.DeltaRule(o, cuda.DeltaArgs{
			Q: fill(t, d, 2, 3, 4, 1, -1), K: fill(t, d, 2, 1, 2, 2, 1), V: fill(t, d, 2, 1, -2, .5, 3),
			A: fill(t, d, 1, -2, .5), B: fill(t, d, 1, 0, 1),
			ALog: fill(t, d, 1, -1), DTBias: fill(t, d, 1, .5), State: state,
			KeyHeads: 1, ValHeads: 1, KeyDim: 2, ValDim: 2, Chunk: chunk,
		})
		if err != nil {
			t.Fatal(err)
		}
		wantNear(t, d, "o", o, .496244, -.710803, .072704, .599502)
		wantNear(t, d, "state", state, .412487, 1.916956, .267079, .717952)

		z := fill(t, d, 2, 1, -1, 2, .5)
		if err := d.RMSNorm(o, o, fill(t, d, 2, 1.5, .5), 1e-6, 0); err != nil {
			t.Fatal(err)
		}
		if err := d.GateMul(o, z, o, cuda.SiLU); err != nil {
			t.Fatal(err)
		}
		wantNear(t, d, "gated norm", o, .887746, .155929, .449893, .218471)
	}
}

func TestConvMultipliesTheNewestRowByTheLastTap(t *testing.T) {
	d := device(t)
	y, history := fill(t, d, 1, 0), fill(t, d, 1, 1, 2, 3)
	if err := d.Conv(y, fill(t, d, 1, 4), fill(t, d, 4, .1, .2, .3, .4), history); err != nil {
		t.Fatal(err)
	}
	wantNear(t, d, "y", y, 2.857722)
	wantNear(t, d, "history", history, 2, 3, 4)
}

func TestRMSNormAddsTheGainToTheWeight(t *testing.T) {
	d := device(t)
	x := fill(t, d, 2, 3, 4)
	if err := d.RMSNorm(x, x, fill(t, d, 2, .5, -.25), 1e-6, 1); err != nil {
		t.Fatal(err)
	}
	wantNear(t, d, "norm", x, 1.272792, .848528)
}

func TestNormRoPELeavesTheDimsBeyondTheRotaryOnesUnturned(t *testing.T) {
	d := device(t)
	x := fill(t, d, 8, 1, 2, 3, 4, 5, 6, 7, 8)
	const rms = 5.0497525 // of x, so that the norm gives x back
	err := d.NormRoPE(x, cuda.NormRoPEArgs{
		X: x, W: fill(t, d, 8, rms, rms, rms, rms, rms, rms, rms, rms), Heads: 1, HeadDim: 8, Step: 8,
		Pos: []int32{3}, Rotary: 4, Theta: 1e4,
	})
	if err != nil {
		t.Fatal(err)
	}
	wantNear(t, d, "x", x, -1.413352, 1.879118, -2.828857, 4.058191, 5, 6, 7, 8)
}
