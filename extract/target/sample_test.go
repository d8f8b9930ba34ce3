package target

import (
	"math"
	"testing"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/cpu"
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
		fault := findFault(fetchedOdd(t, tc.v, tc.dtype), tc.dtype.AppendBytes(nil, []float32{tc.v}), tc.dtype.Size(), 7, 3, tc.dtype)
		if got := fault == "row 7, state 3: 0 NaN, 1 Inf"; got != tc.want {
			t.Errorf("%v in %s: %q, want a fault: %t", tc.v, tc.dtype, fault, tc.want)
		}
		stored := tc.dtype.AppendFloats(nil, tc.dtype.AppendBytes(nil, []float32{tc.v}))[0]
		if math.IsInf(float64(stored), 0) != tc.want {
			t.Errorf("%v is stored in %s as %v", tc.v, tc.dtype, stored)
		}
	}
}

// fetchedOdd is what a device counts in one value that leaves it.
func fetchedOdd(t *testing.T, v float32, as schemas.DType) []int32 {
	t.Helper()
	dev, err := cpu.New(cpu.Config{})
	if err != nil {
		t.Fatal(err)
	}
	buf, err := dev.New(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := dev.Upload(cuda.Matrix(buf, 1, 1), []float32{v}); err != nil {
		t.Fatal(err)
	}
	f, err := dev.Fetch(cuda.Matrix(buf, 1, 1), asCuda(as), nil)
	if err != nil {
		t.Fatal(err)
	}
	odd, err := f.Wait()
	if err != nil {
		t.Fatal(err)
	}
	return odd
}
