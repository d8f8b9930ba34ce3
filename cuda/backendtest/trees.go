package backendtest

import (
	"cmp"
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/draftscope/draftscope/cuda"
)

// oracleTree is DDTree, word by word: a frontier of whole tuples of ranks,
// sums in float64, at most min(budget, K) candidates a slot.
func oracleTree(a cuda.TreeArgs, block, budget int) cuda.Tree {
	t := cuda.MakeTree(max(budget, 0))
	k := min(budget, a.K)
	if budget <= 0 || a.Depth == 0 {
		return t
	}
	at := func(depth, rank int) int { return (block*a.Depth+depth-1)*a.K + rank }
	lp := func(depth, rank int) float64 { return float64(a.Logprobs[at(depth, rank)]) }
	h := &frontier{{logw: lp(1, 0), ranks: []int{0}}}
	for t.Len() < budget && len(*h) > 0 {
		p := heap.Pop(h).(prefix)
		depth := len(p.ranks)
		rank := p.ranks[depth-1]
		node := t.Add(a.IDs[at(depth, rank)], int32(depth), p.parent, p.logw)
		if rank+1 < k {
			sibling := slices.Clone(p.ranks)
			sibling[depth-1]++
			heap.Push(h, prefix{p.logw - lp(depth, rank) + lp(depth, rank+1), sibling, p.parent})
		}
		if depth < a.Depth {
			heap.Push(h, prefix{p.logw + lp(depth+1, 0), append(slices.Clone(p.ranks), 0), node})
		}
	}
	return t
}

// prefix is a path that may become a node: the rank of its token in each slot.
type prefix struct {
	logw   float64
	ranks  []int
	parent int32
}

// frontier is a heap of prefixes, best first.
type frontier []prefix

func (f frontier) Len() int      { return len(f) }
func (f frontier) Swap(i, j int) { f[i], f[j] = f[j], f[i] }
func (f *frontier) Push(x any)   { *f = append(*f, x.(prefix)) }

func (f frontier) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(f[j].logw, f[i].logw), slices.Compare(f[i].ranks, f[j].ranks)) < 0
}

func (f *frontier) Pop() any {
	last := (*f)[len(*f)-1]
	*f = (*f)[:len(*f)-1]
	return last
}

// oracleOutcome verifies a tree against the tokens after an anchor.
func oracleOutcome(a cuda.TreeArgs, block int, t cuda.Tree) cuda.Outcome {
	o := cuda.Outcome{Proposed: t.Len()}
	node := int32(0)
	for i := int32(1); int(i) < len(t.Tokens); i++ {
		if t.Parents[i] != node {
			continue
		}
		next := int(a.Anchors[block]) + o.Accepted + 1
		if next >= int(a.Ends[block]) {
			o.Truncated = true
			break
		}
		if t.Tokens[i] == a.Tokens[next] {
			node = i
			o.Accepted++
		}
	}
	return o
}

// oracleChain is the tree of one path.
func oracleChain(a cuda.TreeArgs, block int) cuda.Tree {
	one := a
	one.K, one.IDs, one.Logprobs = 1, nil, nil
	for d := range a.Depth {
		one.IDs = append(one.IDs, a.IDs[(block*a.Depth+d)*a.K])
		one.Logprobs = append(one.Logprobs, a.Logprobs[(block*a.Depth+d)*a.K])
	}
	return oracleTree(one, 0, a.Depth)
}

// blocks draws what a head might say of n blocks, and tokens that often are
// what it said. Steps of coarse, if not 0, make many sums equal.
func blocks(seed uint64, n, depth, k int, coarse float64, budgets ...int) cuda.TreeArgs {
	rng := rand.New(rand.NewPCG(seed, 7))
	a := cuda.TreeArgs{Depth: depth, K: k, Budgets: budgets, Tokens: make([]int32, n+depth)}
	for i := range a.Tokens {
		a.Tokens[i] = int32(rng.IntN(50))
	}
	for i := range n {
		a.Anchors = append(a.Anchors, int32(i))
		a.Ends = append(a.Ends, int32(min(i+rng.IntN(depth+4), len(a.Tokens))))
		for d := range depth {
			logits := make([]float64, k)
			sum := 0.
			for r := range logits {
				logits[r] = 3 * rng.NormFloat64()
				if coarse > 0 {
					logits[r] = coarse * math.Round(logits[r]/coarse)
				}
				sum += math.Exp(logits[r])
			}
			slices.SortFunc(logits, func(x, y float64) int { return cmp.Compare(y, x) })
			ids := rng.Perm(k + 50)[:k]
			if rng.IntN(3) > 0 && i+d+1 < len(a.Tokens) {
				truth := int(a.Tokens[i+d+1])
				r := rng.IntN(1 + rng.IntN(k))
				if was := slices.Index(ids, truth); was >= 0 {
					ids[was] = ids[r]
				}
				ids[r] = truth
			}
			for r, v := range logits {
				a.IDs = append(a.IDs, int32(ids[r]))
				if coarse == 0 {
					v -= math.Log(sum)
				} else {
					v -= logits[0] + coarse
				}
				a.Logprobs = append(a.Logprobs, float32(v))
			}
		}
	}
	return a
}

func testTrees(t *testing.T, l *lab) {
	// Both ways to run: with the nodes, and what becomes of them alone.
	check := func(t *testing.T, a cuda.TreeArgs) {
		t.Helper()
		want := a.Result()
		want.Nodes = make([]cuda.Tree, len(a.Anchors))
		for i := range a.Anchors {
			want.Nodes[i] = oracleTree(a, i, a.Budget())
			want.Chains[i] = oracleOutcome(a, i, oracleChain(a, i))
			for b, n := range a.Budgets {
				want.Trees[i*len(a.Budgets)+b] = oracleOutcome(a, i, oracleTree(a, i, n))
			}
		}
		for _, nodes := range []bool{true, false} {
			a.Nodes = nodes
			if !nodes {
				want.Nodes = nil
			}
			got, err := l.d.Trees(a)
			must(t, err)
			if diff := gocmp.Diff(want, got); diff != "" {
				t.Fatalf("nodes asked for: %t (-oracle +ours):\n%s", nodes, diff)
			}
		}
	}
	for _, s := range []struct {
		n, depth, k int
		coarse      float64
		budgets     []int
	}{
		{1, 1, 1, 0, []int{1}},
		{1, 1, 40, 0, []int{1, 2, 31, 32, 33, 64}},
		{3, 15, 1, 0, []int{1, 14, 15, 16, 40}},
		{65, 15, 16, 0, []int{8, 16, 64, 256}},
		{7, 15, 64, 0, []int{1, 16, 63, 64, 65, 1023, 1024, 1025, 1100}},
		{5, 3, 4, 0, []int{8, 83, 84, 85, 2000}},
		{33, 7, 8, .5, []int{7, 33, 300}},
		{9, 15, 16, 4, []int{64, 500}},
		{4, 5, 33, 100, []int{31, 32, 33, 34, 1058}},
		{2, 2, 300, 0, []int{20000}},
		{2, 15, 700, 1, []int{16000}},
		{4, 6, 6, 0, nil},
		{2, 0, 3, 0, []int{4}},
	} {
		if testing.Short() && s.n*max(1, slices.Max(append(s.budgets, 0))) > 20000 {
			continue
		}
		t.Run(fmt.Sprintf("%d blocks of %dx%d, coarse %v, %v", s.n, s.depth, s.k, s.coarse, s.budgets), func(t *testing.T) {
			check(t, blocks(uint64(s.n), s.n, s.depth, s.k, s.coarse, s.budgets...))
		})
	}
	t.Run("sums that rounding moves are as the formula has them", func(t *testing.T) {
		a := blocks(1, 1, 6, 5, 0, 400)
		for i := range a.Logprobs {
			a.Logprobs[i] = -.1 // p - x + x is not always p
		}
		check(t, a)
	})
	t.Run("no blocks, no trees", func(t *testing.T) { check(t, cuda.TreeArgs{Depth: 3, K: 2, Budgets: []int{4}}) })
	t.Run("a smaller budget's tree is the beginning", func(t *testing.T) {
		a := blocks(2, 1, 15, 16, 0, 300)
		a.Nodes = true
		got, err := l.d.Trees(a)
		must(t, err)
		for _, n := range []int{0, 1, 16, 299, 300, 400} {
			if diff := gocmp.Diff(oracleTree(a, 0, min(n, 300)), got.Nodes[0].First(n)); diff != "" {
				t.Errorf("%d nodes:\n%s", n, diff)
			}
		}
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		for name, spoil := range map[string]func(*cuda.TreeArgs){
			"ids":              func(a *cuda.TreeArgs) { a.IDs = a.IDs[1:] },
			"probabilities":    func(a *cuda.TreeArgs) { a.Logprobs = nil },
			"ends":             func(a *cuda.TreeArgs) { a.Ends = a.Ends[1:] },
			"no candidates":    func(a *cuda.TreeArgs) { a.K = 0 },
			"negative anchor":  func(a *cuda.TreeArgs) { a.Anchors[1] = -1 },
			"end after tokens": func(a *cuda.TreeArgs) { a.Ends[0] = 100 },
			"order":            func(a *cuda.TreeArgs) { a.Budgets = []int{4, 4} },
			"no budget":        func(a *cuda.TreeArgs) { a.Budgets = []int{0, 4} },
			"huge budget":      func(a *cuda.TreeArgs) { a.Budgets = []int{1 << 20} },
		} {
			a := blocks(3, 2, 4, 4, 0, 8, 16)
			spoil(&a)
			_, err := l.d.Trees(a)
			refused(t, name, err)
		}
	})
}

func benchTrees(b *testing.B, l *lab) {
	const anchors, depth = 128, 15
	for _, budget := range []int{16, 64, 256, 1024} {
		a := blocks(1, anchors, depth, budget, 0, budget)
		for _, nodes := range []bool{false, true} {
			name := strconv.Itoa(budget)
			if nodes {
				name += "+nodes"
			}
			b.Run(name, func(b *testing.B) {
				a.Nodes = nodes
				for b.Loop() {
					_, err := l.d.Trees(a)
					must(b, err)
				}
				b.ReportMetric(anchors*float64(b.N)/b.Elapsed().Seconds(), "trees/s")
			})
		}
	}
}
