package diagnose

import (
	"fmt"
	"math"

	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
)

// slotCounts are one sequence's hits and scored by slot, slot 1 first.
type slotCounts []count

// rounded are one sequence's rounds by one method: accepted lengths with the
// bonus, truncated rounds left out.
func roundsOf(e engineRun, method string) (c count) {
	for _, r := range e.rounds {
		if r.Method == method && !r.Truncated {
			c.hits += float64(r.AcceptLen)
			c.scored++
		}
	}
	return c
}

// slotHits counts the engine's slots.
func slotHits(runs []engineRun, block int) []slotCounts {
	out := make([]slotCounts, len(runs))
	for i, e := range runs {
		out[i] = make(slotCounts, block-1)
		for _, sl := range e.slots {
			if sl.Hit == nil {
				continue
			}
			out[i][sl.Slot-1].scored++
			if *sl.Hit {
				out[i][sl.Slot-1].hits++
			}
		}
	}
	return out
}

// numbers are the published numbers, each with its definition: the same
// drafts read from 0.3 to 3, and which of them a dashboard shows decides how
// good a drafter looks.
func numbers(runs []engineRun, hits []slotCounts, block int) []Number {
	chain, tree := make([]count, len(runs)), make([]count, len(runs))
	for i, e := range runs {
		chain[i], tree[i] = roundsOf(e, schemas.MethodChain), roundsOf(e, schemas.MethodDDTree)
	}
	minus := func(i Interval) Interval { return Interval{i.Value - 1, i.Low - 1, i.High - 1} }
	macro := func(cs []count) Interval {
		return bootstrap(len(cs), func(c []float64) float64 {
			var sum, n float64
			for i, k := range c {
				if cs[i].scored > 0 {
					sum += k * cs[i].hits / cs[i].scored
					n += k
				}
			}
			return sum / n
		})
	}
	slot := func(k int) []count {
		out := make([]count, len(hits))
		for i, h := range hits {
			out[i] = h[k]
		}
		return out
	}
	all := make([]count, len(hits))
	for i, h := range hits {
		all[i] = total(h)
	}
	eal := bootstrap(len(hits), func(c []float64) float64 {
		acc := make([]float64, 0, block-1)
		for k := range block - 1 {
			var t count
			for i, w := range c {
				t.hits += w * hits[i][k].hits
				t.scored += w * hits[i][k].scored
			}
			if t.scored == 0 {
				break
			}
			acc = append(acc, t.rate())
		}
		return drafter.EAL(acc)
	})
	return []Number{
		{"slot_accuracy[1]", rateOf(slot(0)), "hits of slot 1 / scored, over all anchors"},
		{"slot_accuracy, all slots", rateOf(all), "the same over slots 1 to B−1 together: what training logs call acc"},
		{"accept_len_macro", macro(chain), "tokens a round of the chain, bonus counted, mean of each sequence's mean (τ of the papers)"},
		{"accept_len_micro", rateOf(chain), "the same, pooled over rounds"},
		{"accepted_micro", minus(rateOf(chain)), "the same without the bonus"},
		{fmt.Sprintf("ddtree_accept_len(%d)", treeBudget), macro(tree), fmt.Sprintf("tokens a round of a tree of %d nodes, bonus counted, macro; at most %d", treeBudget, treeBudget+1)},
		{"eal", eal, "Σ_k Π_{i≤k} slot_accuracy[i]: takes slots for independent, no bonus"},
		{"top8_streak", streaks(runs, block, 8), "mean number of leading slots whose label is in the drafter's top 8: no bonus, no budget"},
	}
}

// streaks is the mean number of leading slots whose label is among the top n.
func streaks(runs []engineRun, block, n int) Interval {
	cs := make([]count, len(runs))
	for i, e := range runs {
		for at := 0; at+block-1 <= len(e.slots); at += block - 1 {
			b := e.slots[at : at+block-1]
			if b[0].Hit == nil {
				continue
			}
			cs[i].scored++
			for _, sl := range b {
				if sl.Hit == nil || sl.Rank == nil || int(*sl.Rank) >= n {
					break
				}
				cs[i].hits++
			}
		}
	}
	return rateOf(cs)
}

// rates are the pooled accuracies of the slots.
func rates(hits []slotCounts) []float64 {
	if len(hits) == 0 {
		return nil
	}
	out := make([]float64, len(hits[0]))
	for k := range out {
		var t count
		for _, h := range hits {
			t.hits += h[k].hits
			t.scored += h[k].scored
		}
		if out[k] = t.rate(); math.IsNaN(out[k]) {
			out[k] = 0
		}
	}
	return out
}
