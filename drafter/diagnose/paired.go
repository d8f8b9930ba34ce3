package diagnose

import (
	"math"
	"math/rand/v2"
	"slices"
)

// How sure a finding must be. The numbers follow from what they limit, not
// from any data set:
//
//   - familyError bounds the chance that any finding about the drafter's graph
//     is false if no variant differed from the declared graph in truth. It is
//     divided among all variants (Bonferroni). Of a healthy drafter variants do
//     differ, for the worse, so that its chance is far smaller.
//   - relevance is the smallest relative change of the hits that is worth a
//     person's time, even where more data could prove a smaller one.
const (
	familyError = 0.05
	relevance   = 0.02
	confidence  = 0.95
	resamples   = 2000
	flips       = 20000
)

// count is what one sequence counted: hits of scored.
type count struct{ hits, scored float64 }

func total(cs []count) (t count) {
	for _, c := range cs {
		t.hits += c.hits
		t.scored += c.scored
	}
	return t
}

func (c count) rate() float64 {
	if c.scored == 0 {
		return math.NaN()
	}
	return c.hits / c.scored
}

// paired compares two ways to draft the same slots: b − a.
type paired struct {
	gain     Interval
	a, b     float64
	p        float64 // one-sided: that b is not better
	disagree int     // sequences in which they differ
}

// compare pairs the counts of the same sequences. The interval is a bootstrap
// over sequences; see [chance] for p.
func compare(a, b []count) paired {
	out := paired{a: total(a).rate(), b: total(b).rate(), p: 1}
	diff := make([]float64, len(a))
	scored := total(a).scored
	for i := range a {
		diff[i] = b[i].hits - a[i].hits
		if diff[i] != 0 {
			out.disagree++
		}
	}
	if scored == 0 {
		return out
	}
	out.gain = bootstrap(len(a), func(c []float64) float64 {
		var d, s float64
		for i, k := range c {
			d += k * diff[i]
			s += k * a[i].scored
		}
		return d / s
	})
	out.p = chance(diff)
	return out
}

// rateOf is hits over scored with its interval.
func rateOf(cs []count) Interval {
	return bootstrap(len(cs), func(c []float64) float64 {
		var t count
		for i, k := range c {
			t.hits += k * cs[i].hits
			t.scored += k * cs[i].scored
		}
		return t.rate()
	})
}

// bootstrap resamples n sequences; stat gets how often each is in the sample.
// A sample without anything to count is left out.
func bootstrap(n int, stat func(c []float64) float64) Interval {
	ones := slices.Repeat([]float64{1}, n)
	out := Interval{Value: stat(ones)}
	rng := rand.New(rand.NewPCG(1, uint64(n)))
	vals := make([]float64, 0, resamples)
	c := make([]float64, n)
	for range resamples {
		clear(c)
		for range n {
			c[rng.IntN(n)]++
		}
		if v := stat(c); !math.IsNaN(v) {
			vals = append(vals, v)
		}
	}
	if len(vals) == 0 {
		out.Low, out.High = out.Value, out.Value
		return out
	}
	slices.Sort(vals)
	tail := (1 - confidence) / 2
	out.Low = vals[int(tail*float64(len(vals)))]
	out.High = vals[int((1-tail)*float64(len(vals)-1))]
	return out
}

// enoughToFlip is from how many differing sequences on the sign-flip test can
// reach the levels that are asked of it: 2^-14 is below all of them.
const enoughToFlip = 14

// chance is the one-sided probability of differences at least as positive as
// these if there were none in truth. Signs of differences are flipped, which
// assumes nothing of their shape; of fewer sequences than that can decide, it
// is Student's t, which takes sums over a sequence's slots for normal.
func chance(diff []float64) float64 {
	var n, sum, sum2 float64
	for _, d := range diff {
		if d != 0 {
			n++
			sum += d
			sum2 += d * d
		}
	}
	if n >= enoughToFlip {
		return signFlip(diff)
	}
	n = float64(len(diff))
	if n < 3 || sum <= 0 {
		return 1
	}
	mean := sum / n
	variance := (sum2 - n*mean*mean) / (n - 1)
	if variance <= 0 {
		variance = mean * mean / n // all alike: as sure as one step of them
	}
	return studentTail(mean/math.Sqrt(variance/n), n-1)
}

// studentTail is P(T > t) of Student's t with some degrees of freedom, t > 0,
// by Simpson's rule over the angle atan(t/√df).
func studentTail(t, df float64) float64 {
	const steps = 2000
	lo, hi := math.Atan(t/math.Sqrt(df)), math.Pi/2
	f := func(x float64) float64 { return math.Pow(math.Cos(x), df-1) }
	simpson := func(lo, hi float64) float64 {
		h := (hi - lo) / steps
		sum := f(lo) + f(hi)
		for i := 1; i < steps; i++ {
			sum += f(lo+float64(i)*h) * float64(2+2*(i%2))
		}
		return sum * h / 3
	}
	return simpson(lo, hi) / (2 * simpson(0, math.Pi/2))
}

// signFlip is the share of the ways to choose the differences' signs whose
// sum is at least the observed one: all ways where these are few, a seeded
// draw of them otherwise.
func signFlip(diff []float64) float64 {
	var moved []float64
	sum := 0.0
	for _, d := range diff {
		if d != 0 {
			moved = append(moved, math.Abs(d))
			sum += d
		}
	}
	if len(moved) == 0 {
		return 1
	}
	const eps = 1e-9
	if len(moved) <= 14 {
		n := 1 << len(moved)
		hit := 0
		for bits := range n {
			s := 0.0
			for i, d := range moved {
				if bits>>i&1 == 1 {
					d = -d
				}
				s += d
			}
			if s >= sum-eps {
				hit++
			}
		}
		return float64(hit) / float64(n)
	}
	rng := rand.New(rand.NewPCG(2, uint64(len(moved))))
	hit := 1 // the observed signs are one of the ways
	for range flips {
		s := 0.0
		for _, d := range moved {
			if rng.Uint64()&1 == 1 {
				d = -d
			}
			s += d
		}
		if s >= sum-eps {
			hit++
		}
	}
	return float64(hit) / float64(flips+1)
}
