package report

import (
	"fmt"
	"math"
	"strconv"

	"github.com/draftscope/draftscope/schemas"
)

// costChart sets tokens a round, which say how many passes of the target are
// saved, against the positions that the target verifies for each token gained,
// which say what the passes cost. Up and to the left is better.
func (run Run) costChart() *chart {
	lo, hi, top := math.Inf(1), math.Inf(-1), 1.0
	for _, d := range run.Drafters {
		for _, acc := range d.Acceptance {
			if v := acc.VerifiedPerToken; v != nil && *v > 0 && acc.AcceptLenMicro.Value != nil {
				lo, hi = min(lo, math.Log2(*v)), max(hi, math.Log2(*v))
				top = max(top, *acc.AcceptLenMicro.Value)
			}
		}
	}
	if lo > hi {
		return nil
	}
	c := &chart{W: chartWidth, H: chartHeight, Title: "Tokens a round against verification cost"}
	x0, x1 := math.Floor(lo), math.Ceil(hi)
	if x1 <= x0 {
		x1 = x0 + 1
	}
	ticks := nice(1, top*1.06, 5)
	a := newAxes(c, 46, x0, x1, ticks[0], ticks[len(ticks)-1])
	a.yTicks(ticks, plain, "tokens a round (micro, bonus counted)")
	for v := x0; v <= x1; v++ {
		a.xTick(v, plain(math.Exp2(v)))
	}
	a.xTitle("positions verified a token gained (1 without drafting)")
	for i, d := range run.Drafters {
		var trees []point
		for _, acc := range d.Acceptance {
			v := acc.VerifiedPerToken
			if v == nil || *v <= 0 || acc.AcceptLenMicro.Value == nil {
				continue
			}
			p := point{math.Log2(*v), Estimate{Value: acc.AcceptLenMicro.Value}, fmt.Sprintf("%s, %s: %s tokens a round, %s positions verified a token",
				d.Drafter, acc.name(), fixed(acc.AcceptLenMicro.Value, 3), fixed(v, 2))}
			name := label{a.x(p.x) + 8, a.y(*p.e.Value) + 4, "start", "tick", "chain"}
			if acc.Method != schemas.MethodChain {
				name = label{a.x(p.x), a.y(*p.e.Value) - 8, "middle", "tick", strconv.FormatInt(acc.Budget, 10)}
				trees = append(trees, p)
			} else {
				a.series(i, []point{p}, true)
			}
			c.Texts = append(c.Texts, name)
		}
		a.series(i, trees, true)
	}
	return c
}

func (run Run) costTable() table {
	t := table{
		title: "Budgets against their cost",
		note: "a larger tree saves passes of the target and makes each one wider: tokens a round (accept_len_micro) beside the positions that the target verifies a token gained, " +
			"Σ (proposed + 1) / Σ accept_len; labels are tree budgets",
		head: []string{"drafter", "rounds by", "tokens a round", "verified a round", "verified a token"}, left: 2,
	}
	for _, d := range run.Drafters {
		for _, a := range d.Acceptance {
			if a.VerifiedPerToken != nil {
				wide := float64(a.Proposed)/float64(a.Rounds) + 1
				t.rows = append(t.rows, []string{d.Drafter, a.name(), fixed(a.AcceptLenMicro.Value, 3), fixed(&wide, 1), fixed(a.VerifiedPerToken, 2)})
			}
		}
	}
	return t
}

// cost fills in what verification cost each setting.
func (l *loader) cost(in string, by map[string]*Drafter) {
	l.each("SELECT drafter, method, budget, verified - rounds, verified_per_token FROM verify_cost"+in, func(r record) {
		d := by[r.text(0)]
		if d == nil {
			return
		}
		for i := range d.Acceptance {
			if a := &d.Acceptance[i]; a.Method == r.text(1) && a.Budget == r.int(2) {
				a.Proposed, a.VerifiedPerToken = r.int(3), r.maybe(4)
			}
		}
	})
}
