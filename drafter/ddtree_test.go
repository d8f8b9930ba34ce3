package drafter_test

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/drafter"
)

func TestTreesEqualTheReferenceImplementation(t *testing.T) {
	var vectors []struct {
		Depth    int         `json:"depth"`
		Budget   int         `json:"budget"`
		IDs      [][]int32   `json:"topk_ids"`
		Logprobs [][]float32 `json:"topk_logprobs"`
		Tokens   []int32     `json:"node_token_ids"`
		Depths   []int32     `json:"node_depths"`
		Parents  []int32     `json:"parents"`
	}
	if err := json.Unmarshal(demotest.Read(t, "ddtree_vectors.json"), &vectors); err != nil {
		t.Fatal(err)
	}
	if len(vectors) != 6 {
		t.Fatalf("%d trees, want 6", len(vectors))
	}
	for _, v := range vectors {
		c := drafter.Candidates{Depth: v.Depth, K: len(v.IDs[0])}
		for d := range v.Depth {
			c.IDs = append(c.IDs, v.IDs[d]...)
			c.Logprobs = append(c.Logprobs, v.Logprobs[d]...)
		}
		tree := drafter.DDTree(c, v.Budget)
		if diff := cmp.Diff(v.Tokens, tree.Tokens[1:]); diff != "" {
			t.Errorf("budget %d: tokens (-reference +ours):\n%s", v.Budget, diff)
		}
		if diff := cmp.Diff(v.Depths, tree.Depths[1:]); diff != "" {
			t.Errorf("budget %d: depths (-reference +ours):\n%s", v.Budget, diff)
		}
		if diff := cmp.Diff(v.Parents, tree.Parents); diff != "" {
			t.Errorf("budget %d: parents (-reference +ours):\n%s", v.Budget, diff)
		}
	}
}

// letters are three slots of four candidates; token 'A'+4(depth-1)+rank.
func letters(probs [3][4]float64) drafter.Candidates {
	c := drafter.Candidates{Depth: 3, K: 4}
	for d, row := range probs {
		for r, p := range row {
			c.IDs = append(c.IDs, int32('A'+4*d+r))
			c.Logprobs = append(c.Logprobs, float32(math.Log(p)))
		}
	}
	return c
}

var eightNodes = letters([3][4]float64{{.55, .25, .15, .05}, {.50, .30, .15, .05}, {.62, .20, .13, .05}})

func TestATreeHoldsTheMostProbablePrefixesBestFirst(t *testing.T) {
	tree := drafter.DDTree(eightNodes, 8)
	if got, want := text(tree.Tokens[1:]), "AEBIFCEI"; got != want {
		t.Errorf("tokens %s, want %s", got, want)
	}
	if diff := cmp.Diff([]int32{-1, 0, 1, 0, 2, 1, 0, 3, 5}, tree.Parents); diff != "" {
		t.Errorf("parents:\n%s", diff)
	}
	if diff := cmp.Diff([]int32{0, 1, 2, 1, 3, 2, 1, 2, 3}, tree.Depths); diff != "" {
		t.Errorf("depths:\n%s", diff)
	}
	var expected float64
	for _, logw := range tree.Logw[1:] {
		expected += math.Exp(logw)
	}
	if math.Abs(expected-1.7878) > 5e-5 {
		t.Errorf("expected drafts %.5f, want 1.7878", expected)
	}
	if three := drafter.DDTree(eightNodes, 3); text(three.Tokens[1:]) != "AEB" {
		t.Errorf("3 nodes: %s, want AEB", text(three.Tokens[1:]))
	}
	if none := drafter.DDTree(eightNodes, 0); none.Len() != 0 {
		t.Errorf("budget 0 gives %d nodes", none.Len())
	}
}

func TestEqualPrefixesGoByTheirRanks(t *testing.T) {
	same := [4]float64{.5, .25, .1, .08}
	c := letters([3][4]float64{same, same, same})
	tree := drafter.DDTree(c, 7)
	if got, want := text(tree.Tokens[1:]), "AEBIFEC"; got != want {
		t.Errorf("tokens %s, want %s", got, want)
	}
	if diff := cmp.Diff([]int32{-1, 0, 1, 0, 2, 1, 3, 0}, tree.Parents); diff != "" {
		t.Errorf("parents:\n%s", diff)
	}
}

func TestAWalkFollowsTheTargetsAnswers(t *testing.T) {
	tree := drafter.DDTree(eightNodes, 8)
	for _, tt := range []struct {
		name     string
		answers  map[int32]rune
		path     []int32
		bonus    rune
		accepted int
	}{
		{"second child, then first", map[int32]rune{0: 'B', 3: 'E', 7: 'I'}, []int32{0, 3, 7}, 'I', 2},
		{"to a leaf", map[int32]rune{0: 'A', 1: 'F', 5: 'I', 8: 'Z'}, []int32{0, 1, 5, 8}, 'Z', 3},
		{"nothing", map[int32]rune{0: 'D'}, []int32{0}, 'D', 0},
		{"a child of another node", map[int32]rune{0: 'B', 3: 'F'}, []int32{0, 3}, 'F', 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := tree.Walk(func(node int32) (int32, bool) {
				y, ok := tt.answers[node]
				return y, ok
			})
			if diff := cmp.Diff(tt.path, w.Path); diff != "" {
				t.Errorf("path:\n%s", diff)
			}
			if w.Bonus != tt.bonus || w.Accepted() != tt.accepted || w.Truncated {
				t.Errorf("bonus %c, accepted %d, truncated %t", w.Bonus, w.Accepted(), w.Truncated)
			}
		})
	}
}

func TestAWalkIsTruncatedOnlyWhereMoreCouldBeAccepted(t *testing.T) {
	tree := drafter.DDTree(eightNodes, 8)
	known := func(answers string) drafter.Walk {
		return tree.Walk(func(node int32) (int32, bool) {
			d := int(tree.Depths[node])
			if d >= len(answers) {
				return 0, false
			}
			return int32(answers[d]), true
		})
	}
	for answers, want := range map[string]bool{"": true, "A": true, "AE": true, "AEI": false, "BE": false, "C": false, "D": false, "AG": false} {
		if got := known(answers); got.Truncated != want {
			t.Errorf("stored end after %q: truncated %t, want %t", answers, got.Truncated, want)
		}
	}
}

func text(tokens []int32) string {
	return string(tokens)
}
