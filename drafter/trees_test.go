package drafter_test

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/backendtest"
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
		c := cuda.TreeArgs{Depth: v.Depth, K: len(v.IDs[0])}
		for d := range v.Depth {
			c.IDs = append(c.IDs, v.IDs[d]...)
			c.Logprobs = append(c.Logprobs, v.Logprobs[d]...)
		}
		tree := ddtree(t, c, v.Budget)
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

// ddtree is the tree of one block, on the backend under test.
func ddtree(t *testing.T, c cuda.TreeArgs, budget int) cuda.Tree {
	t.Helper()
	dev := backendtest.Open(t)
	defer dev.Close()
	c.Anchors, c.Ends, c.Budgets, c.Nodes = []int32{0}, []int32{0}, []int{budget}, true
	got, err := dev.Trees(c)
	if err != nil {
		t.Fatal(err)
	}
	return got.Nodes[0]
}

// letters are three slots of four candidates; token 'A'+4(depth-1)+rank.
func letters(probs [3][4]float64) cuda.TreeArgs {
	c := cuda.TreeArgs{Depth: 3, K: 4}
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
	tree := ddtree(t, eightNodes, 8)
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
	if three := ddtree(t, eightNodes, 3); text(three.Tokens[1:]) != "AEB" {
		t.Errorf("3 nodes: %s, want AEB", text(three.Tokens[1:]))
	}
}

func TestEqualPrefixesGoByTheirRanks(t *testing.T) {
	same := [4]float64{.5, .25, .1, .08}
	c := letters([3][4]float64{same, same, same})
	tree := ddtree(t, c, 7)
	if got, want := text(tree.Tokens[1:]), "AEBIFEC"; got != want {
		t.Errorf("tokens %s, want %s", got, want)
	}
	if diff := cmp.Diff([]int32{-1, 0, 1, 0, 2, 1, 3, 0}, tree.Parents); diff != "" {
		t.Errorf("parents:\n%s", diff)
	}
}

func TestVerificationFollowsTheTokensThatCame(t *testing.T) {
	dev := backendtest.Open(t)
	defer dev.Close()
	for tokens, want := range map[string]cuda.Outcome{
		"BEI": {Accepted: 2}, // second child, then first; BEI is not in the tree
		"AFI": {Accepted: 3}, // to a leaf
		"D":   {},
		"BF":  {Accepted: 1}, // a child of another node
		// The end truncates a round where more could have been accepted.
		"": {Truncated: true}, "A": {Accepted: 1, Truncated: true}, "AE": {Accepted: 2, Truncated: true},
		"AEI": {Accepted: 3}, "BE": {Accepted: 2}, "C": {Accepted: 1}, "AG": {Accepted: 1},
	} {
		c := eightNodes
		c.Tokens = append([]int32{'x'}, []rune(tokens)...)
		c.Anchors, c.Ends, c.Budgets = []int32{0}, []int32{int32(len(c.Tokens))}, []int{8}
		got, err := dev.Trees(c)
		if err != nil {
			t.Fatal(err)
		}
		want.Proposed = 8
		if got.Trees[0] != want {
			t.Errorf("after %q: %+v, want %+v", tokens, got.Trees[0], want)
		}
	}
}

func text(tokens []int32) string {
	return string(tokens)
}
