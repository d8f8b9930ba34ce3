// Package verify says what is wrong with a captured sequence before anything
// is computed with it: values that are not finite (K1), states that are dead
// or repeat themselves (K2), rows that do not fit together (K3), states that
// are not those of the manifest (K6), masks that train nothing (K9), and
// tokens of another vocabulary (K11). It repairs nothing.
package verify

import (
	"fmt"
	"math"
	"slices"

	"github.com/draftscope/draftscope/schemas"
	"github.com/draftscope/draftscope/schemas/sound"
)

// Fault is one thing that is wrong. Row and State are -1 where it concerns no
// single one.
type Fault struct {
	File    string `json:"file,omitempty"`
	Sample  string `json:"sample,omitempty"`
	Row     int    `json:"row"`
	State   int    `json:"state"`
	Rule    string `json:"rule"`
	Value   string `json:"value"`
	Warning bool   `json:"warning,omitempty"` // odd, and may be meant
}

// String is the fault on one line: file, sample, row, state, rule, value.
func (f Fault) String() string {
	var s string
	add := func(format string, a ...any) {
		if s != "" {
			s += ", "
		}
		s += fmt.Sprintf(format, a...)
	}
	if f.File != "" {
		add("%s", f.File)
	}
	if f.Sample != "" {
		add("sample %s", f.Sample)
	}
	if f.Row >= 0 {
		add("row %d", f.Row)
	}
	if f.State >= 0 {
		add("state %d", f.State)
	}
	rule := f.Rule
	if f.Warning {
		rule += " (warning)"
	}
	add("%s: %s", rule, f.Value)
	return s
}

// Sequence is a captured sequence whole.
type Sequence struct {
	ID     string
	Length int // as its own record says; -1 where there is none
	Tokens []schemas.Token
	// States holds [rows*Hidden] values by the number of the state.
	States map[int][]float32
	Hidden int
	// Recorded and Layers are what the manifest promises.
	Recorded []int
	Layers   int
	Vocab    int // 0 where it is not known
}

// Check lists everything that is wrong with a sequence, in the order of the
// rules.
func (q Sequence) Check() []Fault {
	c := &checker{Sequence: q}
	c.rows()
	c.manifest()
	for _, state := range slices.Sorted(keys(q.States)) {
		c.state(state, q.States[state])
	}
	c.mask()
	c.vocabulary()
	slices.SortStableFunc(c.faults, func(a, b Fault) int { return number(a.Rule) - number(b.Rule) })
	return c.faults
}

type checker struct {
	Sequence
	faults []Fault
}

func (c *checker) add(row, state int, rule, format string, a ...any) {
	c.faults = append(c.faults, Fault{Sample: c.ID, Row: row, State: state, Rule: rule, Value: fmt.Sprintf(format, a...)})
}

func (c *checker) warn(rule, format string, a ...any) {
	c.add(-1, -1, rule, format, a...)
	c.faults[len(c.faults)-1].Warning = true
}

// rows is K3: tokens = rows of every state = length, at consecutive positions.
func (c *checker) rows() {
	n := len(c.Tokens)
	if c.Length >= 0 && c.Length != n {
		c.add(-1, -1, "K3", "%d tokens of a sequence of %d", n, c.Length)
	}
	for i, t := range c.Tokens {
		if int(t.Pos) != i {
			c.add(i, -1, "K3", "position %d where %d is due", t.Pos, i)
			break
		}
	}
	for _, state := range slices.Sorted(keys(c.States)) {
		vals := c.States[state]
		have := len(vals) / max(c.Hidden, 1)
		switch {
		case len(vals)%max(c.Hidden, 1) != 0:
			c.add(-1, state, "K3", "%d values are no whole rows of %d", len(vals), c.Hidden)
		case have == n-1:
			c.add(n-1, state, "K3", "%d rows for %d tokens: last row missing", have, n)
		case have < n:
			c.add(-1, state, "K3", "%d rows for %d tokens: first %d rows missing (prefix cache?)", have, n, n-have)
		case have > n:
			c.add(-1, state, "K3", "%d rows for %d tokens", have, n)
		}
	}
}

// manifest is K6: the states are those that were promised.
func (c *checker) manifest() {
	for i, state := range c.Recorded {
		if state < 0 || c.Layers > 0 && state > c.Layers || i > 0 && state <= c.Recorded[i-1] {
			c.add(-1, state, "K6", "the manifest lists the states %v of a target of %d layers", c.Recorded, c.Layers)
			return
		}
		if _, ok := c.States[state]; !ok {
			c.add(-1, state, "K6", "promised by the manifest and not there")
		}
	}
}

// state is K1 and K2 over every row of one state.
func (c *checker) state(state int, vals []float32) {
	for _, f := range Rows(vals, c.Hidden, May(state, c.Tokens)) {
		f.Sample, f.State = c.ID, state
		c.faults = append(c.faults, f)
	}
}

// May says of each row of a state whether it may be zero, and whether it may
// equal the row before.
func May(state int, tokens []schemas.Token) func(row int) (zero, same bool) {
	return func(row int) (zero, same bool) {
		if row >= len(tokens) {
			return false, false
		}
		return sound.MayBeZero(state, tokens[row]), row > 0 && sound.MayRepeat(tokens[row-1], tokens[row])
	}
}

// Rows checks rows of one state: not finite (K1), all zero, or bit-equal to
// the row before (K2) where may does not allow that. One fault a kind names the
// first row and how many there are.
func Rows(vals []float32, width int, may func(row int) (zero, same bool)) []Fault {
	var out []Fault
	if width < 1 {
		return nil
	}
	var nan, inf, badRows, firstBad, firstNaN, firstInf int
	var alive sound.Alive
	for row := range len(vals) / width {
		r := vals[row*width : (row+1)*width]
		n, i := 0, 0
		dead := true
		for _, v := range r {
			switch {
			case v != v:
				n++
			case math.IsInf(float64(v), 0):
				i++
			}
			dead = dead && v == 0
		}
		if n+i > 0 {
			if badRows == 0 {
				firstBad, firstNaN, firstInf = row, n, i
			}
			badRows++
			nan, inf = nan+n, inf+i
			continue
		}
		mayZero, mayRepeat := may(row)
		alive.Add(row, dead && !mayZero, !dead && !mayRepeat && row > 0 && slices.Equal(r, vals[(row-1)*width:row*width]))
	}
	if badRows > 0 {
		out = append(out, Fault{Row: firstBad, State: -1, Rule: "K1", Value: fmt.Sprintf("NaN count %d, Inf count %d; in all %d NaN and %d Inf in %d rows", firstNaN, firstInf, nan, inf, badRows)})
	}
	for _, f := range alive.Faults(len(vals) / width) {
		out = append(out, Fault{Row: f.Row, State: -1, Rule: f.Check, Value: f.Detail})
	}
	return out
}

// Idle is what is wrong with a sequence that trains nothing.
const Idle = "no token is supervised"

// mask is K9: a sequence that trains nothing, or everything.
func (c *checker) mask() {
	on := 0
	for t, tok := range c.Tokens {
		if tok.LossMask && t > 0 { // token 0 is never a label
			on++
		}
	}
	switch {
	case on == 0:
		c.warn("K9", Idle)
	case on >= len(c.Tokens)-1 && len(c.Tokens) > 1 && c.Tokens[0].LossMask:
		c.warn("K9", "every token is supervised, the prompt too")
	}
}

// vocabulary is K11, as far as it can be seen here.
func (c *checker) vocabulary() {
	outside := func(id int32) bool { return id < 0 || c.Vocab > 0 && int(id) >= c.Vocab }
	for t, tok := range c.Tokens {
		if outside(tok.TokenID) {
			c.add(t, -1, "K11", "token %d is outside the vocabulary%s", tok.TokenID, c.of())
			return
		}
		if tok.TargetArgmax != nil && outside(*tok.TargetArgmax) {
			c.add(t, -1, "K11", "target_argmax %d is outside the vocabulary%s", *tok.TargetArgmax, c.of())
			return
		}
	}
}

func (c *checker) of() string {
	if c.Vocab == 0 {
		return ""
	}
	return fmt.Sprintf(" of %d", c.Vocab)
}

func keys(m map[int][]float32) func(func(int) bool) {
	return func(yield func(int) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// number is the number of a rule, for sorting.
func number(rule string) int {
	n := 0
	for _, r := range rule {
		if r >= '0' && r <= '9' {
			n = 10*n + int(r-'0')
		}
	}
	return n
}
