package sound

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

const hidden = 8

// text is n rows of states 0 and 2, of tokens 1, 2, 3 and so on.
func text(d schemas.DType, n int) schemas.Capture {
	c := schemas.Capture{Spec: schemas.CaptureSpec{Run: "r", Hidden: hidden, Layers: 2, States: []int{0, 2}, DType: d}, States: make([][]byte, 2)}
	for p := range n {
		c.Tokens = append(c.Tokens, schemas.Token{SeqID: "s", Pos: int32(p), TokenID: int32(p + 1), LossMask: p >= 4})
		for l := range c.States {
			for j := range hidden {
				c.States[l] = d.AppendBytes(c.States[l], []float32{float32((131*p+17*l+7*j)%251-125) / 64})
			}
		}
	}
	return c
}

func width(d schemas.DType) int { return hidden * d.Size() }

// row is the bytes of row r of the i-th state.
func row(c schemas.Capture, i, r int) []byte {
	w := width(c.Spec.DType)
	return c.States[i][r*w : (r+1)*w]
}

// cut takes rows lo..hi-1.
func cut(c schemas.Capture, lo, hi int) schemas.Capture {
	w := width(c.Spec.DType)
	out := schemas.Capture{Spec: c.Spec, Tokens: c.Tokens[lo:hi]}
	for _, s := range c.States {
		out.States = append(out.States, slices.Clone(s[lo*w:hi*w]))
	}
	return out
}

func profile(c schemas.Capture) Profile {
	p := Profile{}
	for i, state := range c.Spec.States {
		var rms []float64
		for r := range c.Tokens {
			rms = append(rms, float64(Norm(c.Spec.DType, row(c, i, r)))/math.Sqrt(hidden))
		}
		var s Sizes
		s.Add(rms)
		p[state], _ = s.Size()
	}
	return p
}

func TestWhatIsWrongWithAStateIsNamedHoweverItIsCut(t *testing.T) {
	retoken := func(c *schemas.Capture, token func(p int) int32) {
		for p := range c.Tokens {
			c.Tokens[p].TokenID = token(p)
		}
	}
	nan := []float32{float32(math.NaN())}
	for _, tt := range []struct {
		name  string
		spoil func(*schemas.Capture)
		want  string
	}{
		{"nothing", func(*schemas.Capture) {}, ""},
		{"NaN", func(c *schemas.Capture) { copy(row(*c, 1, 9)[4:], c.Spec.DType.AppendBytes(nil, nan)) }, "K1 state 2, row 9: NaN count 1, Inf count 0 in 1 rows"},
		{"a zero row", func(c *schemas.Capture) { clear(row(*c, 1, 9)) }, "K2 state 2, row 9: 1 of 40 rows are zero"},
		{"a zero row of minus zeros", func(c *schemas.Capture) {
			copy(row(*c, 1, 9), c.Spec.DType.AppendBytes(nil, slices.Repeat([]float32{float32(math.Copysign(0, -1))}, hidden)))
		}, "K2 state 2, row 9: 1 of 40 rows are zero"},
		{"a row twice", func(c *schemas.Capture) { copy(row(*c, 1, 16), row(*c, 1, 15)) }, "K2 state 2, row 16: 1 of 40 rows equal the row before"},
		{"a state that stands still", func(c *schemas.Capture) {
			for r := 1; r < 40; r++ {
				copy(row(*c, 1, r), row(*c, 1, 0))
			}
		}, "K2 state 2, row 1: 39 of 40 rows equal the row before"},
		{"an embedding twice", func(c *schemas.Capture) { copy(row(*c, 0, 16), row(*c, 0, 15)) }, "K2 state 0, row 16: 1 of 40 rows equal the row before"},
		{"an embedding twice, of one token", func(c *schemas.Capture) {
			copy(row(*c, 0, 16), row(*c, 0, 15))
			c.Tokens[16].TokenID = c.Tokens[15].TokenID
		}, ""},
		{"a text of one token", func(c *schemas.Capture) {
			retoken(c, func(int) int32 { return 5 })
			for r := 1; r < 40; r++ {
				copy(row(*c, 0, r), row(*c, 0, 0))
				copy(row(*c, 1, r), row(*c, 1, 0))
			}
		}, ""},
		{"padding before, with an embedding of zeros", func(c *schemas.Capture) {
			retoken(c, func(p int) int32 { return int32(max(p, 2)) })
			for r := range 3 {
				clear(row(*c, 0, r))
				copy(row(*c, 1, r), row(*c, 1, 0))
			}
		}, ""},
		{"a zero embedding in the reply", func(c *schemas.Capture) { clear(row(*c, 0, 9)) }, "K2 state 0, row 9: 1 of 40 rows are zero"},
		{"padding whose states are zero", func(c *schemas.Capture) { clear(row(*c, 1, 0)) }, "K2 state 2, row 0: 1 of 40 rows are zero"},
		{"twice as large", func(c *schemas.Capture) {
			vals := c.Spec.DType.AppendFloats(nil, c.States[1])
			for i := range vals {
				vals[i] *= 2
			}
			c.States[1] = c.Spec.DType.AppendBytes(nil, vals)
		}, "K7 state 2, row 0: rows of RMS 1.986, where this target has 0.9931: a ratio of 2;"},
	} {
		for _, d := range []schemas.DType{schemas.F32, schemas.BF16} {
			c := text(d, 40)
			sizes := profile(c)
			tt.spoil(&c)
			for _, step := range []int{1, 8, 40} {
				k := NewChecker(sizes)
				for lo := 0; lo < 40; lo += step {
					k.Add(cut(c, lo, min(lo+step, 40)), nil)
				}
				var found []string
				for _, f := range k.End() {
					found = append(found, f.Check+" "+f.String())
				}
				got := strings.Join(found, "; ")
				if !strings.HasPrefix(got, tt.want) || (got == "") != (tt.want == "") {
					t.Errorf("%s, %s, %d rows a record: %q, want %q", tt.name, d, step, got, tt.want)
				}
			}
		}
	}
}

func TestFewRowsHaveNoSize(t *testing.T) {
	long := text(schemas.F32, 40)
	short := cut(long, 0, 15)
	k := NewChecker(Profile{0: {1e3, 1e3, 1e3}, 2: {1e3, 1e3, 1e3}})
	k.Add(short, nil)
	if got := k.End(); got != nil {
		t.Errorf("15 rows, of which the first are unlike the others: %v", got)
	}
	k.Add(cut(long, 15, 40), nil)
	if got := k.End(); len(got) != 2 || got[0].Check != "K7" {
		t.Errorf("40 rows: %v", got)
	}
	if p := profile(short); p[0] != (Size{}) {
		t.Errorf("a profile of 11 rows: %v", p)
	}
}

func TestAGreedyReplyIsWhatItsTargetAnswered(t *testing.T) {
	ids := make([]int32, 40)
	for p := range ids {
		ids[p] = int32(7 * p % 41)
	}
	shifted := func(by int) []int32 { // answers of the row by rows on
		out := make([]int32, len(ids))
		for p := range out {
			if q := p + 1 + by; q < len(ids) {
				out[p] = ids[max(q, 0)]
			} else {
				out[p] = 0
			}
		}
		return out
	}
	odd := shifted(0)
	for p := 0; p < len(odd); p += 5 {
		odd[p] = 40 // near ties
	}
	other := make([]int32, len(ids))
	unknown := slices.Repeat([]int32{-1}, len(ids))
	greedy := schemas.Sequence{PromptLen: 10, FinishReason: "length"}
	given := schemas.Sequence{PromptLen: 10, FinishReason: "given"}
	sampled := schemas.Sequence{PromptLen: 10, FinishReason: "stop", Temperature: 1}
	for _, tt := range []struct {
		name    string
		answers []int32
		row     schemas.Sequence
		want    string
	}{
		{"its own", shifted(0), greedy, ""},
		{"its own but for near ties", odd, greedy, ""},
		{"a row late", shifted(-1), greedy, "those of the row after 30"},
		{"a row early", shifted(1), greedy, "those of the row before 30"},
		{"another target's", other, greedy, ""}, // the head tells
		{"none", unknown, greedy, ""},
		{"a row late, of a text that was given", shifted(-1), given, ""},
		{"a row late, of a text that was sampled", shifted(-1), sampled, ""},
	} {
		got := Greedy(ids, tt.answers, tt.row)
		if !strings.Contains(got, tt.want) || (got == "") != (tt.want == "") {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func BenchmarkChecker(b *testing.B) {
	c := text(schemas.BF16, 64)
	c.Spec.Hidden = 4096
	c.Spec.States = []int{0, 1, 2, 3, 4}
	var vals []float32
	for i := range 64 * 4096 {
		vals = append(vals, float32(i%251-125)/64)
	}
	raw := schemas.BF16.AppendBytes(nil, vals)
	c.States = [][]byte{raw, raw, raw, raw, raw}
	norms := make([][]float32, len(c.States))
	for i := range norms {
		for r := range c.Tokens {
			norms[i] = append(norms[i], Norm(schemas.BF16, row(c, i, r)))
		}
	}
	for _, given := range [][][]float32{nil, norms} { // a stage has none, a sink has them
		b.Run(fmt.Sprintf("norms given %t", given != nil), func(b *testing.B) {
			b.SetBytes(int64(5 * len(raw)))
			for b.Loop() {
				NewChecker(nil).Add(c, given)
			}
		})
	}
}
