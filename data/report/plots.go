package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/draftscope/draftscope/schemas"
)

// slotChart draws one number of every drafter by slot, with interval bands.
func (run Run) slotChart(title string, number func(Slot) Estimate) *chart {
	deepest := 0
	for _, d := range run.Drafters {
		deepest = max(deepest, len(d.Slots))
	}
	if deepest == 0 {
		return nil
	}
	c := &chart{W: chartWidth, H: chartHeight, Title: title}
	a := newAxes(c, 46, 0.5, float64(deepest)+0.5, 0, 1)
	a.yTicks([]float64{0, .2, .4, .6, .8, 1}, percent, title)
	every := (deepest + 15) / 16
	for k := 1; k <= deepest; k += every {
		a.xTick(float64(k), strconv.Itoa(k))
	}
	a.xTitle("slot k: the draft of token anchor + k")
	for i, d := range run.Drafters {
		var points []point
		for _, s := range d.Slots {
			e := number(s)
			points = append(points, point{float64(s.Slot), e, fmt.Sprintf("%s, slot %d: %s", d.Drafter, s.Slot, withInterval(e, 3))})
		}
		a.series(i, points, false)
	}
	return c
}

// budgetChart draws tokens a round by tree budget. The chain stands apart on
// the left, since its budget means another thing.
func (run Run) budgetChart() *chart {
	var budgets []int64
	top, chains := 1.0, false
	for _, d := range run.Drafters {
		for _, a := range d.Acceptance {
			if a.AcceptLenMacro.Value == nil {
				continue
			}
			top = max(top, *a.AcceptLenMacro.Value)
			if a.AcceptLenMacro.High != nil {
				top = max(top, *a.AcceptLenMacro.High)
			}
			if a.Method == schemas.MethodChain {
				chains = true
			} else if a.Budget > 0 {
				budgets = append(budgets, a.Budget)
			}
		}
	}
	slices.Sort(budgets)
	budgets = slices.Compact(budgets)
	if len(budgets) == 0 && !chains {
		return nil
	}
	c := &chart{W: chartWidth, H: chartHeight, Title: "Tokens a round by budget"}
	// One step of the axis is a doubling; the chain takes two of its own.
	lo, hi := 0.0, 0.0
	if len(budgets) > 0 {
		lo, hi = math.Log2(float64(budgets[0])), math.Log2(float64(budgets[len(budgets)-1]))
	}
	gap := max(1, (hi-lo)/4)
	chainAt := lo - gap
	ticks := nice(1, top, 5)
	a := newAxes(c, 46, chainAt-gap/2, max(hi, chainAt+gap)+gap/3, ticks[0], ticks[len(ticks)-1])
	if len(budgets) == 0 {
		a.x0, a.x1 = chainAt-gap, chainAt+gap
	}
	a.yTicks(ticks, plain, "tokens a round (macro, bonus counted)")
	if chains {
		a.xTick(chainAt, "chain")
	}
	last := math.Inf(-1)
	for _, b := range budgets {
		at := math.Log2(float64(b))
		if a.x(at)-last > 26 {
			a.xTick(at, strconv.FormatInt(b, 10))
			last = a.x(at)
		}
	}
	a.xTitle(pick(len(budgets) > 0, "tree budget in nodes, root not counted", ""))
	n := float64(len(run.Drafters))
	for i, d := range run.Drafters {
		// Neighbours are moved apart a little, so that whiskers stay legible.
		shift := (float64(i) - (n-1)/2) * min(5, 24/n) * (a.x1 - a.x0) / (a.right - a.left)
		var chain, trees []point
		for _, acc := range d.Acceptance {
			p := point{chainAt + shift, acc.AcceptLenMacro, fmt.Sprintf("%s, %s: %s", d.Drafter, acc.name(), withInterval(acc.AcceptLenMacro, 3))}
			if acc.Method == schemas.MethodChain {
				chain = append(chain, p)
			} else if acc.Budget > 0 {
				p.x = math.Log2(float64(acc.Budget)) + shift
				trees = append(trees, p)
			}
		}
		for _, p := range chain {
			a.series(i, []point{p}, true)
		}
		a.series(i, trees, true)
	}
	return c
}

// facet is a small chart of one drafter or pair, under a heading.
type facet struct {
	Name  string
	Class string // colour and shape of the drafter it is about
	Mark  string
	Note  string
	Chart *chart
}

// distributionFacets draws the acceptance lengths of the chain, or else of
// the smallest tree, one panel a drafter on common axes.
func (run Run) distributionFacets() []facet {
	var pickOf []*Acceptance
	var longest int64
	top := 0.0
	for i := range run.Drafters {
		var found *Acceptance
		for j := range run.Drafters[i].Acceptance {
			if a := &run.Drafters[i].Acceptance[j]; a.Rounds > 0 {
				found = a
				break
			}
		}
		pickOf = append(pickOf, found)
		if found == nil {
			continue
		}
		for _, b := range found.Distribution {
			longest, top = max(longest, b.AcceptLen), max(top, b.Share)
		}
	}
	var out []facet
	for i, acc := range pickOf {
		if acc == nil {
			continue
		}
		c := &chart{W: chartWidth, H: 226, Title: "Acceptance distribution of " + run.Drafters[i].Drafter}
		ticks := nice(0, top, 4)
		a := newAxes(c, 46, 0.4, float64(max(longest, 4))+0.6, 0, ticks[len(ticks)-1])
		a.top += 16 // the mean is named above the bars
		a.yTicks(ticks, percent, "share of rounds")
		width := a.x(1.84) - a.x(1)
		for n := int64(1); n <= max(longest, 4); n++ {
			a.xTick(float64(n), strconv.FormatInt(n, 10))
		}
		for _, b := range acc.Distribution {
			y := a.y(b.Share)
			c.Rects = append(c.Rects, rect{
				a.x(float64(b.AcceptLen)) - width/2, y, width, max(a.bottom-y, 0.5), seriesClass(i),
				fmt.Sprintf("%s: %s, %.1f %%", quantity(b.AcceptLen, "token"), quantity(b.Rounds, "round"), 100*b.Share),
			})
		}
		if v := acc.AcceptLenMicro.Value; v != nil {
			c.Lines = append(c.Lines, segment{a.x(*v), a.top - 14, a.x(*v), a.bottom, "mean"})
			right := a.x(*v) > (a.left+a.right)/2
			c.Texts = append(c.Texts, label{a.x(*v) + 5 - 10*float64(b2i(right)), a.top - 5, pick(right, "end", "start"), "value", "mean " + fixed(v, 2)})
		}
		a.xTitle("tokens a round, bonus counted")
		out = append(out, facet{
			Name: run.Drafters[i].Drafter, Class: seriesClass(i), Mark: mark(i, 0, 0),
			Note: fmt.Sprintf("%s, %s", acc.name(), quantity(acc.Rounds, "round")), Chart: c,
		})
	}
	return out
}

// forest draws paired differences with their intervals, a group of rows a
// pair, around a line at no difference.
func (run Run) forest() *chart {
	rows, lo, hi := 0, 0.0, 0.0
	for _, p := range run.Pairs {
		if len(p.Acceptance) > 0 {
			rows += len(p.Acceptance) + 1
		}
		for _, d := range p.Acceptance {
			for _, v := range []*float64{d.Difference.Value, d.Difference.Low, d.Difference.High} {
				if v != nil {
					lo, hi = min(lo, *v), max(hi, *v)
				}
			}
		}
	}
	if rows == 0 {
		return nil
	}
	const rowHeight = 21.0
	c := &chart{W: chartWidth, H: 24 + float64(rows)*rowHeight + 46, Title: "Paired differences in tokens a round"}
	ticks := nice(lo, hi, 5)
	a := newAxes(c, 92, ticks[0], ticks[len(ticks)-1], 0, 1)
	a.top, a.right = 8, c.W-62
	for _, t := range ticks {
		c.Lines = append(c.Lines, segment{a.x(t), a.top, a.x(t), a.bottom, "grid"})
		a.xTick(t, plain(t))
	}
	c.Lines = append(c.Lines, segment{a.x(0), a.top, a.x(0), a.bottom, "zero"})
	a.xTitle("difference in tokens a round, 95 % interval")
	y := a.top + rowHeight/2 + 2
	for _, p := range run.Pairs {
		if len(p.Acceptance) == 0 {
			continue
		}
		c.Texts = append(c.Texts, label{2, y + 4, "start", "group", p.A + " − " + p.B})
		y += rowHeight
		for _, d := range p.Acceptance {
			class := run.leaderClass(p, d)
			c.Texts = append(c.Texts, label{a.left - 10, y + 4, "end", "tick", settingName(d.Method, d.Budget)},
				label{c.W - 2, y + 4, "end", "value", signed(d.Difference.Value, 2)})
			if e := d.Difference; e.Value != nil {
				tip := fmt.Sprintf("%s − %s, %s: %s, %s", p.A, p.B, settingName(d.Method, d.Budget), signed(e.Value, 3), interval(e, 3, true))
				if e.Low != nil {
					c.Rects = append(c.Rects, rect{a.x(*e.Low), y - 3.5, max(a.x(*e.High)-a.x(*e.Low), 1), 7, "span " + class, tip})
				}
				c.Marks = append(c.Marks, shape{mark(3, a.x(*e.Value), y), class, tip})
			}
			y += rowHeight
		}
	}
	return c
}

// leaderClass is the colour of the side that leads, grey when none does.
func (run Run) leaderClass(p Pair, d Difference) string {
	leader := ""
	switch d.Ahead() {
	case 1:
		leader = p.A
	case -1:
		leader = p.B
	}
	for i := range run.Drafters {
		if run.Drafters[i].Drafter == leader {
			return seriesClass(i)
		}
	}
	return "open"
}

// slotDifferences draws the paired difference in accuracy by slot for each
// pair that the best drafter is in, each on its own scale.
func (run Run) slotDifferences() []facet {
	var out []facet
	for _, p := range run.Pairs {
		if p.A != run.Pairs[0].A || len(p.Slots) == 0 {
			continue
		}
		lo, hi := 0.0, 0.0
		for _, d := range p.Slots {
			for _, v := range []*float64{d.Difference.Value, d.Difference.Low, d.Difference.High} {
				if v != nil {
					lo, hi = min(lo, *v), max(hi, *v)
				}
			}
		}
		ticks := nice(lo, hi, 4)
		c := &chart{W: chartWidth, H: 210, Title: fmt.Sprintf("Accuracy of %s minus %s by slot", p.A, p.B)}
		a := newAxes(c, 54, 0.5, float64(len(p.Slots))+0.5, ticks[0], ticks[len(ticks)-1])
		a.yTicks(ticks, func(v float64) string { return signed(&v, 2) }, "difference in accuracy")
		c.Lines = append(c.Lines, segment{a.left, a.y(0), a.right, a.y(0), "zero"})
		every := (len(p.Slots) + 15) / 16
		for i, d := range p.Slots {
			x := a.x(float64(d.Slot))
			if i%every == 0 {
				a.xTick(float64(d.Slot), strconv.Itoa(d.Slot))
			}
			e := d.Difference
			if e.Value == nil {
				continue
			}
			class := run.leaderClass(p, d)
			tip := fmt.Sprintf("slot %d: %s, %s", d.Slot, signed(e.Value, 3), interval(e, 3, true))
			if e.Low != nil {
				c.Rects = append(c.Rects, rect{x - 3.5, a.y(*e.High), 7, max(a.y(*e.Low)-a.y(*e.High), 1), "span " + class, tip})
			}
			c.Marks = append(c.Marks, shape{mark(3, x, a.y(*e.Value)), class, tip})
		}
		a.xTitle("slot")
		out = append(out, facet{Name: p.A + " − " + p.B, Note: quantity(int64(p.Sequences), "shared sequence"), Chart: c})
	}
	return out
}
