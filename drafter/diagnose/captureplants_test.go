package diagnose

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

// states replaces recorded states of every sequence; at gives the new values
// of state c from the clean ones.
func states(c *Case, at func(c int, clean map[int][]float32) []float32) {
	for i := range c.Sequences {
		q := &c.Sequences[i]
		clean := maps.Clone(q.States)
		for n := range clean {
			q.States[n] = at(n, clean)
		}
	}
}

// noisy adds seeded noise to a copy.
func noisy(vals []float32, draw func(*rand.Rand) float64) []float32 {
	rng := rand.New(rand.NewPCG(7, uint64(len(vals))))
	out := slices.Clone(vals)
	for i := range out {
		out[i] += float32(draw(rng))
	}
	return out
}

func uniform(r *rand.Rand) float64  { return 0.05 * (2*r.Float64() - 1) }
func gaussian(r *rand.Rand) float64 { return 0.05 * r.NormFloat64() }

func masks(c *Case, at func(q Sequence, t int) bool) {
	for i := range c.Sequences {
		q := c.Sequences[i]
		bits := make([]bool, len(q.Tokens))
		for t := range bits {
			bits[t] = at(q, t)
		}
		for t := range bits {
			q.Tokens[t].LossMask = bits[t]
		}
	}
}

// maskAt is the clean mask, false outside.
func maskAt(q Sequence, t int) bool { return t >= 0 && t < len(q.Tokens) && q.Tokens[t].LossMask }

func answersBy(c *Case, by int) {
	for i := range c.Sequences {
		q := c.Sequences[i]
		was := slices.Clone(q.Tokens)
		for t := range q.Tokens {
			q.Tokens[t].TargetArgmax = was[min(max(t+by, 0), len(was)-1)].TargetArgmax
		}
	}
}

func TestAPlantedFaultOfACaptureIsNamedFirst(t *testing.T) {
	const final = 8
	for _, tt := range []struct {
		name, key string
		verdict   Verdict
		plant     func(*Case)
	}{
		{"every state is the next layer's", "capture-layer", Confirmed, func(c *Case) {
			states(c, func(n int, clean map[int][]float32) []float32 { return clean[min(n+1, final)] })
		}},
		{"every state is the layer's before", "capture-layer", Confirmed, func(c *Case) {
			states(c, func(n int, clean map[int][]float32) []float32 { return clean[max(n-1, 0)] })
		}},
		{"one state is the next layer's", "capture-layer", Confirmed, func(c *Case) {
			states(c, func(n int, clean map[int][]float32) []float32 {
				if n == 4 {
					return clean[5]
				}
				return clean[n]
			})
		}},
		{"the final state after the final norm", "capture-norm", Confirmed, func(c *Case) {
			s := &study{Case: *c}
			norm := s.finalNorm()
			states(c, func(n int, clean map[int][]float32) []float32 {
				out := slices.Clone(clean[n])
				for lo := 0; n == final && lo < len(out); lo += c.Host.Hidden {
					norm(out[lo:lo+c.Host.Hidden], out[lo:lo+c.Host.Hidden])
				}
				return out
			})
		}},
		{"rows of the next token: the anchor leaks", "capture-row", Confirmed, func(c *Case) {
			states(c, func(n int, clean map[int][]float32) []float32 { return shiftRows(clean[n], c.Host.Hidden, 1) })
		}},
		{"rows of the token before", "capture-row", Confirmed, func(c *Case) {
			states(c, func(n int, clean map[int][]float32) []float32 { return shiftRows(clean[n], c.Host.Hidden, -1) })
		}},
		{"uniform noise on the final state", "target-noise", Confirmed, func(c *Case) {
			states(c, func(n int, clean map[int][]float32) []float32 {
				if n == final {
					return noisy(clean[n], uniform)
				}
				return clean[n]
			})
		}},
		{"Gaussian noise on every state", "target-noise", Confirmed, func(c *Case) {
			states(c, func(n int, clean map[int][]float32) []float32 { return noisy(clean[n], gaussian) })
		}},
		{"uniform noise on the taps alone", "tap-noise", Confirmed, func(c *Case) {
			states(c, func(n int, clean map[int][]float32) []float32 {
				if n != final {
					return noisy(clean[n], uniform)
				}
				return clean[n]
			})
		}},
		{"answers a token late", "capture-labels", Confirmed, func(c *Case) { answersBy(c, 1) }},
		{"answers a token early", "capture-labels", Confirmed, func(c *Case) { answersBy(c, -1) }},
		{"answers two tokens late", "capture-labels", Confirmed, func(c *Case) { answersBy(c, 2) }},
		{"answers of another target", "capture-labels", Supported, func(c *Case) {
			for i := range c.Sequences {
				for k := 0; k < len(c.Sequences[i].Tokens); k += 7 {
					c.Sequences[i].Tokens[k].TargetArgmax = new(int32(5))
				}
			}
		}},
		{"a mask moved to the left", "mask-boundary", Confirmed, func(c *Case) {
			masks(c, func(q Sequence, t int) bool { return maskAt(q, t+1) })
		}},
		{"a mask moved to the right", "mask-boundary", Confirmed, func(c *Case) {
			masks(c, func(q Sequence, t int) bool { return maskAt(q, t-1) })
		}},
		{"the generation header in the mask", "mask-boundary", Confirmed, func(c *Case) {
			masks(c, func(q Sequence, t int) bool {
				return maskAt(q, t) || maskAt(q, t+1) || maskAt(q, t+2) || maskAt(q, t+3)
			})
		}},
		{"the closing token outside the mask", "mask-boundary", Confirmed, func(c *Case) {
			masks(c, func(q Sequence, t int) bool { return maskAt(q, t) && q.Tokens[t].TokenID != 2 })
		}},
		{"the user's turn in the mask", "mask-roles", Confirmed, func(c *Case) {
			masks(c, func(q Sequence, t int) bool { return maskAt(q, t) || q.Tokens[t].Role == "user" })
		}},
		{"an answer outside the vocabulary", "vocabulary", Confirmed, func(c *Case) {
			c.Sequences[0].Tokens[3].TargetArgmax = new(int32(4096))
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := demoCase(t, "good")
			c.Sequences = c.Sequences[:8]
			tt.plant(&c)
			wantFirst(t, examine(t, c, probeStates, probeLabels, probeMask), tt.key, tt.verdict)
		})
	}
}

func TestUniformNoiseShowsUnderAnotherEnginesArithmetic(t *testing.T) {
	c := demoCase(t, "good")
	c.Capture.Exact = false
	states(&c, func(n int, clean map[int][]float32) []float32 {
		if n == c.Host.Layers {
			return noisy(clean[n], uniform)
		}
		return clean[n]
	})
	wantFirst(t, examine(t, c, probeStates), "target-noise", Confirmed)
}

func TestACleanCaptureRaisesNoAlarm(t *testing.T) {
	for _, tt := range []struct {
		name  string
		plant func(*Case)
	}{
		{"fp32", func(*Case) {}},
		{"rounded to bf16", func(c *Case) {
			c.Capture.DType = schemas.BF16
			states(c, func(n int, clean map[int][]float32) []float32 {
				return schemas.BF16.AppendFloats(nil, schemas.BF16.AppendBytes(nil, clean[n]))
			})
		}},
		{"another engine's bf16 arithmetic", func(c *Case) {
			c.Capture.DType, c.Capture.Exact = schemas.BF16, false
			states(c, func(n int, clean map[int][]float32) []float32 {
				// Errors that grow with depth, in proportion to each value.
				rng := rand.New(rand.NewPCG(5, uint64(n)))
				out := slices.Clone(clean[n])
				for i := range out {
					out[i] *= float32(1 + 0.004*math.Sqrt(float64(n))*rng.NormFloat64())
				}
				return schemas.BF16.AppendFloats(nil, schemas.BF16.AppendBytes(nil, out))
			})
		}},
		{"the taps alone", func(c *Case) {
			for i := range c.Sequences {
				for _, n := range []int{0, 1, 3, 7, 8} {
					delete(c.Sequences[i].States, n)
				}
			}
		}},
		{"no answers recorded", func(c *Case) {
			for i := range c.Sequences {
				for k := range c.Sequences[i].Tokens {
					c.Sequences[i].Tokens[k].TargetArgmax = nil
				}
			}
		}},
		{"a reply left out of the mask", func(c *Case) {
			q := c.Sequences[0]
			for k := range q.Tokens {
				q.Tokens[k].LossMask = false
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := demoCase(t, "good")
			c.Sequences = c.Sequences[:8]
			tt.plant(&c)
			wantSilence(t, examine(t, c, probeStates, probeLabels, probeMask))
		})
	}
}

func TestTheOtherFormOfTheFinalNormIsNotTakenForAFaultWhereItChangesNoAnswer(t *testing.T) {
	c := demoCase(t, "good")
	c.Host.Gain = 1
	r := examine(t, c, probeLabels)
	if f := find(t, r, "norm-form"); f.Verdict == RuledOut && f.Effect.Value > relevance {
		t.Errorf("%s: %s", f.Verdict, f.Measure)
	} else {
		t.Logf("%s: %s", f.Verdict, f.Measure)
	}
}
