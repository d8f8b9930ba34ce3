package diagnose

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

// eachState replaces every recorded state by what change makes of a copy.
func eachState(c *Case, change func(n int, vals []float32)) {
	states(c, func(n int, clean map[int][]float32) []float32 {
		out := slices.Clone(clean[n])
		change(n, out)
		return out
	})
}

func noAnswers(c *Case) {
	for i := range c.Sequences {
		for k := range c.Sequences[i].Tokens {
			c.Sequences[i].Tokens[k].TargetArgmax = nil
		}
	}
}

func stateCodes(bits, group int) func(*Case) {
	return func(c *Case) {
		eachState(c, func(_ int, vals []float32) {
			g := group
			if g == 0 {
				g = len(vals)
			}
			roundCodes(vals, bits, g)
		})
	}
}

func bf16States(c *Case) {
	c.Capture.DType = schemas.BF16
	eachState(c, func(_ int, vals []float32) {
		copy(vals, schemas.BF16.AppendFloats(nil, schemas.BF16.AppendBytes(nil, vals)))
	})
}

// foreign marks a capture as another engine's.
func foreign(c *Case) { c.Capture.Exact = false }

func markRounded(c *Case) { c.Capture.Rounded = true }

func plants(parts ...func(*Case)) func(*Case) {
	return func(c *Case) {
		for _, p := range parts {
			p(c)
		}
	}
}

// drifting adds an error of a share of each value that grows with depth.
func drifting(share float64) func(*Case) {
	return func(c *Case) {
		eachState(c, func(n int, vals []float32) {
			rng := rand.New(rand.NewPCG(5, uint64(n)))
			for i := range vals {
				vals[i] *= float32(1 + share*math.Sqrt(float64(n))*rng.NormFloat64())
			}
		})
	}
}

// cut ends every sequence some tokens before its end.
func cut(by int) func(*Case) {
	return func(c *Case) {
		for i := range c.Sequences {
			q := &c.Sequences[i]
			n := len(q.Tokens) - by
			q.Tokens = q.Tokens[:n]
			q.States = maps.Clone(q.States)
			for s, vals := range q.States {
				q.States[s] = vals[:n*c.Host.Hidden]
			}
		}
	}
}

// healthyCaptures must raise no alarm. They are examined without a drafter's
// variants.
var healthyCaptures = []struct {
	name string
	from func(*testing.T, *studio, *Case)
	make func(*Case)
}{
	{"bf16, no answers", nil, plants(bf16States, noAnswers)},
	{"bf16, foreign, no answers", nil, plants(bf16States, foreign, noAnswers)},
	{"fp16", nil, plants(func(c *Case) { eachState(c, func(_ int, v []float32) { mantissa(10)("", v) }) })},
	{"fp16 under bf16's name, no answers", nil, plants(func(c *Case) {
		c.Capture.DType = schemas.BF16
		eachState(c, func(_ int, v []float32) { mantissa(10)("", v) })
	}, noAnswers)},
	{"8-bit rows", nil, plants(stateCodes(8, 256), markRounded)},
	{"8-bit rows, no answers", nil, plants(stateCodes(8, 256), markRounded, noAnswers)},
	{"8-bit rows in bf16, no answers", nil, plants(stateCodes(8, 256), bf16States, markRounded, noAnswers)},
	{"8-bit rows of another engine", nil, plants(stateCodes(8, 256), foreign)},
	{"8-bit rows of another engine, no answers", nil, plants(stateCodes(8, 256), foreign, noAnswers)},
	{"8-bit tensors of another engine", nil, plants(stateCodes(8, 0), foreign)},
	{"8-bit tensors, marked", nil, plants(stateCodes(8, 0), markRounded)},
	{"8-bit groups of another engine", nil, plants(stateCodes(8, 32), foreign)},
	{"fp8", nil, plants(func(c *Case) { eachState(c, func(_ int, v []float32) { mantissa(3)("", v) }) }, markRounded)},
	{"fp8, no answers", nil, plants(func(c *Case) { eachState(c, func(_ int, v []float32) { mantissa(3)("", v) }) }, markRounded, noAnswers)},
	{"fp8 of another engine", nil, plants(func(c *Case) { eachState(c, func(_ int, v []float32) { mantissa(3)("", v) }) }, foreign)},
	{"another engine, small drift", nil, plants(drifting(0.001), foreign)},
	{"another engine, drift, no answers", nil, plants(drifting(0.008), bf16States, foreign, noAnswers)},
	{"cut by one token", nil, cut(1)},
	{"cut by thirty tokens", nil, cut(30)},
	{"the final state alone", nil, func(c *Case) {
		for i := range c.Sequences {
			for n := range 8 {
				delete(c.Sequences[i].States, n)
			}
		}
	}},
	{"no states", nil, func(c *Case) {
		for i := range c.Sequences {
			c.Sequences[i].States = map[int][]float32{}
		}
	}},
	{"no states and no answers", nil, plants(noAnswers, func(c *Case) {
		for i := range c.Sequences {
			c.Sequences[i].States = map[int][]float32{}
		}
	})},
	{"no tokenizer", nil, func(c *Case) { c.Text = nil }},
	{"no target", nil, func(c *Case) { c.Recompute = nil }},
	{"no target, bf16, no answers", nil, plants(bf16States, noAnswers, func(c *Case) { c.Recompute = nil })},
	{"one sequence", nil, func(c *Case) { c.Sequences = c.Sequences[3:4] }},
	{"two sequences, no answers", nil, plants(bf16States, noAnswers, func(c *Case) { c.Sequences = c.Sequences[3:5] })},
	{"roles unknown", nil, func(c *Case) {
		for i := range c.Sequences {
			for k := range c.Sequences[i].Tokens {
				c.Sequences[i].Tokens[k].Role = roleUnknown
			}
		}
	}},
	{"the last turn alone", talking("", 3, 4), func(c *Case) {
		for i := range c.Sequences {
			q := &c.Sequences[i]
			last := q.Tokens[len(q.Tokens)-1].Turn
			for k := range q.Tokens {
				if q.Tokens[k].Turn != last {
					q.Tokens[k].LossMask = false
				}
			}
		}
	}},
	{"a system turn", talking("You write Go.", 2, 4), func(*Case) {}},
	{"the line feed after a reply's end in the mask", talking("", 3, 4), func(c *Case) {
		for i := range c.Sequences {
			q := &c.Sequences[i]
			for k := 1; k < len(q.Tokens); k++ {
				if q.Tokens[k-1].TokenID == 2 && q.Tokens[k-1].LossMask {
					q.Tokens[k].LossMask = true
				}
			}
		}
	}},
	{"everything from the prompt's end on", talking("", 1, 6), func(c *Case) {
		for i := range c.Sequences {
			q := &c.Sequences[i]
			for k := range q.Tokens {
				q.Tokens[k].LossMask = k >= q.PromptLen
			}
		}
	}},
	{"sampled hot", writing(24, 40, sampling{temperature: 1.5, most: 60}), func(*Case) {}},
	{"sampled hot, bf16, no answers", writing(24, 40, sampling{temperature: 1.5, most: 60}), plants(bf16States, noAnswers)},
	{"sampled very hot, another engine, no answers", writing(24, 40, sampling{temperature: 3, most: 60, endless: true}), plants(drifting(0.004), foreign, noAnswers)},
	{"loops, another engine, no answers", writing(24, 28, sampling{most: 250, endless: true}), plants(drifting(0.008), foreign, noAnswers)},
	{"loops, 8-bit rows, no answers", writing(24, 28, sampling{most: 250, endless: true}), plants(stateCodes(8, 256), markRounded, noAnswers)},
	{"replies of three tokens", writing(24, 40, sampling{most: 3, endless: true}), func(*Case) {}},
	{"prose", prose, func(*Case) {}},
	{"replies to other prompts", exchanged, func(*Case) {}},
	{"replies to other prompts, bf16, no answers", exchanged, plants(bf16States, noAnswers)},
}

// A clean capture of any kind raises no alarm, whether or not its kind was
// ever thought of.
func TestHeldOutCapturesRaiseNoAlarm(t *testing.T) {
	s := newStudio(t)
	for _, h := range healthyCaptures {
		t.Run(h.name, func(t *testing.T) {
			r := s.examine(t, "good", h.from, h.make)
			for _, f := range r.Findings {
				if f.alarm() {
					t.Errorf("ALARM %s: %s %s: %s", h.name, f.Verdict, f.Key, strings.TrimSpace(f.Sentence+" "+f.Measure))
				}
			}
		})
	}
}

// examine looks at a capture without a drafter's variants.
func (s *studio) examine(t *testing.T, drafter string, from func(*testing.T, *studio, *Case), change func(*Case)) *Report {
	t.Helper()
	c := demoCase(t, drafter)
	c.Recompute = s.recomputed
	if from != nil {
		from(t, s, &c)
	} else {
		c.Sequences = c.Sequences[:8]
	}
	change(&c)
	return examine(t, c, probeStates, probeLabels, probeMask)
}
