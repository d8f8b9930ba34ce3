// Package similar compares two captures of the same token ids, state by state
// and row by row, as their sequences pass: it fills the table similarity and
// says where the two part.
package similar

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/schemas"
)

// Sequence is one captured sequence of one of the two runs.
type Sequence struct {
	ID     string
	Tokens []schemas.Token
	States map[int][]float32 // [rows*Hidden] by state
}

// Place is a row of a sequence.
type Place struct {
	SeqID string `json:"seq_id"`
	Pos   int    `json:"pos"`
}

// State sums up one state over all rows. Means are over rows whose norms are
// not zero.
type State struct {
	State      int     `json:"state"`
	Rows       int     `json:"rows"`
	Equal      int     `json:"equal"` // rows that are equal bit for bit
	MeanCosine float64 `json:"mean_cosine"`
	MinCosine  float64 `json:"min_cosine"`
	MeanRelL2  float64 `json:"mean_rel_l2"`
	MaxRelL2   float64 `json:"max_rel_l2"`
	MaxAbs     float64 `json:"max_abs"`
	// Worst is the row with the largest relative difference, First the first
	// in the order of the sequences that differs at all.
	Worst *Place `json:"worst,omitempty"`
	First *Place `json:"first,omitempty"`

	counted int
}

// Rows compares each row of width values of a with that of b: norms, largest
// difference, cosine and relative distance, the last two NULL where a norm that
// they divide by is 0.
type Rows func(a, b []float32, width int) ([]schemas.Similarity, error)

// Comparison is what two captures have in common and not.
type Comparison struct {
	RunA      string  `json:"run_a"`
	RunB      string  `json:"run_b"`
	Sequences int     `json:"sequences"` // in both, of the same ids
	OnlyA     int     `json:"only_a"`
	OnlyB     int     `json:"only_b"`
	Different []Place `json:"different_ids,omitempty"` // sequences whose ids differ, and from where on
	States    []State `json:"states"`
	Answers   int     `json:"answers"` // positions where both record target_argmax
	Agreeing  int     `json:"agreeing"`
	// Parting is the first position at which the two targets answer
	// differently.
	Parting *Place `json:"parting,omitempty"`

	hidden int
	rows   Rows
}

// New starts a comparison of two runs, by the names that they get in the
// table, whose states have some width and are compared by rows.
func New(a, b string, hidden int, rows Rows) *Comparison {
	return &Comparison{RunA: a, RunB: b, States: []State{}, hidden: hidden, rows: rows}
}

// Add compares one sequence of both runs and returns its rows of the table
// similarity, sorted by state and position. Of sequences whose ids differ, the
// common part before that is compared.
func (c *Comparison) Add(a, b Sequence) ([]schemas.Similarity, error) {
	n := min(len(a.Tokens), len(b.Tokens))
	for t := range n {
		if a.Tokens[t].TokenID != b.Tokens[t].TokenID {
			n = t
			break
		}
	}
	if n < max(len(a.Tokens), len(b.Tokens)) {
		c.Different = append(c.Different, Place{a.ID, n})
	}
	c.Sequences++
	for t := range n {
		x, y := a.Tokens[t].TargetArgmax, b.Tokens[t].TargetArgmax
		if x == nil || y == nil {
			continue
		}
		c.Answers++
		if *x == *y {
			c.Agreeing++
		} else if c.Parting == nil {
			c.Parting = &Place{a.ID, t}
		}
	}
	var rows []schemas.Similarity
	for _, state := range common(a.States, b.States) {
		va, vb := a.States[state], b.States[state]
		s := c.of(state)
		values := min(n, len(va)/c.hidden, len(vb)/c.hidden) * c.hidden
		compared, err := c.rows(va[:values], vb[:values], c.hidden)
		if err != nil {
			return nil, fmt.Errorf("comparing state %d of sequence %s: %w", state, a.ID, err)
		}
		for t, row := range compared {
			row.RunA, row.RunB, row.SeqID, row.Pos, row.State = c.RunA, c.RunB, a.ID, int32(t), int32(state)
			s.add(row)
			rows = append(rows, row)
		}
	}
	return rows, nil
}

// common lists the states that both have, ascending.
func common(a, b map[int][]float32) []int {
	var out []int
	for state := range a {
		if _, ok := b[state]; ok {
			out = append(out, state)
		}
	}
	slices.Sort(out)
	return out
}

// of is the summary of a state.
func (c *Comparison) of(state int) *State {
	i, found := slices.BinarySearchFunc(c.States, state, func(s State, n int) int { return s.State - n })
	if !found {
		c.States = slices.Insert(c.States, i, State{State: state, MinCosine: 1})
	}
	return &c.States[i]
}

func (s *State) add(r schemas.Similarity) {
	place := Place{r.SeqID, int(r.Pos)}
	s.Rows++
	if r.MaxAbs == 0 {
		s.Equal++
	} else if s.First == nil {
		s.First = &place
	}
	s.MaxAbs = math.Max(s.MaxAbs, float64(r.MaxAbs))
	if r.RelL2 != nil && float64(*r.RelL2) > s.MaxRelL2 {
		s.MaxRelL2, s.Worst = float64(*r.RelL2), &place
	}
	if r.Cosine == nil || r.RelL2 == nil {
		return
	}
	s.counted++
	n := float64(s.counted)
	s.MeanCosine += (float64(*r.Cosine) - s.MeanCosine) / n
	s.MeanRelL2 += (float64(*r.RelL2) - s.MeanRelL2) / n
	s.MinCosine = math.Min(s.MinCosine, float64(*r.Cosine))
}

// String says it for people.
func (c *Comparison) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s against %s: %d sequences of the same ids", c.RunA, c.RunB, c.Sequences-len(c.Different))
	if len(c.Different) > 0 {
		fmt.Fprintf(&b, ", %d whose ids differ (%s from token %d on) and are compared before that", len(c.Different), c.Different[0].SeqID, c.Different[0].Pos)
	}
	if c.OnlyA+c.OnlyB > 0 {
		fmt.Fprintf(&b, ", %d only in the first, %d only in the second", c.OnlyA, c.OnlyB)
	}
	b.WriteByte('\n')
	switch {
	case c.Answers == 0:
		b.WriteString("the two do not both record the target's answers\n")
	case c.Parting == nil:
		fmt.Fprintf(&b, "the targets answer alike at all %d positions\n", c.Answers)
	default:
		fmt.Fprintf(&b, "the targets answer alike at %d of %d positions; they part first at %s, position %d\n", c.Agreeing, c.Answers, c.Parting.SeqID, c.Parting.Pos)
	}
	fmt.Fprintf(&b, "%5s  %8s  %8s  %11s  %10s  %9s  %9s  %9s  %s\n", "state", "rows", "equal", "mean cosine", "min cosine", "mean rel", "max rel", "max abs", "differs first / most at")
	for _, s := range c.States {
		where := "nowhere"
		if s.First != nil {
			where = fmt.Sprintf("%s %d", s.First.SeqID, s.First.Pos)
		}
		if s.Worst != nil {
			where += fmt.Sprintf(" / %s %d", s.Worst.SeqID, s.Worst.Pos)
		}
		fmt.Fprintf(&b, "%5d  %8d  %8d  %11.7f  %10.7f  %9.3g  %9.3g  %9.3g  %s\n", s.State, s.Rows, s.Equal, s.MeanCosine, s.MinCosine, s.MeanRelL2, s.MaxRelL2, s.MaxAbs, where)
	}
	return b.String()
}
