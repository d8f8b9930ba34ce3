package diagnose

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

// idsOf are a sequence's tokens.
func idsOf(q Sequence) []int32 {
	var ids []int32
	for _, tok := range q.Tokens {
		ids = append(ids, tok.TokenID)
	}
	return ids
}

// putBehind replaces the states of a sequence from a row on by those of the
// same tokens behind others, and of nothing else.
func putBehind(t *testing.T, c *Case, i, from int, before ...int32) {
	t.Helper()
	q := &c.Sequences[i]
	states, err := c.Recompute(t.Context(), slices.Concat(before, idsOf(*q)[from:]))
	if err != nil {
		t.Fatal(err)
	}
	h := c.Host.Hidden
	for n := range q.States {
		q.States[n] = slices.Concat(q.States[n][:from*h], states[n][len(before)*h:])
	}
}

func TestStatesBehindAnotherSequenceAreNamedFirst(t *testing.T) {
	for _, tt := range []struct {
		name    string
		verdict Verdict
		plant   func(*testing.T, *Case)
	}{
		{"each behind the one before it", Confirmed, func(t *testing.T, c *Case) {
			for i := 1; i < len(c.Sequences); i++ {
				putBehind(t, c, i, 0, idsOf(c.Sequences[i-1])...)
			}
		}},
		{"one behind one that is far from it", Confirmed, func(t *testing.T, c *Case) {
			putBehind(t, c, 1, 0, idsOf(c.Sequences[6])...)
		}},
		{"one from a row on behind another", Confirmed, func(t *testing.T, c *Case) {
			putBehind(t, c, 3, 20, idsOf(c.Sequences[2])...)
		}},
		{"one that is cut off from its begin", Confirmed, func(t *testing.T, c *Case) { putBehind(t, c, 2, 32) }},
		{"each behind a token that the engine added", Confirmed, func(t *testing.T, c *Case) {
			for i := range c.Sequences {
				putBehind(t, c, i, 0, 0)
			}
		}},
		{"one behind two", Supported, func(t *testing.T, c *Case) {
			putBehind(t, c, 4, 0, slices.Concat(idsOf(c.Sequences[2]), idsOf(c.Sequences[3]))...)
		}},
		{"each behind the one before it, in bf16", Confirmed, func(t *testing.T, c *Case) {
			c.Capture.DType = schemas.BF16
			for i := 1; i < len(c.Sequences); i++ {
				putBehind(t, c, i, 0, idsOf(c.Sequences[i-1])...)
			}
			states(c, func(n int, clean map[int][]float32) []float32 {
				return schemas.BF16.AppendFloats(nil, schemas.BF16.AppendBytes(nil, clean[n]))
			})
		}},
		{"each behind the one before it, in another engine's arithmetic", Confirmed, func(t *testing.T, c *Case) {
			c.Capture.Exact = false
			for i := 1; i < len(c.Sequences); i++ {
				putBehind(t, c, i, 0, idsOf(c.Sequences[i-1])...)
			}
			states(c, func(n int, clean map[int][]float32) []float32 {
				rng := rand.New(rand.NewPCG(5, uint64(n)))
				out := slices.Clone(clean[n])
				for i := range out {
					out[i] *= float32(1 + 0.01*rng.NormFloat64())
				}
				return out
			})
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := demoCase(t, "good")
			c.Sequences = c.Sequences[:8]
			tt.plant(t, &c)
			wantFirst(t, examine(t, c, probeStates, probeLabels), "packing", tt.verdict)
		})
	}
}
