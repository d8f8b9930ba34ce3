package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
)

// How much of the table similarity a report shows.
const (
	heatParts  = 32 // stretches of positions
	heatStates = 32
	heatPairs  = 4
)

// Similarity compares two captures of the same ids, from the table of this
// name, which "draftscope compare" fills.
type Similarity struct {
	RunA   string            `json:"run_a"`
	RunB   string            `json:"run_b"`
	States []SimilarityState `json:"states"`
}

// SimilarityState is one state over all rows, and by stretch of positions.
type SimilarityState struct {
	State      int64          `json:"state"`
	Rows       int64          `json:"rows"`
	MeanCosine *float64       `json:"mean_cosine"`
	MinCosine  *float64       `json:"min_cosine"`
	MeanRelL2  *float64       `json:"mean_rel_l2"`
	Cells      []SimilarCells `json:"cells"`
}

// SimilarCells are the rows of one stretch of positions, both ends counted.
type SimilarCells struct {
	FirstPos   int64    `json:"first_pos"`
	LastPos    int64    `json:"last_pos"`
	Rows       int64    `json:"rows"`
	MeanCosine *float64 `json:"mean_cosine"`
	MinCosine  *float64 `json:"min_cosine"`

	part int64
}

// similarities reads the table similarity; with run only that run's pairs.
func (l *loader) similarities(run string) []Similarity {
	out := []Similarity{}
	l.each(fmt.Sprintf(`SELECT run_a, run_b, state, part, first_pos, last_pos, rows, mean_cosine, min_cosine, mean_rel_l2
		FROM similarity_map(%d) ORDER BY run_a, run_b, state, part`, heatParts), func(r record) {
		if run != "" && r.text(0) != run && r.text(1) != run {
			return
		}
		if n := len(out); n == 0 || out[n-1].RunA != r.text(0) || out[n-1].RunB != r.text(1) {
			out = append(out, Similarity{RunA: r.text(0), RunB: r.text(1)})
		}
		p := &out[len(out)-1]
		if n := len(p.States); n == 0 || p.States[n-1].State != r.int(2) {
			p.States = append(p.States, SimilarityState{State: r.int(2)})
		}
		s := &p.States[len(p.States)-1]
		c := SimilarCells{FirstPos: r.int(4), LastPos: r.int(5), Rows: r.int(6), MeanCosine: r.maybe(7), MinCosine: r.maybe(8), part: r.int(3)}
		s.Cells = append(s.Cells, c)
		s.MeanCosine, s.MeanRelL2 = pool(s.MeanCosine, s.Rows, c.MeanCosine, c.Rows), pool(s.MeanRelL2, s.Rows, r.maybe(9), c.Rows)
		if c.MinCosine != nil && (s.MinCosine == nil || *c.MinCosine < *s.MinCosine) {
			s.MinCosine = c.MinCosine
		}
		s.Rows += c.Rows
	})
	return out
}

// pool is the mean of n values of mean a and m of mean b.
func pool(a *float64, n int64, b *float64, m int64) *float64 {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	return number((*a*float64(n) + *b*float64(m)) / float64(n+m))
}

// heatSteps are the distances 1 − cosine at which the colour changes.
var heatSteps = []float64{1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1}

func heatClass(cosine float64) string {
	i, _ := slices.BinarySearch(heatSteps, 1-cosine)
	return "h" + strconv.Itoa(i)
}

// heatKey is the legend of the colours.
func heatKey() []facet {
	var out []facet
	for i := range len(heatSteps) + 1 {
		name := fmt.Sprintf("up to %.0e", heatSteps[min(i, len(heatSteps)-1)])
		if i == len(heatSteps) {
			name = fmt.Sprintf("above %.0e", heatSteps[i-1])
		}
		out = append(out, facet{Name: name, Class: "h" + strconv.Itoa(i), Mark: "M-11,-6L11,-6L11,6L-11,6Z"})
	}
	return out
}

// heat draws a pair's cells: a row a state, the last on top, a column a
// stretch of positions.
func (p Similarity) heat() *chart {
	states := p.shown()
	var columns, last int64
	for _, s := range states {
		for _, c := range s.Cells {
			columns, last = max(columns, c.part+1), max(last, c.LastPos)
		}
	}
	if columns == 0 {
		return nil
	}
	high := min(26, 320/float64(len(states)))
	c := &chart{W: chartWidth, H: 10 + high*float64(len(states)) + 46, Title: fmt.Sprintf("Cosine of %s and %s by state and position", p.RunA, p.RunB)}
	a := newAxes(c, 46, 0, float64(columns), 0, float64(len(states)))
	a.top = 10
	width := (a.right - a.left) / float64(columns)
	for i, s := range states {
		y := a.bottom - high*float64(i+1)
		if len(states) <= 16 || i%2 == 0 {
			c.Texts = append(c.Texts, label{a.left - 7, y + high/2 + 4, "end", "tick", strconv.FormatInt(s.State, 10)})
		}
		for _, cell := range s.Cells {
			class, says := "open", "no cosine of zero vectors"
			if cell.MeanCosine != nil {
				class, says = heatClass(*cell.MeanCosine), fixed(cell.MeanCosine, 7)
			}
			c.Rects = append(c.Rects, rect{
				a.left + width*float64(cell.part), y, math.Max(width-1, 0.5), high - 1, class,
				fmt.Sprintf("state %d, %s: %s", s.State, between(cell.FirstPos, cell.LastPos), says),
			})
		}
	}
	for k := range int64(5) {
		at := float64(columns) * float64(k) / 4
		a.xTick(at, strconv.FormatInt((last+1)*k/4, 10))
	}
	a.xTitle("position in the sequence (rows: state)")
	return c
}

func between(first, last int64) string {
	if first == last {
		return fmt.Sprintf("position %d", first)
	}
	return fmt.Sprintf("positions %d–%d", first, last)
}

// shown are at most [heatStates] of a pair's states, evenly over all, the
// first and the last among them.
func (p Similarity) shown() []SimilarityState {
	n := len(p.States)
	if n <= heatStates {
		return p.States
	}
	var out []SimilarityState
	for i := range heatStates {
		out = append(out, p.States[i*(n-1)/(heatStates-1)])
	}
	return out
}

// table lists the pair's states.
func (p Similarity) table() table {
	t := table{
		title: p.RunA + " against " + p.RunB,
		note:  "cosine of the two captures' states, token by token; the colour is 1 − mean cosine",
		head:  []string{"state", "rows", "mean cosine", "least", "relative L2", "least cosine at"}, left: 0,
	}
	for _, s := range p.shown() {
		where := "–"
		for _, c := range s.Cells {
			if c.MinCosine != nil && s.MinCosine != nil && *c.MinCosine == *s.MinCosine {
				where = between(c.FirstPos, c.LastPos)
				break
			}
		}
		rel := none
		if s.MeanRelL2 != nil {
			rel = fmt.Sprintf("%.2e", *s.MeanRelL2)
		}
		t.rows = append(t.rows, []string{strconv.FormatInt(s.State, 10), count(s.Rows), fixed(s.MeanCosine, 7), fixed(s.MinCosine, 7), rel, where})
	}
	return t
}
