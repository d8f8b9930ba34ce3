package report

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestQuantilesInterpolate(t *testing.T) {
	v := []float64{0, 1, 2, 3, 4}
	for p, want := range map[float64]float64{0: 0, 0.5: 2, 1: 4, 0.025: 0.1, 0.975: 3.9} {
		if got := quantile(v, p); math.Abs(got-want) > 1e-12 {
			t.Errorf("quantile %g is %g, want %g", p, got, want)
		}
	}
}

func TestSumsEndAtTheFirstUndefinedTerm(t *testing.T) {
	at := func(v float64) statistic { return func([]float64) float64 { return v } }
	nan := at(math.NaN())
	if got := sumOfProducts([]statistic{at(.8), at(.6), at(.5)})(nil); math.Abs(got-1.52) > 1e-12 {
		t.Errorf("eal is %g, want 1.52", got)
	}
	if got := sumOfProducts([]statistic{at(.5), nan, at(1)})(nil); got != .5 {
		t.Errorf("eal is %g, want .5", got)
	}
	if got := sumOf([]statistic{at(.5), at(.25), nan, at(1)})(nil); got != .75 {
		t.Errorf("sum is %g, want .75", got)
	}
	if got := sumOf([]statistic{nan})(nil); !math.IsNaN(got) {
		t.Errorf("sum of nothing is %g, want NaN", got)
	}
}

// The interval of a mean must come close to the textbook's, and cover the
// truth about 19 times in 20.
func TestIntervalsCoverTheTruth(t *testing.T) {
	const n, trials = 40, 200
	covered := 0
	for trial := range trials {
		rng := rand.New(rand.NewPCG(1, uint64(trial)))
		num, den := make([]float64, n), make([]float64, n)
		var mean, sq float64
		for i := range num {
			num[i], den[i] = 3+rng.NormFloat64(), 1
			mean += num[i] / n
		}
		for _, v := range num {
			sq += (v - mean) * (v - mean)
		}
		var e Estimate
		if err := bootstrap(t.Context(), n, Options{Seed: uint64(trial), Resamples: 400}, []question{{stat: ratioOf(num, den), support: support(den), answer: &e}}); err != nil {
			t.Fatal(err)
		}
		if half, want := (*e.High-*e.Low)/2, 1.96*math.Sqrt(sq/n/n); math.Abs(half/want-1) > 0.25 {
			t.Errorf("trial %d: half width %g, the normal one is %g", trial, half, want)
		}
		if *e.Low <= 3 && 3 <= *e.High {
			covered++
		}
	}
	if covered < trials*88/100 || covered > trials*99/100 {
		t.Errorf("%d of %d intervals cover the truth, want about 95 %%", covered, trials)
	}
}

func TestPairingTakesTheSequencesOut(t *testing.T) {
	const n = 30
	rng := rand.New(rand.NewPCG(1, 2))
	a, b, one := make([]float64, n), make([]float64, n), make([]float64, n)
	for i := range a {
		hard := 10 * rng.Float64()
		a[i], b[i], one[i] = hard+.5+.1*rng.NormFloat64(), hard, 1
	}
	var d, alone Estimate
	if err := bootstrap(t.Context(), n, Options{Resamples: 500}, []question{
		{stat: minus(ratioOf(a, one), ratioOf(b, one)), support: n, answer: &d},
		{stat: ratioOf(a, one), support: n, answer: &alone},
	}); err != nil {
		t.Fatal(err)
	}
	if *d.Low < .4 || *d.High > .6 || *alone.High-*alone.Low < 1 {
		t.Errorf("paired %g to %g, alone %g to %g", *d.Low, *d.High, *alone.Low, *alone.High)
	}
}

func TestAnIntervalNeedsTwoSequencesThatDiffer(t *testing.T) {
	for name, c := range map[string]counted{
		"one sequence":           {[]float64{3}, []float64{4}},
		"one that counts of two": {[]float64{3, 0}, []float64{4, 0}},
		"all the same":           {[]float64{0, 0, 0}, []float64{4, 5, 6}},
		"nothing counted":        {[]float64{0, 0}, []float64{0, 0}},
	} {
		var e Estimate
		if err := bootstrap(t.Context(), len(c.num), Options{Resamples: 100}, []question{c.ask(&e)}); err != nil {
			t.Fatal(err)
		}
		if e.Low != nil || e.High != nil || (e.Value == nil) != (name == "nothing counted") {
			t.Errorf("%s: %+v", name, e)
		}
	}
}

func TestTicksCoverTheirRange(t *testing.T) {
	for _, r := range [][2]float64{{0, 1}, {1, 6.3}, {-0.4, 4.7}, {0, 0}, {0, 1e-9}, {-2, 0}, {1, 1}} {
		ticks := nice(r[0], r[1], 5)
		if len(ticks) < 2 || len(ticks) > 12 || ticks[0] > r[0]+1e-12 || ticks[len(ticks)-1] < r[1]-1e-12 {
			t.Errorf("ticks of %v are %v", r, ticks)
		}
	}
}

func TestSlotsAreNamedByRanges(t *testing.T) {
	for want, v := range map[string][]int{"": {}, "3": {3}, "1 and 2": {1, 2}, "1–4 and 7": {1, 2, 3, 4, 7}, "1, 3 and 5–7": {1, 3, 5, 6, 7}} {
		if got := ranges(v); got != want {
			t.Errorf("ranges(%v) is %q, want %q", v, got, want)
		}
	}
}

func TestNumbersReadWell(t *testing.T) {
	for got, want := range map[string]string{
		count(0): "0", count(999): "999", count(1000): "1,000", count(-1234567): "-1,234,567",
		signed(new(-0.0001), 2): "0.00", signed(new(-0.5), 1): "−0.5", signed(nil, 1): none, fixed(nil, 2): none,
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
