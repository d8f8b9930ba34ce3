package diagnose

import (
	"maps"
	"math"
	"strings"
	"testing"
)

func TestATargetSourceThatIsATapIsNamedFirst(t *testing.T) {
	const final, tap = 8, 5
	for _, tt := range []struct {
		name  string
		plant func(c int, clean map[int][]float32) []float32
	}{
		{"a tap recorded as the final state", func(c int, clean map[int][]float32) []float32 {
			if c == final {
				return clean[tap]
			}
			return clean[c]
		}},
		{"a tap and the final state exchanged", func(c int, clean map[int][]float32) []float32 {
			switch c {
			case final:
				return clean[tap]
			case tap:
				return clean[final]
			}
			return clean[c]
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := demoCase(t, "good")
			c.Recompute = nil // which would show it as well
			states(&c, tt.plant)
			wantFirst(t, examine(t, c, probeFinal), "target-source", Confirmed)
		})
	}
}

// recordAgain gives a case a second recording of its first sequences.
func recordAgain(c *Case, at func(n int, vals []float32) []float32) {
	for _, q := range c.Sequences[:4] {
		q.States = maps.Clone(q.States)
		for n, vals := range q.States {
			q.States[n] = at(n, vals)
		}
		c.Again = append(c.Again, q)
	}
}

func TestATargetSourceThatIsAnotherEachTimeIsNamedFirst(t *testing.T) {
	for _, draw := range []string{"uniform", "Gaussian"} {
		c := demoCase(t, "good")
		c.Recompute = nil
		recordAgain(&c, func(_ int, vals []float32) []float32 {
			if draw == "uniform" {
				return noisy(vals, uniform)
			}
			return noisy(vals, gaussian)
		})
		r := examine(t, c, probeFinal)
		wantFirst(t, r, "recorded-again", Confirmed)
		if !strings.Contains(r.Findings[0].Sentence, draw) {
			t.Errorf("%s: %s", draw, r.Findings[0].Sentence)
		}
	}
}

func TestTextsThatAreRecordedTwiceRaiseNoAlarm(t *testing.T) {
	for _, tt := range []struct {
		name  string
		want  Verdict
		plant func(*Case)
	}{
		{"once alone", CannotTell, func(*Case) {}},
		{"the same", RuledOut, func(c *Case) { recordAgain(c, func(_ int, vals []float32) []float32 { return vals }) }},
		{"within one run", RuledOut, func(c *Case) { c.Sequences = append(c.Sequences, c.Sequences[0]) }},
		{"noise on the taps alone", RuledOut, func(c *Case) {
			recordAgain(c, func(n int, vals []float32) []float32 {
				if n == c.Host.Layers {
					return vals
				}
				return noisy(vals, uniform)
			})
		}},
		{"another text of the same name", CannotTell, func(c *Case) {
			recordAgain(c, func(_ int, vals []float32) []float32 { return vals })
			for i := range c.Again {
				c.Again[i].Tokens = c.Again[i].Tokens[:20]
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := demoCase(t, "good")
			tt.plant(&c)
			r := examine(t, c, probeFinal)
			wantSilence(t, r)
			if f := find(t, r, "recorded-again"); f.Verdict != tt.want {
				t.Errorf("%s: %s (%s)", f.Verdict, f.Sentence, f.Measure)
			}
			if f := find(t, r, "target-source"); f.Verdict != RuledOut {
				t.Errorf("%s: %s (%s)", f.Verdict, f.Sentence, f.Measure)
			}
		})
	}
}

func TestTheUseOfTapsIsTheSameForAnyScaleOfFC(t *testing.T) {
	c := demoCase(t, "shortcut")
	s, err := newStudy(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	scaled := c.Drafter
	scaled.Weights = edited{scaled.Weights, func(_ string, vals []float32) []float32 {
		for i := range vals {
			vals[i] *= 7
		}
		return vals
	}}
	one, err := s.tapUse(s.spec, c.Drafter)
	if err != nil {
		t.Fatal(err)
	}
	other, err := s.tapUse(s.spec, scaled)
	if err != nil {
		t.Fatal(err)
	}
	var sum float64
	for p, u := range one {
		sum += u
		if math.Abs(u-other[p]) > 1e-6 {
			t.Errorf("tap %d: %v and %v", p, u, other[p])
		}
	}
	if math.Abs(sum-1) > 1e-9 {
		t.Errorf("shares %v sum to %v", one, sum)
	}
	t.Log(one)
}
