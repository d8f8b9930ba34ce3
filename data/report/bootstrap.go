package report

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
)

const confidence = 0.95

// A statistic is a number of a sample of sequences: c[i] says how often
// sequence i is in it. It is NaN where the sample has nothing to count.
type statistic func(c []float64) float64

// ratioOf is Σ c num / Σ c den, the form of nearly every published number.
func ratioOf(num, den []float64) statistic {
	return func(c []float64) float64 {
		var n, d float64
		for i, k := range c {
			n += k * num[i]
			d += k * den[i]
		}
		if d == 0 {
			return math.NaN()
		}
		return n / d
	}
}

// sumOf adds statistics up to the first that is not defined.
func sumOf(terms []statistic) statistic {
	return func(c []float64) float64 {
		sum := math.NaN()
		for k, term := range terms {
			v := term(c)
			if math.IsNaN(v) {
				break
			}
			if k == 0 {
				sum = 0
			}
			sum += v
		}
		return sum
	}
}

// sumOfProducts is Σ_k Π_{i≤k} of the factors, up to the first that is not
// defined.
func sumOfProducts(factors []statistic) statistic {
	return func(c []float64) float64 {
		sum, product := math.NaN(), 1.0
		for k, factor := range factors {
			product *= factor(c)
			if math.IsNaN(product) {
				break
			}
			if k == 0 {
				sum = 0
			}
			sum += product
		}
		return sum
	}
}

func minus(a, b statistic) statistic {
	return func(c []float64) float64 { return a(c) - b(c) }
}

// question is a statistic that waits for its estimate. support is how many
// sequences have something to count for it.
type question struct {
	stat    statistic
	support int
	answer  *Estimate
	paired  bool // a difference between two drafters
}

// support counts the sequences with a positive denominator.
func support(dens ...[]float64) int {
	n := 0
	for i := range dens[0] {
		if !slices.ContainsFunc(dens, func(d []float64) bool { return d[i] <= 0 }) {
			n++
		}
	}
	return n
}

// bootstrap answers all questions about n sequences in one pass over the
// resamples: every resample draws n sequences with replacement, the same for
// all questions, so that differences are paired. Intervals are percentiles. A
// question that fewer than two sequences support, that most resamples cannot
// answer, or whose answer never varies (0 of 500 hits, say) has no interval:
// one of no width would pretend certainty. A difference that is the same in
// every sequence keeps its interval, unless it is 0.
func bootstrap(ctx context.Context, n int, opt Options, questions []question) error {
	c := make([]float64, n)
	for i := range c {
		c[i] = 1
	}
	for _, q := range questions {
		q.answer.Value = number(q.stat(c))
	}
	drawn := make([][]float64, len(questions))
	rng := rand.New(rand.NewPCG(opt.Seed, uint64(n)))
	for range opt.Resamples {
		if err := ctx.Err(); err != nil {
			return err
		}
		clear(c)
		for range n {
			c[rng.IntN(n)]++
		}
		for i, q := range questions {
			if q.support < 2 {
				continue
			}
			if v := q.stat(c); !math.IsNaN(v) {
				drawn[i] = append(drawn[i], v)
			}
		}
	}
	for i, q := range questions {
		if v := drawn[i]; len(v) > 0 && 2*len(v) >= opt.Resamples {
			slices.Sort(v)
			if v[0] == v[len(v)-1] && (!q.paired || v[0] == 0) {
				continue
			}
			q.answer.Low = number(quantile(v, (1-confidence)/2))
			q.answer.High = number(quantile(v, (1+confidence)/2))
		}
	}
	return nil
}

// quantile interpolates between the two nearest of sorted values.
func quantile(sorted []float64, p float64) float64 {
	at := p * float64(len(sorted)-1)
	lo := int(at)
	hi := min(lo+1, len(sorted)-1)
	return sorted[lo] + (at-float64(lo))*(sorted[hi]-sorted[lo])
}

// number keeps 12 significant digits, so that a report does not depend on the
// order in which sums were added. It is nil for NaN.
func number(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	v, err := strconv.ParseFloat(strconv.FormatFloat(v, 'g', 12, 64), 64)
	if err != nil {
		return nil
	}
	return &v
}
