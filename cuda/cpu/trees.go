package cpu

import (
	"cmp"

	"github.com/draftscope/draftscope/cuda"
)

// Trees implements [cuda.Device].
func (d *Device) Trees(args cuda.TreeArgs) (cuda.TreeResult, error) {
	if err := args.Check(); err != nil {
		return cuda.TreeResult{}, err
	}
	out := args.Result()
	d.rows(len(args.Anchors), 64*args.Budget(), func(lo, hi int) {
		g := growth{TreeArgs: args, budget: args.Budget()}
		for i := lo; i < hi; i++ {
			args.Settle(&out, i, g.grow(i))
			if args.Nodes {
				out.Nodes[i] = g.tree(i)
			}
		}
	})
	return out, nil
}

// growth grows the trees of one block after another in the same memory.
type growth struct {
	cuda.TreeArgs
	budget   int
	nodes    []prefix // the tree; nodes[0] is the root
	frontier []prefix // a heap of what may become a node, best first
}

// prefix is a path from the root, as its last step.
type prefix struct {
	logw        float64
	parent      int32 // node
	rank, depth int32 // of the last token: the candidate's, the slot's
}

// grow builds the tree of block i (DDTree, arXiv 2604.12989, Algorithm 1) and
// walks it on the way: best first, each popped prefix is followed by its next
// sibling and its first child. Where the nodes are not asked for, it ends as
// soon as the walk has.
func (g *growth) grow(i int) (walk cuda.Walk) {
	g.nodes = append(g.nodes[:0], prefix{parent: -1})
	g.frontier = g.frontier[:0]
	lp := g.Logprobs[i*g.Depth*g.K:][:g.Depth*g.K]
	if g.Depth > 0 && g.budget > 0 {
		g.push(prefix{logw: float64(lp[0]), depth: 1})
	}
	last, truth := int32(0), g.Truth(i, 1)
	for len(g.nodes) <= g.budget && len(g.frontier) > 0 {
		if truth == cuda.TruthAbsent && !g.Nodes {
			break
		}
		p := g.frontier[0]
		node := int32(len(g.nodes))
		g.nodes = append(g.nodes, p)
		if p.parent == last {
			switch truth {
			case cuda.TruthUnknown:
				if walk.Child == 0 {
					walk.Child = node
				}
				if !g.Nodes {
					return walk
				}
			case p.rank:
				walk.Path = append(walk.Path, node)
				last, truth = node, g.Truth(i, len(walk.Path)+1)
			}
		}
		at := int(p.depth-1)*g.K + int(p.rank)
		if int(p.rank)+1 < g.K {
			g.replace(prefix{p.logw - float64(lp[at]) + float64(lp[at+1]), p.parent, p.rank + 1, p.depth})
		} else {
			g.pop()
		}
		if int(p.depth) < g.Depth {
			g.push(prefix{p.logw + float64(lp[int(p.depth)*g.K]), node, 0, p.depth + 1})
		}
	}
	return walk
}

// tree is the tree just grown.
func (g *growth) tree(i int) cuda.Tree {
	t := cuda.MakeTree(len(g.nodes) - 1)
	for _, p := range g.nodes[1:] {
		t.Add(g.IDs[(i*g.Depth+int(p.depth)-1)*g.K+int(p.rank)], p.depth, p.parent, p.logw)
	}
	return t
}

// before is the order of popping: the larger sum, and of equal ones the
// lexicographically smaller tuple of ranks, a prefix before its extensions.
func (g *growth) before(a, b *prefix) bool {
	if a.logw != b.logw {
		return a.logw > b.logw
	}
	return g.tie(*a, *b)
}

// tie compares tuples of ranks from their ends: the first place where they
// differ is the last that is found.
func (g *growth) tie(a, b prefix) bool {
	order := cmp.Compare(a.depth, b.depth)
	for a.depth > b.depth {
		a = g.nodes[a.parent]
	}
	for b.depth > a.depth {
		b = g.nodes[b.parent]
	}
	for {
		if a.rank != b.rank {
			order = cmp.Compare(a.rank, b.rank)
		}
		if a.parent == b.parent {
			return order < 0
		}
		a, b = g.nodes[a.parent], g.nodes[b.parent]
	}
}

// push adds p to the frontier.
func (g *growth) push(p prefix) {
	g.frontier = append(g.frontier, p)
	h, i := g.frontier, len(g.frontier)-1
	for i > 0 && g.before(&p, &h[(i-1)/2]) {
		h[i] = h[(i-1)/2]
		i = (i - 1) / 2
	}
	h[i] = p
}

// pop removes the best of the frontier.
func (g *growth) pop() {
	last := g.frontier[len(g.frontier)-1]
	if g.frontier = g.frontier[:len(g.frontier)-1]; len(g.frontier) > 0 {
		g.replace(last)
	}
}

// replace puts p in place of the best of the frontier.
func (g *growth) replace(p prefix) {
	h, i := g.frontier, 0
	for {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if child+1 < len(h) && g.before(&h[child+1], &h[child]) {
			child++
		}
		if !g.before(&h[child], &p) {
			break
		}
		h[i] = h[child]
		i = child
	}
	h[i] = p
}
