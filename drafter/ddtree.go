package drafter

import (
	"cmp"
	"container/heap"
	"slices"
)

// Candidates are a block's most likely tokens: for each of Depth slots, K ids
// and their log-probabilities, most likely first. A slot's tokens are drawn
// independently of the others', so a path's log-probability is the sum.
type Candidates struct {
	Depth, K int
	IDs      []int32   // [Depth*K]
	Logprobs []float32 // [Depth*K]
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

// Len is the number of drafted nodes; the root does not count.
func (t Tree) Len() int { return len(t.Tokens) - 1 }

func newTree(nodes int) Tree {
	return Tree{
		Tokens:  append(make([]int32, 0, nodes+1), -1),
		Depths:  append(make([]int32, 0, nodes+1), 0),
		Parents: append(make([]int32, 0, nodes+1), -1),
		Logw:    append(make([]float64, 0, nodes+1), 0),
	}
}

func (t *Tree) add(token, depth, parent int32, logw float64) int32 {
	t.Tokens = append(t.Tokens, token)
	t.Depths = append(t.Depths, depth)
	t.Parents = append(t.Parents, parent)
	t.Logw = append(t.Logw, logw)
	return int32(len(t.Tokens) - 1)
}

// Chain is the tree of one path: the most likely token of every slot.
func Chain(c Candidates) Tree {
	t := newTree(c.Depth)
	logw, node := 0.0, int32(0)
	for d := range c.Depth {
		logw += float64(c.Logprobs[d*c.K])
		node = t.add(c.IDs[d*c.K], int32(d+1), node, logw)
	}
	return t
}

// DDTree is the tree of the budget most likely prefixes (DDTree, Algorithm 1):
// best first, each popped prefix is followed by its next sibling and its first
// child. Log-probabilities are summed in float64. Equal sums go to the
// lexicographically smaller tuple of ranks, a prefix before its extensions. At
// most min(budget, K) candidates a slot are used.
func DDTree(c Candidates, budget int) Tree {
	t := newTree(max(budget, 0))
	k := min(budget, c.K)
	if budget <= 0 || c.Depth == 0 || k == 0 {
		return t
	}
	lp := func(depth, rank int32) float64 { return float64(c.Logprobs[int(depth-1)*c.K+int(rank)]) }
	h := &frontier{items: []prefix{{logw: lp(1, 0), ranks: []int32{0}}}}
	for t.Len() < budget && len(h.items) > 0 {
		p := heap.Pop(h).(prefix)
		depth := int32(len(p.ranks))
		rank := p.ranks[depth-1]
		node := t.add(c.IDs[int(depth-1)*c.K+int(rank)], depth, p.parent, p.logw)
		if int(rank)+1 < k {
			sibling := slices.Clone(p.ranks)
			sibling[depth-1]++
			heap.Push(h, prefix{p.logw - lp(depth, rank) + lp(depth, rank+1), sibling, p.parent})
		}
		if int(depth) < c.Depth {
			heap.Push(h, prefix{p.logw + lp(depth+1, 0), append(slices.Clip(p.ranks), 0), node})
		}
	}
	return t
}

// prefix is a path that may become a node: the rank of its token in each slot.
type prefix struct {
	logw   float64
	ranks  []int32
	parent int32
}

// frontier is a heap of prefixes, best first.
type frontier struct{ items []prefix }

func (f *frontier) Len() int      { return len(f.items) }
func (f *frontier) Swap(i, j int) { f.items[i], f.items[j] = f.items[j], f.items[i] }
func (f *frontier) Push(x any)    { f.items = append(f.items, x.(prefix)) }

func (f *frontier) Less(i, j int) bool {
	a, b := f.items[i], f.items[j]
	// Ranks are unique, so nothing remains to be decided after them.
	return cmp.Or(cmp.Compare(b.logw, a.logw), slices.Compare(a.ranks, b.ranks)) < 0
}

func (f *frontier) Pop() any {
	last := len(f.items) - 1
	x := f.items[last]
	f.items = f.items[:last]
	return x
}

// Walk is the outcome of verifying a tree against the target.
type Walk struct {
	Path  []int32 // accepted nodes, the root first
	Bonus int32   // the target's token after the last of them, -1 when unknown
	// Truncated says that the answer at the last accepted node is unknown
	// while that node has children which it might have accepted.
	Truncated bool
}

// Accepted is the number of accepted drafts, without root and bonus.
func (w Walk) Accepted() int { return len(w.Path) - 1 }

// Walk follows the target's answers from the root for as long as they are
// drafted children. answer gives the target's token after a node, and false
// where that is not known.
func (t Tree) Walk(answer func(node int32) (token int32, known bool)) Walk {
	w := Walk{Path: []int32{0}, Bonus: -1}
	// Children come after their parent, so one sweep finds the whole path.
	cur := int32(0)
	token, known := answer(cur)
	for i := 1; i < len(t.Tokens); i++ {
		if t.Parents[i] != cur {
			continue
		}
		if !known {
			w.Truncated = true
			return w
		}
		if t.Tokens[i] == token {
			cur = int32(i)
			w.Path = append(w.Path, cur)
			token, known = answer(cur)
		}
	}
	if known {
		w.Bonus = token
	}
	return w
}
