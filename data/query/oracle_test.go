//go:build cgo

package query

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"testing"

	"github.com/draftscope/draftscope/data/query/querytest"
	"github.com/draftscope/draftscope/schemas"
)

// The oracle computes every number a second time in plain loops over the rows
// that were written, without SQL and without looking at the views.

type block struct {
	seq   string
	slots []schemas.Slot
}

func blocksOf(rows []schemas.Slot) []block {
	var out []block
	for _, s := range rows {
		if s.Slot == 1 {
			out = append(out, block{seq: s.SeqID})
		}
		last := &out[len(out)-1]
		last.slots = append(last.slots, s)
	}
	return out
}

func ratio(a, b float64) any {
	if b == 0 {
		return nil
	}
	return a / b
}

func TestTheViewsEqualPlainLoops(t *testing.T) {
	dir := t.TempDir()
	good := querytest.Drafter{Name: "good", Skill: 0.9, Decay: 0.93}
	poor := querytest.Drafter{Name: "poor", Skill: 0.4, Decay: 0.8}
	const width = 6
	slots, rounds := querytest.Random(t, dir, "r", 7, 12, width, good, poor)
	db := openDB(t, dir)
	for _, d := range []string{"good", "poor"} {
		where := " WHERE drafter = '" + d + "' ORDER BY slot"
		blocks := blocksOf(slots[d])
		var acc, prefix, cond [][]any
		eal, product, expected := 0., 1., 0.
		for k := range width - 1 {
			var hits, scored, data, anchors, lead, reached float64
			for _, b := range blocks {
				s := b.slots[k]
				if s.Hit != nil {
					scored++
					if *s.Hit {
						hits++
					}
					if *s.DataToken == s.DraftToken {
						data++
					}
				}
				all, before := true, true
				for i, s := range b.slots[:k+1] {
					all = all && s.Hit != nil
					before = before && (i == k || s.Hit != nil && *s.Hit)
				}
				if all {
					anchors++
					if before {
						reached++
						if *s.Hit {
							lead++
						}
					}
				}
			}
			acc = append(acc, row(int64(hits), int64(scored), ratio(hits, scored), int64(data)))
			prefix = append(prefix, row(int64(anchors), int64(lead), ratio(lead, anchors)))
			cond = append(cond, row(int64(reached), ratio(lead, reached)))
			product *= hits / scored
			eal += product
			expected += lead / anchors
		}
		wantRows(t, db, 1e-12, "SELECT hits, scored, accuracy, data_hits FROM slot_accuracy"+where, acc...)
		wantRows(t, db, 1e-12, "SELECT anchors, prefix_hits, prefix_rate FROM prefix_rate"+where, prefix...)
		wantRows(t, db, 1e-12, "SELECT reached, conditional_rate FROM conditional_rate"+where, cond...)
		wantRows(t, db, 1e-12, "SELECT eal, expected_accepted FROM eal JOIN expected_accepted USING (run, drafter) WHERE drafter = '"+d+"'", row(eal, expected))
		wantRows(t, db, 1e-12, "SELECT anchors, top8_streak FROM top8_streak WHERE drafter = '"+d+"'", streak(blocks))
		for _, o := range []string{"ce", "kl", "rkl", "jsd", "tv", "nla"} {
			for _, w := range []string{"plain", "exp", "dpace"} {
				for _, n := range []string{"weight", "count", "batch"} {
					slots, loss := oracleLoss(blocks, o, w, 4, n, 0.5)
					wantRows(t, db, 1e-9, "SELECT slots, loss FROM loss('"+o+"', '"+w+"', 4, '"+n+"') WHERE drafter = '"+d+"'", row(slots, loss))
				}
			}
		}
		wantRows(t, db, 1e-12, "SELECT method, budget, sequences, rounds, truncated, accept_len_macro, accept_len_micro FROM accept_len WHERE drafter = '"+d+"' ORDER BY method, budget", accepted(rounds[d])...)
	}
}

func streak(blocks []block) []any {
	var sum, n float64
	for _, b := range blocks {
		if b.slots[0].Hit == nil {
			continue
		}
		n++
		for _, s := range b.slots {
			if s.Hit == nil || s.Rank == nil || *s.Rank >= 8 {
				break
			}
			sum++
		}
	}
	return row(int64(n), ratio(sum, n))
}

func oracleLoss(blocks []block, objective, weighting string, gamma float64, normaliser string, alpha float64) (int64, any) {
	var num, weight, count float64
	seqs := make(map[string]bool)
	for _, b := range blocks {
		l, m := make([]float64, len(b.slots)), make([]float64, len(b.slots))
		for k, s := range b.slots {
			p := map[string]*float32{"ce": s.CE, "kl": s.KL, "rkl": s.RKL, "jsd": s.JSD, "tv": s.TV, "nla": s.TV}[objective]
			if s.Hit == nil || p == nil {
				continue
			}
			m[k], l[k] = 1, float64(*p)
			if objective == "nla" {
				l[k] = -math.Log(max(1-l[k], 1e-5))
			}
		}
		for k := range b.slots {
			w := 1.
			switch weighting {
			case "exp":
				w = math.Exp(-float64(k) / gamma)
			case "dpace":
				w = 0
				for j := k; j < len(b.slots); j++ {
					pre := 1.
					for i := range j + 1 {
						if m[i] == 1 {
							pre *= (1-alpha)*math.Exp(-float64(*b.slots[i].CE)) + alpha
						}
					}
					w += m[j] * pre
				}
				w *= m[k]
			}
			num += l[k] * m[k] * w
			weight += m[k] * w
			count += m[k]
			if m[k] == 1 {
				seqs[b.seq] = true
			}
		}
	}
	den := map[string]float64{"weight": weight, "count": count + 1e-5, "batch": float64(len(seqs))}[normaliser]
	return int64(count), ratio(num, den)
}

func accepted(rounds []schemas.Round) [][]any {
	type key struct {
		method string
		budget int32
	}
	groups := make(map[key]map[string][]float64)
	truncated := make(map[key]int64)
	for _, r := range rounds {
		k := key{r.Method, r.Budget}
		if r.Truncated {
			truncated[k]++
			continue
		}
		if groups[k] == nil {
			groups[k] = make(map[string][]float64)
		}
		groups[k][r.SeqID] = append(groups[k][r.SeqID], float64(r.AcceptLen))
	}
	var out [][]any
	for _, k := range slices.SortedFunc(maps.Keys(groups), func(a, b key) int {
		return cmp.Or(cmp.Compare(a.method, b.method), cmp.Compare(a.budget, b.budget))
	}) {
		var sum, n, means float64
		for _, lens := range groups[k] {
			var s float64
			for _, v := range lens {
				s += v
			}
			sum, n, means = sum+s, n+float64(len(lens)), means+s/float64(len(lens))
		}
		out = append(out, row(k.method, int64(k.budget), int64(len(groups[k])), int64(n), truncated[k], means/float64(len(groups[k])), sum/n))
	}
	return out
}
