// Package querytest writes small datasets for tests, straight from rows, in
// the layout that the writer of a dataset keeps.
package querytest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/parquet-go/parquet-go"

	"github.com/draftscope/draftscope/schemas"
)

// Write writes rows as one Parquet file of the dataset dir. path is relative,
// such as "slots/run=r/drafter=good/part-0.parquet".
func Write[T any](t testing.TB, dir, path string, rows ...T) string {
	t.Helper()
	path = filepath.Join(dir, filepath.FromSlash(path))
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := parquet.WriteFile(path, rows); err != nil {
		t.Fatal(err)
	}
	return path
}

// Slots writes one block a list of hits: -1 is unscored. Every slot's label
// is 1, its data token too; a miss drafts 2, and its label has rank 9.
func Slots(t testing.TB, dir, run, drafter, seq string, blocks ...[]int) {
	t.Helper()
	var rows []schemas.Slot
	for a, hits := range blocks {
		for k, hit := range hits {
			s := schemas.Slot{SeqID: seq, Anchor: int32(a), Slot: int32(k + 1), DraftToken: 2, LossMask: new(hit >= 0)}
			if hit == 1 {
				s.DraftToken = 1
			}
			if hit >= 0 {
				s.Label, s.DataToken, s.Hit = new(int32(1)), new(int32(1)), new(hit == 1)
				s.Rank, s.CE = new(int32(9*(1-hit))), new(float32(0.5))
			}
			rows = append(rows, s)
		}
	}
	Write(t, dir, fmt.Sprintf("slots/run=%s/drafter=%s/%s.parquet", run, drafter, seq), rows...)
}

// Rounds writes the chain rounds of one sequence by their acceptance lengths;
// a negative one is truncated.
func Rounds(t testing.TB, dir, run, drafter, method string, budget int, seq string, lens ...int) {
	t.Helper()
	var rows []schemas.Round
	for i, n := range lens {
		m := max(n, -n)
		rows = append(rows, schemas.Round{
			SeqID: seq, Method: method, Budget: int32(budget), Round: int32(i), Anchor: int32(10 + i),
			Proposed: int32(budget), Accepted: int32(m - 1), AcceptLen: int32(m), Truncated: n < 0,
		})
	}
	Write(t, dir, fmt.Sprintf("rounds/run=%s/drafter=%s/%s-%s-%d.parquet", run, drafter, seq, method, budget), rows...)
}

// Sequence writes a sequence and its tokens: prompt tokens of mask 0, then
// generated ones of mask 1. The target's argmax is the next token except at
// the positions in wrong.
func Sequence(t testing.TB, dir, run, seq string, prompt int, tokens []int32, tags map[string]string, wrong ...int32) {
	t.Helper()
	Write(t, dir, fmt.Sprintf("sequences/run=%s/%s.parquet", run, seq), schemas.Sequence{
		SeqID: seq, PromptLen: int32(prompt), Length: int32(len(tokens)), FinishReason: "stop",
		Tags: tags, CreatedAt: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	})
	rows := make([]schemas.Token, len(tokens))
	for i, id := range tokens {
		rows[i] = schemas.Token{SeqID: seq, Pos: int32(i), TokenID: id, LossMask: i >= prompt, Role: "assistant"}
		next := int32(-7)
		if i+1 < len(tokens) {
			next = tokens[i+1]
			rows[i].TargetLogprob = new(float32(-0.25))
		}
		for _, w := range wrong {
			if int(w) == i {
				next = -9
			}
		}
		rows[i].TargetArgmax = &next
	}
	Write(t, dir, fmt.Sprintf("tokens/run=%s/%s.parquet", run, seq), rows...)
}

// Drafter says how good a random drafter is.
type Drafter struct {
	Name  string
	Skill float64 // probability of a hit at slot 1
	Decay float64 // factor from slot to slot
}

// Random writes a run of n sequences with random lengths and these drafters,
// blocks of the given size drafted at every anchor, chain rounds and trees of
// two budgets, always the same for one seed. Slots at the end of a sequence
// are unscored, and the last round of some sequences is truncated.
func Random(t testing.TB, dir, run string, seed uint64, n, block int, drafters ...Drafter) (slots map[string][]schemas.Slot, rounds map[string][]schemas.Round) {
	t.Helper()
	slots, rounds = make(map[string][]schemas.Slot), make(map[string][]schemas.Round)
	for i := range n {
		seq := fmt.Sprintf("p%04d", i)
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		length := 20 + rng.IntN(40)
		tokens := make([]int32, length)
		for j := range tokens {
			tokens[j] = rng.Int32N(1000)
		}
		Sequence(t, dir, run, seq, 8, tokens, map[string]string{"task": []string{"code", "prose"}[i%2]})
		hardness := 0.6 + 0.4*rng.Float64()
		for d, dr := range drafters {
			rng := rand.New(rand.NewPCG(seed^uint64(d+1)<<32, uint64(i)))
			for a := 8; a < length-1; a++ {
				slots[dr.Name] = append(slots[dr.Name], randomBlock(rng, seq, a, block, tokens, hardness*dr.Skill, dr.Decay)...)
			}
			for _, budget := range []int{block - 1, 8, 64} {
				method := schemas.MethodDDTree
				boost := 1 + float64(budget)/256
				if budget == block-1 {
					method, boost = schemas.MethodChain, 1
				}
				for a, r := 8, 0; a < length-1; r++ {
					m := 0
					for p := min(0.97, hardness*dr.Skill*boost); m < block-1 && rng.Float64() < p; p *= dr.Decay {
						m++
					}
					truncated := a+m+1 >= length-1
					rounds[dr.Name] = append(rounds[dr.Name], schemas.Round{
						SeqID: seq, Method: method, Budget: int32(budget), Round: int32(r), Anchor: int32(a),
						Proposed: int32(budget), Accepted: int32(m), AcceptLen: int32(m + 1), Truncated: truncated,
					})
					a += m + 1
				}
			}
		}
	}
	for _, dr := range drafters {
		Write(t, dir, fmt.Sprintf("slots/run=%s/drafter=%s/part-0.parquet", run, dr.Name), slots[dr.Name]...)
		Write(t, dir, fmt.Sprintf("rounds/run=%s/drafter=%s/part-0.parquet", run, dr.Name), rounds[dr.Name]...)
	}
	return slots, rounds
}

func randomBlock(rng *rand.Rand, seq string, anchor, block int, tokens []int32, p, decay float64) []schemas.Slot {
	rows := make([]schemas.Slot, 0, block-1)
	for k := 1; k < block; k++ {
		s := schemas.Slot{SeqID: seq, Anchor: int32(anchor), Slot: int32(k), DraftToken: -1, DraftLogprob: -1}
		hit, u := rng.Float64() < p, rng.Float64()
		rank := rng.Int32N(20)
		p *= decay
		if anchor+k < len(tokens) {
			label := tokens[anchor+k]
			s.Label, s.DataToken, s.LossMask, s.Hit = &label, &label, new(true), &hit
			if u < 0.1 { // sampled text: the data token is not the argmax
				s.DataToken = new(label + 1)
			}
			if hit {
				s.DraftToken, rank = label, 0
			}
			if rank < 16 {
				s.Rank = &rank
			}
			s.CE = new(float32(math.Abs(rng.NormFloat64()) * (1.5 - p)))
			if seq != "p0001" { // one sequence was scored without the extra losses
				s.KL, s.RKL, s.JSD, s.TV = new(float32(u)), new(float32(u*2)), new(float32(u/3)), new(float32(u))
			}
		}
		rows = append(rows, s)
	}
	return rows
}
