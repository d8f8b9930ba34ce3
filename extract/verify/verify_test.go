package verify

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

// tiny is a clean sequence of n tokens and width 8, with the values of the
// fixture "tiny".
func tiny(n int) Sequence {
	q := Sequence{ID: "s0", Length: n, Hidden: 8, Recorded: []int{1, 2, 3, 4}, Layers: 4, Vocab: 32, States: map[int][]float32{}}
	for p := range n {
		q.Tokens = append(q.Tokens, schemas.Token{SeqID: "s0", Pos: int32(p), TokenID: int32(p % 32), LossMask: p >= 7 && p <= 10 || p >= 14})
	}
	for l, state := range q.Recorded {
		for p := range n {
			for j := range 8 {
				q.States[state] = append(q.States[state], float32((131*p+17*l+7*j)%251-125)/64)
			}
		}
	}
	return q
}

func TestACleanSequenceHasNoFault(t *testing.T) {
	if got := tiny(18).Check(); len(got) > 0 {
		t.Error(got)
	}
}

func TestEveryFaultIsNamedByRowStateAndRule(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for _, tt := range []struct {
		name  string
		spoil func(*Sequence)
		n     int
		want  string
	}{
		{"a NaN at row 2", func(q *Sequence) { q.States[2][2*8+3] = nan }, 18, "sample s0, row 2, state 2, K1: NaN count 1, Inf count 0"},
		{"an Inf past a chunk", func(q *Sequence) { q.States[1][300*8] = inf }, 512, "row 300, state 1, K1: NaN count 0, Inf count 1"},
		{"an Inf in the prompt", func(q *Sequence) { q.States[3][8] = -inf }, 18, "row 1, state 3, K1: NaN count 0, Inf count 1"},
		{"a dead row", func(q *Sequence) { clear(q.States[4][5*8 : 6*8]) }, 18, "row 5, state 4, K2: 1 of 18 rows are zero"},
		{"a row twice", func(q *Sequence) { copy(q.States[4][5*8:6*8], q.States[4][4*8:5*8]) }, 18, "row 5, state 4, K2: 1 of 18 rows equal the row before"},
		{"the last row missing", func(q *Sequence) { q.States[1] = q.States[1][:17*8] }, 18, "state 1, K3: 17 rows for 18 tokens: last row missing"},
		{"the first rows missing", func(q *Sequence) { q.States[1] = q.States[1][7*8:] }, 18, "K3: 11 rows for 18 tokens: first 7 rows missing (prefix cache?)"},
		{"a token missing", func(q *Sequence) { q.Length = 19 }, 18, "K3: 18 tokens of a sequence of 19"},
		{"a position twice", func(q *Sequence) { q.Tokens[4].Pos = 3 }, 18, "row 4, K3: position 3 where 4 is due"},
		{"a state missing", func(q *Sequence) { delete(q.States, 2) }, 18, "state 2, K6: promised"},
		{"states out of order", func(q *Sequence) { q.Recorded = []int{1, 3, 2, 4} }, 18, "K6: the manifest lists"},
		{"nothing supervised", func(q *Sequence) { masks(q, func(int) bool { return false }) }, 18, "K9 (warning): no token"},
		{"only token 0 supervised", func(q *Sequence) { masks(q, func(t int) bool { return t == 0 }) }, 18, "K9 (warning): no token"},
		{"all supervised", func(q *Sequence) { masks(q, func(int) bool { return true }) }, 18, "K9 (warning): every token"},
		{"a token of another vocabulary", func(q *Sequence) { q.Tokens[9].TokenID = 32 }, 18, "row 9, K11: token 32 is outside the vocabulary of 32"},
		{"an answer of another vocabulary", func(q *Sequence) { q.Tokens[9].TargetArgmax = new(int32(-1)) }, 18, "row 9, K11: target_argmax -1"},
	} {
		q := tiny(tt.n)
		tt.spoil(&q)
		got := q.Check()
		if len(got) != 1 || !strings.Contains(got[0].String(), tt.want) {
			t.Errorf("%s: %v, want one with %q", tt.name, got, tt.want)
		}
	}
}

func masks(q *Sequence, at func(int) bool) {
	for t := range q.Tokens {
		q.Tokens[t].LossMask = at(t)
	}
}

func TestAnEmbeddingMayRepeatWithItsToken(t *testing.T) {
	q := tiny(18)
	q.States[0], q.Recorded = slices.Clone(q.States[1]), []int{0, 1, 2, 3, 4}
	copy(q.States[0][5*8:6*8], q.States[0][4*8:5*8])
	q.Tokens[5].TokenID = q.Tokens[4].TokenID
	if got := q.Check(); len(got) > 0 {
		t.Error(got)
	}
}

func TestVocabularyMapsAreCheckedByForm(t *testing.T) {
	offsets, absolutes, marks := make([]int64, 16), make([]int64, 16), make([]int64, 32)
	for d := range offsets {
		offsets[d], absolutes[d] = int64(d), int64(2*d) // draft d stands for 2d
		marks[2*d] = 1
	}
	change := func(of []int64, d int, v int64) []int64 {
		out := slices.Clone(of)
		out[d] = v
		return out
	}
	fewer := slices.Clone(marks)
	fewer[30] = 0
	for _, tt := range []struct {
		name          string
		d2t           []int64
		t2d           []int64
		draft, target int
		want          string
		row           int
	}{
		{"offsets", offsets, marks, 16, 32, "", -1},
		{"offsets without t2d", offsets, nil, 16, 32, "", -1},
		{"zeros with a full vocabulary", make([]int64, 32), nil, 32, 32, "", -1},
		{"absolute", absolutes, marks, 16, 32, "it holds tokens, where offsets belong", 11},
		{"0, 1, 2", []int64{0, 1, 2, 3}, []int64{1, 1, 1, 1, 0, 0, 0, 0}, 4, 8, "offsets belong", 1},
		{"two drafts to one target", change(offsets, 3, 1), marks, 16, 32, "draft tokens 2 and 3 stand for the same token 4", 3},
		{"past the target", change(offsets, 15, 40), marks, 16, 32, "stands for 55, outside", 15},
		{"t2d with 15 ones", offsets, fewer, 16, 32, "t2d marks 15 tokens, the draft vocabulary has 16", -1},
		{"a head 15 wide", offsets, marks, 15, 32, "d2t has 16 entries, the draft head 15 rows", -1},
		{"a short t2d", offsets, marks[:31], 16, 32, "t2d has 31 entries", -1},
	} {
		if row, got := VocabMap(tt.d2t, tt.t2d, tt.draft, tt.target); row != tt.row || got != tt.want && (tt.want == "" || !strings.Contains(got, tt.want)) {
			t.Errorf("%s: row %d, %q, want row %d, %q", tt.name, row, got, tt.row, tt.want)
		}
	}
}
