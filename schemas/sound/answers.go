package sound

import (
	"fmt"

	"github.com/draftscope/draftscope/schemas"
)

// judged is the fewest tokens of a reply by which answers are judged.
const judged = 8

// Kept is the share of a greedy reply that its target's answers must be, and of
// recorded answers that a head must give again: storage in 16 bits turns a
// near tie here and there.
const Kept = 0.75

// Greedy is K5 as far as it shows without the target: in a reply that was
// generated greedily, the answer after each token is the next token. It says
// what is wrong where another row's answers fit the reply instead; answers[p]
// is that after token p, or -1.
func Greedy(tokens, answers []int32, row schemas.Sequence) string {
	if row.Temperature != 0 || row.FinishReason != "stop" && row.FinishReason != "length" {
		return "" // given, or sampled
	}
	n := 0
	hits := map[int]int{}
	for t := max(2, int(row.PromptLen)); t < len(tokens); t++ {
		if answers[t-1] < 0 {
			continue
		}
		n++
		for _, by := range []int{-1, 0, 1} {
			if answers[t-1+by] == tokens[t] {
				hits[by]++
			}
		}
	}
	if n < judged || float64(hits[0]) >= Kept*float64(n) {
		return ""
	}
	for _, beside := range []struct {
		by    int
		words string
	}{{-1, "before"}, {1, "after"}} {
		if at := hits[beside.by]; at-hits[0] > max(2, n/50) && 2*at > n {
			return fmt.Sprintf("the answers are %d of the %d tokens of a greedy reply, those of the row %s %d: the rows of this capture are shifted", hits[0], n, beside.words, at)
		}
	}
	return ""
}

// Recorded are the ids of tokens, and the answers that they bring along.
func Recorded(tokens []schemas.Token) (ids, answers []int32) {
	ids, answers = make([]int32, len(tokens)), make([]int32, len(tokens))
	for i, t := range tokens {
		ids[i], answers[i] = t.TokenID, -1
		if t.TargetArgmax != nil {
			answers[i] = *t.TargetArgmax
		}
	}
	return ids, answers
}
