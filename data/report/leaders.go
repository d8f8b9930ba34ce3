package report

import "strconv"

// leaderTable ranks the drafters of a run.
func (run Run) leaderTable() table {
	t := table{
		title: "Leader board",
		note:  "by tokens a round of the chain (accept_len_macro), or of the smallest tree where there is no chain, else by slot 1; behind the best: a paired difference over shared sequences",
		head:  []string{"place", "drafter", "tokens a round", "behind the best", "slot 1", "eal", "best budget", "tokens a round there", ""}, left: 2,
	}
	if len(run.Drafters) < 2 {
		return t
	}
	order := ranking(run.Drafters)
	best := run.Drafters[order[0]].Drafter
	for place, i := range order {
		d := run.Drafters[i]
		row := []string{strconv.Itoa(place + 1), d.Drafter, none, "", none, withInterval(d.EAL, 2), none, none, ""}
		if primary(d) == nil {
			row[0] = "–"
		}
		for _, a := range d.Acceptance {
			if a.AcceptLenMacro.Value != nil {
				row[2] = withInterval(a.AcceptLenMacro, 3)
				break
			}
		}
		if len(d.Slots) > 0 {
			row[4] = withInterval(d.Slots[0].Accuracy, 3)
		}
		top := -1
		for j, a := range d.Acceptance {
			if v := a.AcceptLenMacro.Value; v != nil && (top < 0 || *v > *d.Acceptance[top].AcceptLenMacro.Value) {
				top = j
			}
		}
		if top >= 0 {
			row[6], row[7] = d.Acceptance[top].name(), withInterval(d.Acceptance[top].AcceptLenMacro, 3)
		}
		for _, p := range run.Pairs {
			if h := p.headline(); p.A == best && p.B == d.Drafter && h != nil && h.Difference.Value != nil {
				row[3] = withInterval(h.Difference, 3)
				row[8] = pick(h.Ahead() > 0, "behind", "no lead shown")
			}
		}
		if d.Note != "" {
			row[8] = d.Note
		}
		t.rows = append(t.rows, row)
	}
	return t
}
