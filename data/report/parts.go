package report

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/draftscope/draftscope/data/query"
	"github.com/draftscope/draftscope/schemas"
)

// What a report splits a run's sequences into. A page must stay small.
const (
	mostMoments   = 24
	mostTags      = 6
	mostTagValues = 12
)

// Part is what one drafter's rounds accepted in a part of the sequences: those
// with one tag, or those captured in one stretch of time. The rounds are those
// of the drafter's first setting, the chain where it has one.
type Part struct {
	Tag            string     `json:"tag,omitempty"`
	Value          string     `json:"value,omitempty"`
	Since          *time.Time `json:"since,omitempty"`
	Until          *time.Time `json:"until,omitempty"`
	Sequences      int        `json:"sequences"` // with whole rounds
	AcceptLenMacro Estimate   `json:"accept_len_macro"`
}

// grouping is one way to split a run's sequences.
type grouping struct {
	name  Part
	among map[string]bool
}

// groupings reads how the sequences of a run split by tag and by time. Of tags
// and values it keeps the ones that most sequences have.
func (l *loader) groupings(run string) (tags, moments []grouping) {
	in := " WHERE run = " + query.Literal(run)
	byTag := map[string]map[string]map[string]bool{}
	l.each("SELECT tag, value, seq_id FROM sequence_tags"+in, func(r record) {
		values := byTag[r.text(0)]
		if values == nil {
			values = map[string]map[string]bool{}
			byTag[r.text(0)] = values
		}
		if values[r.text(1)] == nil {
			values[r.text(1)] = map[string]bool{}
		}
		values[r.text(1)][r.text(2)] = true
	})
	shown := 0
	for _, tag := range slices.Sorted(maps.Keys(byTag)) {
		values := byTag[tag]
		if shown == mostTags || len(values) > 1 && largest(values) == 1 {
			continue // a tag that names each sequence apart says nothing of parts
		}
		shown++
		order := slices.Sorted(maps.Keys(values))
		slices.SortStableFunc(order, func(a, b string) int { return cmp.Compare(len(values[b]), len(values[a])) })
		for _, v := range order[:min(len(order), mostTagValues)] {
			tags = append(tags, grouping{Part{Tag: tag, Value: v}, values[v]})
		}
	}
	type created struct {
		seq string
		at  time.Time
	}
	var all []created
	l.each("SELECT seq_id, created_at FROM sequences"+in+" AND created_at IS NOT NULL ORDER BY created_at, seq_id", func(r record) {
		if at, ok := r[1].(time.Time); ok {
			all = append(all, created{r.text(0), at.UTC()})
		}
	})
	n := min(mostMoments, len(all)/4) // fewer sequences have no interval to speak of
	for i := range n {
		stretch := all[i*len(all)/n : (i+1)*len(all)/n]
		g := grouping{Part{Since: &stretch[0].at, Until: &stretch[len(stretch)-1].at}, map[string]bool{}}
		for _, c := range stretch {
			g.among[c.seq] = true
		}
		moments = append(moments, g)
	}
	return tags, moments
}

func largest(values map[string]map[string]bool) int {
	n := 0
	for _, among := range values {
		n = max(n, len(among))
	}
	return n
}

// firstSetting is the setting whose rounds stand for a drafter: the chain, or
// else its smallest tree.
func (s *sums) firstSetting() (setting, bool) {
	for _, key := range slices.SortedFunc(maps.Keys(s.accept), compareSettings) {
		if sum(s.accept[key].macro.den) > 0 {
			return key, true
		}
	}
	return setting{}, false
}

// parts estimates accept_len_macro within each group, resampling the group's
// sequences alone.
func (s *sums) parts(ctx context.Context, groups []grouping, opt Options) ([]Part, error) {
	out := []Part{}
	key, ok := s.firstSetting()
	if !ok {
		return out, nil
	}
	macro := s.accept[key].macro
	for _, g := range groups {
		var at []int
		for i, seq := range s.seqs {
			if g.among[seq] && macro.den[i] > 0 {
				at = append(at, i)
			}
		}
		p := g.name
		p.Sequences = len(at)
		if len(at) > 0 {
			if err := bootstrap(ctx, len(at), opt, []question{macro.pick(at).ask(&p.AcceptLenMacro)}); err != nil {
				return nil, err
			}
		}
		out = append(out, p)
	}
	return out, nil
}

// partsName says of which rounds the parts of a run's drafters are.
func (run Run) partsName() string {
	for _, d := range run.Drafters {
		for _, a := range d.Acceptance {
			if a.AcceptLenMacro.Value != nil {
				return pick(a.Method == schemas.MethodChain, "the chain", "the drafter's smallest tree")
			}
		}
	}
	return "the chain"
}

// timeChart draws acceptance over the order in which sequences were captured.
func (run Run) timeChart() *chart {
	longest, top := 0, 1.0
	for _, d := range run.Drafters {
		longest = max(longest, len(d.OverTime))
		for _, p := range d.OverTime {
			for _, v := range []*float64{p.AcceptLenMacro.Value, p.AcceptLenMacro.High} {
				if v != nil {
					top = max(top, *v)
				}
			}
		}
	}
	if longest < 2 {
		return nil
	}
	c := &chart{W: chartWidth, H: chartHeight, Title: "Tokens a round over time"}
	ticks := nice(1, top, 5)
	a := newAxes(c, 46, 0.5, float64(longest)+0.5, ticks[0], ticks[len(ticks)-1])
	a.yTicks(ticks, plain, "tokens a round (macro, bonus counted)")
	for k := 1; k <= longest; k += (longest + 11) / 12 {
		a.xTick(float64(k), strconv.Itoa(k))
	}
	a.xTitle("sequences in the order of their capture, in equal parts")
	for i, d := range run.Drafters {
		var points []point
		for k, p := range d.OverTime {
			points = append(points, point{float64(k + 1), p.AcceptLenMacro, fmt.Sprintf("%s, %s: %s", d.Drafter, p.span(), withInterval(p.AcceptLenMacro, 3))})
		}
		a.series(i, points, false)
	}
	return c
}

func (p Part) span() string {
	if p.Since == nil {
		return p.Tag + " = " + p.Value
	}
	const clock = "2006-01-02 15:04:05"
	from, to := p.Since.Format(clock), p.Until.Format(clock)
	if from[:11] == to[:11] {
		to = to[11:]
	}
	return from + " to " + to
}

// partTable has a row a part and a column a drafter.
func (run Run) partTable(t table, first string, of func(Drafter) []Part) table {
	t.head, t.left = []string{first, "sequences"}, 1
	var rows int
	for _, d := range run.Drafters {
		t.head = append(t.head, d.Drafter)
		rows = max(rows, len(of(d)))
	}
	for i := range rows {
		row := []string{"", ""}
		most := 0
		for _, d := range run.Drafters {
			parts := of(d)
			if i >= len(parts) {
				row = append(row, none)
				continue
			}
			row[0], most = parts[i].span(), max(most, parts[i].Sequences)
			row = append(row, withInterval(parts[i].AcceptLenMacro, 2))
		}
		row[1] = count(int64(most))
		t.rows = append(t.rows, row)
	}
	return t
}

func (run Run) tagTable() table {
	return run.partTable(table{
		title: "Tokens a round by tag",
		note:  "accept_len_macro of " + run.partsName() + " over the sequences that have the tag, bonus token counted",
	}, "tag", func(d Drafter) []Part { return d.ByTag })
}

func (run Run) timeTable() table {
	return run.partTable(table{
		title: "Tokens a round over time",
		note:  "accept_len_macro of " + run.partsName() + ", sequences in the order of their capture; a change that all drafters share is the traffic's, one of a single drafter is its own",
	}, "captured", func(d Drafter) []Part { return d.OverTime })
}

// tagChart draws acceptance by tag: a group of rows a tag value, a mark and an
// interval a drafter.
func (run Run) tagChart() *chart {
	var names []string
	rows, top := 0, 1.0
	for _, d := range run.Drafters {
		for i, p := range d.ByTag {
			if i == len(names) {
				names = append(names, p.span())
			}
			for _, v := range []*float64{p.AcceptLenMacro.Value, p.AcceptLenMacro.High} {
				if v != nil {
					top = max(top, *v)
				}
			}
		}
		if len(d.ByTag) > 0 {
			rows++
		}
	}
	if len(names) == 0 {
		return nil
	}
	const rowHeight = 17.0
	c := &chart{W: chartWidth, H: 8 + float64(len(names))*(float64(rows)*rowHeight+24) + 46, Title: "Tokens a round by tag"}
	ticks := nice(1, top, 5)
	a := newAxes(c, 14, ticks[0], ticks[len(ticks)-1], 0, 1)
	a.top, a.right = 8, c.W-44
	for _, t := range ticks {
		c.Lines = append(c.Lines, segment{a.x(t), a.top, a.x(t), a.bottom, "grid"})
		a.xTick(t, plain(t))
	}
	a.xTitle("tokens a round, 95 % interval")
	y := a.top + 14
	for i, name := range names {
		c.Texts = append(c.Texts, label{2, y + 4, "start", "group", clip(name, 48)})
		y += 20
		for k, d := range run.Drafters {
			if len(d.ByTag) == 0 {
				continue
			}
			if p := d.ByTag[i]; p.AcceptLenMacro.Value != nil {
				e := p.AcceptLenMacro
				tip := fmt.Sprintf("%s, %s: %s, %s", d.Drafter, name, withInterval(e, 3), quantity(int64(p.Sequences), "sequence"))
				if e.Low != nil {
					c.Rects = append(c.Rects, rect{a.x(*e.Low), y - 3, max(a.x(*e.High)-a.x(*e.Low), 1), 6, "span " + seriesClass(k), tip})
				}
				c.Marks = append(c.Marks, shape{mark(k, a.x(*e.Value), y), seriesClass(k), tip})
				c.Texts = append(c.Texts, label{c.W - 2, y + 4, "end", "value", fixed(e.Value, 2)})
			}
			y += rowHeight
		}
		y += 4
	}
	return c
}

// clip shortens a name to at most n runes.
func clip(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}
