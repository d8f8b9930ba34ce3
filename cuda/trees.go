package cuda

import "slices"

// What bounds a call of [Device.Trees].
const (
	MaxTreeBudget = 1 << 16
	MaxTreeDepth  = 1<<12 - 1
)

// TreeArgs are the operands of [Device.Trees]: drafted blocks of one sequence,
// each of Depth slots of K candidates, most likely first, and the tokens that
// the sequence went on with.
type TreeArgs struct {
	Depth, K int
	IDs      []int32   // [blocks*Depth*K], those of one slot distinct
	Logprobs []float32 // [blocks*Depth*K], finite
	// Slot d = 1..Depth of block i predicts Tokens[Anchors[i]+d], which is known
	// below Ends[i] only.
	Tokens        []int32
	Anchors, Ends []int32 // [blocks]
	// Budgets are the sizes of the trees, ascending, without the root.
	Budgets []int
	// Nodes asks for the trees themselves, not only what becomes of them.
	Nodes bool
}

// TreeResult is what [Device.Trees] finds.
type TreeResult struct {
	Chains []Outcome // [blocks], of the most likely token of each slot
	Trees  []Outcome // [blocks*len(Budgets)], by block and then by budget
	// Nodes has each block's tree of the largest budget, if asked for. A smaller
	// budget's is its beginning, see [Tree.First].
	Nodes []Tree // [blocks]
}

// Outcome is one round of verification: drafts proposed and accepted, and
// whether it is truncated: every draft was accepted as far as the tokens are
// known, with more left to verify.
type Outcome struct {
	Proposed, Accepted int
	Truncated          bool
}

// Tree is a set of drafts that share prefixes. Node 0 is the root, the anchor
// itself; its entries in Tokens and Parents are -1. A parent comes before its
// children.
type Tree struct {
	Tokens  []int32
	Depths  []int32
	Parents []int32
	Logw    []float64 // log-probability of the path from the root
}

// MakeTree is a tree of a root and room for so many nodes.
func MakeTree(nodes int) Tree {
	return Tree{
		Tokens:  append(make([]int32, 0, nodes+1), -1),
		Depths:  append(make([]int32, 0, nodes+1), 0),
		Parents: append(make([]int32, 0, nodes+1), -1),
		Logw:    append(make([]float64, 0, nodes+1), 0),
	}
}

// Len is the number of drafted nodes; the root does not count.
func (t Tree) Len() int { return len(t.Tokens) - 1 }

// Add appends a node and returns its number.
func (t *Tree) Add(token, depth, parent int32, logw float64) int32 {
	t.Tokens = append(t.Tokens, token)
	t.Depths = append(t.Depths, depth)
	t.Parents = append(t.Parents, parent)
	t.Logw = append(t.Logw, logw)
	return int32(len(t.Tokens) - 1)
}

// First is the tree of the first n nodes, which is DDTree's of budget n.
func (t Tree) First(n int) Tree {
	n = min(n, t.Len()) + 1
	return Tree{t.Tokens[:n], t.Depths[:n], t.Parents[:n], t.Logw[:n]}
}

// What [TreeArgs.Truth] says in place of a rank.
const (
	TruthAbsent  = -1 // the token is no candidate of its slot
	TruthUnknown = -2 // the token is not known
)

// Truth is the rank, among slot d's candidates, of the token that followed:
// d = 1..Depth of block i. After the last slot nothing is drafted, and so the
// truth is absent.
func (a TreeArgs) Truth(i, d int) int32 {
	if d > a.Depth {
		return TruthAbsent
	}
	at := int(a.Anchors[i]) + d
	if at >= int(a.Ends[i]) {
		return TruthUnknown
	}
	row := (i*a.Depth + d - 1) * a.K
	return int32(slices.Index(a.IDs[row:row+a.K], a.Tokens[at]))
}

// Walk is how far the tokens that followed lead into a tree: the nodes on
// their path in order, without the root; and, where the token after the last
// of them is not known, the first child of that one, 0 if it has none.
type Walk struct {
	Path  []int32
	Child int32
}

// Settle writes the outcomes of block i, given the walk in its tree of the
// largest budget. In a tree of a smaller one the walk is the same for as long
// as it meets nodes which that one has.
func (a TreeArgs) Settle(out *TreeResult, i int, w Walk) {
	out.Chains[i] = Outcome{Proposed: a.Depth}
	for d := 1; d <= a.Depth; d++ {
		truth := a.Truth(i, d)
		if truth != 0 {
			out.Chains[i].Truncated = truth == TruthUnknown
			break
		}
		out.Chains[i].Accepted++
	}
	for b, budget := range a.Budgets {
		o := Outcome{Proposed: a.proposed(budget)}
		for _, node := range w.Path {
			if int(node) <= budget {
				o.Accepted++
			}
		}
		// The child comes after the whole path.
		o.Truncated = w.Child > 0 && int(w.Child) <= budget
		out.Trees[i*len(a.Budgets)+b] = o
	}
}

// proposed is how many nodes a tree of some budget has: the budget, or all
// prefixes where there are fewer.
func (a TreeArgs) proposed(budget int) int {
	all, level := 0, 1
	for range a.Depth {
		level *= a.K
		if all += level; all >= budget {
			return budget
		}
	}
	return all
}

// Budget is the largest, 0 if there is none.
func (a TreeArgs) Budget() int {
	if len(a.Budgets) == 0 {
		return 0
	}
	return a.Budgets[len(a.Budgets)-1]
}

// Result is room for the results.
func (a TreeArgs) Result() TreeResult {
	n := len(a.Anchors)
	out := TreeResult{Chains: make([]Outcome, n), Trees: make([]Outcome, n*len(a.Budgets))}
	if a.Nodes {
		out.Nodes = make([]Tree, n)
	}
	return out
}

// Check checks the operands of [Device.Trees].
func (a TreeArgs) Check() error {
	const op = "trees"
	blocks := len(a.Anchors)
	if a.Depth < 0 || a.Depth > MaxTreeDepth || a.K < 1 {
		return shapeError(op, "blocks of %d slots of %d candidates: want at most %d, and 1 at least", a.Depth, a.K, MaxTreeDepth)
	}
	if n := blocks * a.Depth * a.K; len(a.IDs) != n || len(a.Logprobs) != n || len(a.Ends) != blocks {
		return shapeError(op, "%d ids, %d log-probabilities, %d ends: want %d, %d, %d", len(a.IDs), len(a.Logprobs), len(a.Ends), n, n, blocks)
	}
	for i, at := range a.Anchors {
		if at < 0 || int(a.Ends[i]) > len(a.Tokens) {
			return shapeError(op, "block %d has its anchor at %d and ends at %d of %d tokens", i, at, a.Ends[i], len(a.Tokens))
		}
	}
	last := 0
	for _, n := range a.Budgets {
		if n <= last || n > MaxTreeBudget {
			return shapeError(op, "trees of %v nodes: want 1 to %d, ascending", a.Budgets, MaxTreeBudget)
		}
		last = n
	}
	return nil
}
