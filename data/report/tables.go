package report

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// A table is one table of the report, for a terminal and for the page alike.
type table struct {
	title string
	note  string // what the numbers are, in one line
	head  []string
	left  int // so many first columns are words, the rest are numbers
	rows  [][]string
}

func withInterval(e Estimate, digits int) string {
	if e.Low == nil {
		return fixed(e.Value, digits)
	}
	return fmt.Sprintf("%s [%s, %s]", fixed(e.Value, digits), fixed(e.Low, digits), fixed(e.High, digits))
}

// tables gives a run's tables in reading order; those without rows are left out.
func (run Run) tables() []table {
	all := []table{
		run.acceptanceTable(), run.tagTable(), run.effectTable(), run.storedTable(), run.summaryTable(), run.slotTable(), run.prefixTable(), run.pairTable(), run.slotLeadTable(),
		run.distributionTable(), run.lossMeanTable(), run.lossTable(), run.faultTable(),
	}
	var out []table
	for _, t := range all {
		if len(t.rows) > 0 {
			out = append(out, t)
		}
	}
	return out
}

func (run Run) acceptanceTable() table {
	t := table{
		title: "Tokens a round",
		note:  "accept_len, bonus token counted; macro is the mean over sequences, micro pools rounds; truncated rounds are in neither",
		head:  []string{"drafter", "method", "budget", "macro", "95 % interval", "micro", "95 % interval", "rounds", "truncated", "sequences"}, left: 2,
	}
	for _, d := range run.Drafters {
		for _, a := range d.Acceptance {
			t.rows = append(t.rows, []string{
				d.Drafter, a.Method, strconv.FormatInt(a.Budget, 10), fixed(a.AcceptLenMacro.Value, 3), interval(a.AcceptLenMacro, 3, false),
				fixed(a.AcceptLenMicro.Value, 3), interval(a.AcceptLenMicro, 3, false), count(a.Rounds), count(a.Truncated), count(a.Sequences),
			})
		}
		if d.Note != "" {
			t.rows = append(t.rows, []string{d.Drafter, none, none, none, none, none, none, "0", "0", "0"})
		}
	}
	return t
}

func (run Run) summaryTable() table {
	t := table{
		title: "Drafted blocks",
		note:  "leading slots a block: eal assumes independent slots, expected_accepted does not, top8_streak asks for the label among the 8 best; no bonus token",
		head:  []string{"drafter", "sequences", "anchors", "capped", "scored slots", "eal", "expected_accepted", "top8_streak"}, left: 1,
	}
	for _, d := range run.Drafters {
		if d.Anchors > 0 || d.Note != "" {
			t.rows = append(t.rows, []string{
				d.Drafter, count(int64(d.Sequences)), count(d.Anchors), count(d.Capped), count(d.Scored),
				withInterval(d.EAL, 3), withInterval(d.ExpectedAccepted, 3), withInterval(d.Top8Streak, 3),
			})
		}
	}
	return t
}

// bySlot makes a table with one row a slot and one column a drafter.
func (run Run) bySlot(t table, cell func(Slot) string) table {
	t.head, t.left = []string{"slot"}, 0
	deepest := 0
	for _, d := range run.Drafters {
		t.head = append(t.head, d.Drafter)
		deepest = max(deepest, len(d.Slots))
	}
	for k := range deepest {
		row := []string{strconv.Itoa(k + 1)}
		for _, d := range run.Drafters {
			if k < len(d.Slots) {
				row = append(row, cell(d.Slots[k]))
			} else {
				row = append(row, pick(d.Note != "", none, ""))
			}
		}
		t.rows = append(t.rows, row)
	}
	return t
}

func (run Run) slotTable() table {
	notes := []string{"slot_accuracy = hits / scored over all anchors, whatever the slots before did"}
	for _, d := range run.Drafters {
		if in := d.Scored - d.Outside; d.Outside > 0 && d.Scored > 0 {
			notes = append(notes, fmt.Sprintf("the draft vocabulary of %s lacks %d of %d labels, so that at most %d/%d = %.3f can hit", d.Drafter, d.Outside, d.Scored, in, d.Scored, float64(in)/float64(d.Scored)))
		}
	}
	return run.bySlot(table{
		title: "Accuracy by slot",
		note:  strings.Join(notes, "; "),
	}, func(s Slot) string { return withInterval(s.Accuracy, 3) })
}

func (run Run) prefixTable() table {
	return run.bySlot(table{
		title: "Prefix rate by slot",
		note:  "prefix_rate, the share of anchors whose slots 1..k all hit; behind the stroke conditional_rate, the share of those that got as far as slot k",
	}, func(s Slot) string { return fixed(s.PrefixRate.Value, 3) + " / " + fixed(s.ConditionalRate.Value, 3) })
}

func (run Run) distributionTable() table {
	t := table{title: "Acceptance distribution", note: "share of rounds by accept_len, truncated rounds left out", left: 2}
	var longest int64
	for _, d := range run.Drafters {
		for _, a := range d.Acceptance {
			for _, b := range a.Distribution {
				longest = max(longest, b.AcceptLen)
			}
		}
	}
	t.head = []string{"drafter", "rounds by"}
	for n := range longest {
		t.head = append(t.head, strconv.FormatInt(n+1, 10))
	}
	for _, d := range run.Drafters {
		for _, a := range d.Acceptance {
			if a.Rounds == 0 {
				continue
			}
			row := make([]string, 2+longest)
			row[0], row[1] = d.Drafter, a.name()
			for i := range longest {
				row[2+i] = "·"
			}
			for _, b := range a.Distribution {
				row[1+b.AcceptLen] = strings.TrimPrefix(fmt.Sprintf("%.2f", b.Share), "0")
			}
			t.rows = append(t.rows, row)
		}
	}
	return t
}

// name says how the rounds were run, in as few words as a label has room for.
func (a Acceptance) name() string { return settingName(a.Method, a.Budget) }

func settingName(method string, budget int64) string {
	if method == "chain" {
		return method
	}
	return fmt.Sprintf("%s %d", method, budget)
}

var pairHead = []string{"A", "B", "where", "A", "B", "A − B", "95 % interval", "wins", "ties", "losses", ""}

func pairRow(p Pair, d Difference, where string) []string {
	mark := "undecided"
	switch d.Ahead() {
	case 1:
		mark = p.A
	case -1:
		mark = p.B
	}
	span := none
	if d.Difference.Low != nil {
		span = signed(d.Difference.Low, 3) + " to " + signed(d.Difference.High, 3)
	}
	return []string{
		p.A, p.B, where, fixed(d.A, 3), fixed(d.B, 3), signed(d.Difference.Value, 3), span,
		strconv.Itoa(d.Wins), strconv.Itoa(d.Ties), strconv.Itoa(d.Losses), mark,
	}
}

func (run Run) pairTable() table {
	t := table{
		title: "Drafter against drafter, tokens a round",
		note:  "accept_len_macro over shared sequences, paired bootstrap; wins count sequences; the last column names who leads beyond the interval",
		head:  pairHead, left: 3,
	}
	for _, p := range run.Pairs {
		for _, d := range p.Acceptance {
			t.rows = append(t.rows, pairRow(p, d, settingName(d.Method, d.Budget)))
		}
	}
	return t
}

// pairCompactTable is pairTable for a narrow place.
func (run Run) pairCompactTable() table {
	t := table{head: []string{"pair A − B", "where", "A", "B", "A − B", "95 % interval", "W/T/L"}, left: 2}
	for _, row := range run.pairTable().rows {
		t.rows = append(t.rows, []string{row[0] + " − " + row[1], row[2], row[3], row[4], row[5], row[6], strings.Join(row[7:10], "/")})
	}
	return t
}

func (run Run) slotPairTable() table {
	t := table{
		title: "Drafter against drafter, accuracy by slot",
		note:  "slot_accuracy over shared sequences, paired bootstrap",
		head:  pairHead, left: 3,
	}
	for _, p := range run.Pairs {
		for _, d := range p.Slots {
			t.rows = append(t.rows, pairRow(p, d, fmt.Sprintf("slot %d", d.Slot)))
		}
	}
	return t
}

// slotLeadTable is slotPairTable in one row a pair.
func (run Run) slotLeadTable() table {
	t := table{
		title: "Drafter against drafter, accuracy by slot",
		note:  "slot_accuracy over shared sequences, paired bootstrap: A − B at slot 1, and the slots at which each side leads beyond the interval",
		head:  []string{"A", "B", "slot 1", "95 % interval", "A leads at", "B leads at"}, left: 2,
	}
	for _, p := range run.Pairs {
		if len(p.Slots) == 0 {
			continue
		}
		var a, b []int
		for _, d := range p.Slots {
			switch d.Ahead() {
			case 1:
				a = append(a, d.Slot)
			case -1:
				b = append(b, d.Slot)
			}
		}
		first := pairRow(p, p.Slots[0], "")
		t.rows = append(t.rows, []string{p.A, p.B, first[5], first[6], orDash(ranges(a)), orDash(ranges(b))})
	}
	return t
}

func orDash(s string) string { return pick(s == "", "–", s) }

func (run Run) lossMeanTable() table {
	t := table{
		title: "Mean losses",
		note:  "nats a scored slot, unweighted; n/a where a loss was not recorded",
		head:  []string{"drafter", "loss", "mean", "95 % interval", "slots"}, left: 2,
	}
	for _, d := range run.Drafters {
		for _, l := range d.LossMeans {
			t.rows = append(t.rows, []string{d.Drafter, l.Objective, fixed(l.Mean.Value, 4), interval(l.Mean, 4, false), count(l.Count)})
		}
	}
	return t
}

func (run Run) lossTable() table {
	t := table{
		title: "Training losses",
		note:  "what published recipes minimise, over all anchors; weight divides by the sum of weights, count by the number of slots, batch by sequences",
		head:  []string{"drafter", "objective", "weighting", "normaliser", "loss", "slots"}, left: 4,
	}
	for _, d := range run.Drafters {
		for _, l := range d.Losses {
			weighting := l.Weighting
			if l.Gamma != nil {
				weighting += fmt.Sprintf(" γ=%g", *l.Gamma)
			}
			t.rows = append(t.rows, []string{d.Drafter, l.Objective, weighting, l.Normaliser, fixed(l.Loss, 4), count(l.Slots)})
		}
	}
	return t
}

func (run Run) faultTable() table {
	t := table{title: "Set aside", note: "sequences that a check refused; no number counts them", head: []string{"check", "faults", "sequences"}, left: 1}
	for _, f := range run.Faults {
		t.rows = append(t.rows, []string{f.Check, count(f.Faults), count(f.Sequences)})
	}
	return t
}

// facts are the lines that stand above a run's tables.
func (run Run) facts() []string {
	states := "no states"
	if len(run.States) > 0 {
		states = "states " + strings.Trim(fmt.Sprint(run.States), "[]")
	}
	lines := []string{fmt.Sprintf("%s, %s, %s of them generated; %s", quantity(run.Sequences, "sequence"), quantity(run.Tokens, "token"), count(run.Generated), states)}
	if a := run.Agreement; a.Value == nil {
		lines = append(lines, "agreement of the text with the target's argmax: n/a")
	} else {
		lines = append(lines, fmt.Sprintf("agreement of the text with the target's argmax: %.4f (%s of %s)", *a.Value, count(a.Hits), quantity(a.Of, "position")))
	}
	if n := len(run.Looped); n > 0 {
		lines = append(lines, fmt.Sprintf("%d %s fell into a loop, which flatters every drafter: %s", n, pick(n > 1, "texts", "text"), strings.Join(run.Looped[:min(n, 8)], " ")+pick(n > 8, " …", "")))
	}
	for _, d := range run.Drafters {
		switch {
		case d.Note != "":
			lines = append(lines, fmt.Sprintf("drafter %s: n/a, %s", d.Drafter, d.Note))
		case d.Faulty > 0:
			lines = append(lines, fmt.Sprintf("drafter %s: set aside by faults in %s", d.Drafter, quantity(d.Faulty, "sequence")))
		}
	}
	return append(lines, run.Stored.facts(run.Run)...)
}

// method says how intervals were made.
func (r *Report) method() string {
	return fmt.Sprintf("Intervals are 95 %% percentile intervals of a bootstrap over sequences (%s, seed %d), each comparison taken by itself. n/a: nothing was counted, or fewer than two sequences.", quantity(int64(r.Resamples), "resample"), r.Seed)
}

// sweepTable is acceptanceTable with one column a drafter.
func (run Run) sweepTable() table {
	t := table{note: "accept_len_macro, bonus token counted; truncated rounds left out", head: []string{"rounds by"}, left: 1}
	var settings []setting
	for _, d := range run.Drafters {
		t.head = append(t.head, d.Drafter)
		for _, a := range d.Acceptance {
			settings = append(settings, setting{a.Method, a.Budget})
		}
	}
	slices.SortFunc(settings, compareSettings)
	for _, s := range slices.Compact(settings) {
		row := []string{settingName(s.method, s.budget)}
		for _, d := range run.Drafters {
			cell := pick(d.Note != "", none, "")
			for _, a := range d.Acceptance {
				if (setting{a.Method, a.Budget}) == s {
					cell = withInterval(a.AcceptLenMacro, 2)
				}
			}
			row = append(row, cell)
		}
		t.rows = append(t.rows, row)
	}
	return t
}
