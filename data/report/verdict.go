package report

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/draftscope/draftscope/schemas"
)

// verdict says in one sentence which drafter is better and where. It claims
// a lead only where an interval leaves 0 out.
func verdict(run Run) string {
	var scored []Drafter
	var unscored []string
	for _, d := range run.Drafters {
		if d.Sequences > 0 {
			scored = append(scored, d)
		} else {
			unscored = append(unscored, d.Drafter)
		}
	}
	switch {
	case run.Sequences == 0 && len(scored) == 0 && len(run.Faults) == 0:
		return "Nothing of this run is stored yet."
	case len(run.Drafters) == 0:
		return "Capture only: no drafter was replayed over this run."
	case len(scored) == 0:
		return fmt.Sprintf("No sequence was scored by %s.", list(unscored))
	case len(run.Drafters) == 1:
		return scored[0].Drafter + " is the only drafter of this run: there is nothing to compare it with."
	case len(scored) == 1:
		return fmt.Sprintf("%s is the only drafter with a scored sequence, %s %s none: there is nothing to compare it with.",
			scored[0].Drafter, list(unscored), pick(len(unscored) > 1, "have", "has"))
	}
	if len(run.Pairs) == 0 {
		return "The drafters share no sequence: they cannot be compared."
	}
	order := ranking(run.Drafters)
	best := run.Drafters[order[0]].Drafter
	p := run.Pairs[0] // the best against the next best
	head := p.headline()
	if head == nil || head.Difference.Value == nil {
		return fmt.Sprintf("Nothing was counted on both sides for %s and %s: they cannot be compared.", p.A, p.B)
	}
	var b strings.Builder
	numbers := fmt.Sprintf("%s %s against %s (%s, %s)", fixed(head.A, 3), head.unit(), fixed(head.B, 3),
		signed(head.Difference.Value, 3), interval(head.Difference, 3, true))
	n := head.Wins + head.Ties + head.Losses
	switch {
	case head.Ahead() > 0:
		fmt.Fprintf(&b, "%s is better than %s: %s", p.A, p.B, numbers)
	case head.Wins+head.Losses == 0:
		fmt.Fprintf(&b, "%s and %s are equal on every shared sequence: %s %s each", p.A, p.B, fixed(head.A, 3), head.unit())
	case n < enough:
		fmt.Fprintf(&b, "%s stands above %s, but %s too few to call it: %s", p.A, p.B, quantity(int64(n), "shared sequence")+pick(n == 1, " is", " are"), numbers)
	case head.Difference.Low == nil:
		fmt.Fprintf(&b, "%s stands above %s, but the shared sequences give no interval: %s", p.A, p.B, numbers)
	default:
		fmt.Fprintf(&b, "No lead is shown between %s and %s: %s, which includes 0", p.A, p.B, numbers)
	}
	if where := p.where(head); where != "" {
		b.WriteString("; " + where)
	}
	var behind, open []string
	for _, q := range run.Pairs[1:] {
		h := q.headline()
		if q.A != best || h == nil {
			continue
		}
		if h.Ahead() > 0 {
			behind = append(behind, q.B)
		} else {
			open = append(open, q.B)
		}
	}
	if len(behind) > 0 {
		fmt.Fprintf(&b, "; %s %s behind %s", list(behind), pick(len(behind) > 1, "are", "is"), best)
	}
	if len(open) > 0 {
		fmt.Fprintf(&b, "; no lead over %s is shown", list(open))
	}
	if len(unscored) > 0 {
		fmt.Fprintf(&b, "; %s %s no scored sequence", list(unscored), pick(len(unscored) > 1, "have", "has"))
	}
	return b.String() + "."
}

// headline is the difference that decides: tokens a round by the first shared
// setting, else accuracy at slot 1.
func (p Pair) headline() *Difference {
	for i := range p.Acceptance {
		if p.Acceptance[i].Difference.Value != nil {
			return &p.Acceptance[i]
		}
	}
	if len(p.Slots) > 0 {
		return &p.Slots[0]
	}
	return nil
}

// where says at which budgets and slots a side leads beyond the interval.
func (p Pair) where(head *Difference) string {
	var parts []string
	for _, side := range []struct {
		name string
		sign int
	}{{p.A, 1}, {p.B, -1}} {
		var places []string
		var budgets, slots []int
		trees := 0
		for i, d := range p.Acceptance {
			if d.Method != schemas.MethodDDTree || &p.Acceptance[i] == head {
				continue
			}
			trees++
			if d.Ahead() == side.sign {
				budgets = append(budgets, int(d.Budget))
			}
		}
		for i, d := range p.Slots {
			if d.Ahead() == side.sign && &p.Slots[i] != head {
				slots = append(slots, d.Slot)
			}
		}
		if len(budgets) > 0 {
			places = append(places, fmt.Sprintf("with %s%s of %s", pick(len(budgets) == trees && trees > 1, "all ", ""),
				pick(len(budgets) > 1, "trees", "a tree"), numbers(budgets))+pick(len(budgets) == 1 && budgets[0] == 1, " node", " nodes"))
		}
		if len(slots) > 0 {
			places = append(places, fmt.Sprintf("at %s %s", pick(len(slots) > 1, "slots", "slot"), ranges(slots)))
		}
		if len(places) > 0 {
			parts = append(parts, fmt.Sprintf("%s leads %s", side.name, strings.Join(places, " and ")))
		}
	}
	return strings.Join(parts, "; ")
}

func (d Difference) unit() string {
	switch {
	case d.Metric == "slot_accuracy":
		return fmt.Sprintf("at slot %d", d.Slot)
	case d.Method == schemas.MethodChain:
		return "tokens a round by the chain"
	}
	return "tokens a round by trees of " + quantity(d.Budget, "node")
}

func pick(cond bool, yes, no string) string {
	if cond {
		return yes
	}
	return no
}

// list joins names as a sentence does.
func list(names []string) string {
	if n := len(names); n > 1 {
		return strings.Join(names[:n-1], ", ") + " and " + names[n-1]
	}
	return strings.Join(names, "")
}

func numbers(v []int) string {
	names := make([]string, len(v))
	for i, n := range v {
		names[i] = strconv.Itoa(n)
	}
	return list(names)
}

// ranges writes ascending numbers as "1–4 and 7".
func ranges(v []int) string {
	var parts []string
	for i := 0; i < len(v); {
		j := i
		for j+1 < len(v) && v[j+1] == v[j]+1 {
			j++
		}
		switch {
		case j > i+1:
			parts = append(parts, fmt.Sprintf("%d–%d", v[i], v[j]))
		case j == i+1:
			parts = append(parts, strconv.Itoa(v[i]), strconv.Itoa(v[j]))
		default:
			parts = append(parts, strconv.Itoa(v[i]))
		}
		i = j + 1
	}
	return list(parts)
}
