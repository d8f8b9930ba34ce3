package target

import (
	"math"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

func TestDrawsFollowTheDistribution(t *testing.T) {
	logits := []float32{0, float32(math.Log(2)), float32(math.Log(5)), -1e30}
	for _, tc := range []struct {
		name              string
		temperature, topP float32
		want              [4]float64
	}{
		{"as it is", 1, 0, [4]float64{1. / 8, 2. / 8, 5. / 8, 0}},
		{"sharper", 0.5, 1, [4]float64{1. / 30, 4. / 30, 25. / 30, 0}},
		{"the likeliest two", 1, 0.7, [4]float64{0, 2. / 7, 5. / 7, 0}},
		{"the likeliest alone", 1, 0.6, [4]float64{0, 0, 1, 0}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newSampler(1, "a")
			const draws = 20_000
			var counts [4]int
			for range draws {
				counts[s.draw(logits, tc.temperature, tc.topP)]++
			}
			for id, p := range tc.want {
				sigma := math.Sqrt(p*(1-p)/draws) + 1e-12
				if got := float64(counts[id]) / draws; math.Abs(got-p) > 5*sigma {
					t.Errorf("token %d was drawn %.4f of the time, want %.4f", id, got, p)
				}
			}
		})
	}
}

func TestAValueThatRoundsToInfinityIsAFault(t *testing.T) {
	largest := math.Float32frombits(0x7f7f7fff) // rounds down to the largest bf16
	for _, tc := range []struct {
		v     float32
		dtype schemas.DType
		want  bool
	}{
		{largest, schemas.BF16, false},
		{math.Nextafter32(largest, math.MaxFloat32), schemas.BF16, true},
		{math.MaxFloat32, schemas.F32, false},
		{-math.MaxFloat32, schemas.BF16, true},
		{float32(math.Inf(-1)), schemas.F32, true},
	} {
		if got := overflows(tc.v, tc.dtype); got != tc.want {
			t.Errorf("%v in %s: %t, want %t", tc.v, tc.dtype, got, tc.want)
		}
		stored := tc.dtype.AppendFloats(nil, tc.dtype.AppendBytes(nil, []float32{tc.v}))[0]
		if math.IsInf(float64(stored), 0) != tc.want {
			t.Errorf("%v is stored in %s as %v", tc.v, tc.dtype, stored)
		}
	}
}
