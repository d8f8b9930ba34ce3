//go:build cuda && cgo

package gpu

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/driver"
)

// How kernels/trees.cu is fed.
const (
	treeBytes  = 8 << 20 // of operands or results that one run of blocks has
	prefixSize = 16      // bytes of a prefix in the frontier
	placeBits  = 12      // of a place that are the slot; the rest is the rank
)

// Trees implements [cuda.Device]; see kernels/trees.cu. Blocks go in runs whose
// operands and results stay small. Ids stay on the host: a token that followed
// is known to the kernel by its rank.
func (d *Device) Trees(args cuda.TreeArgs) (cuda.TreeResult, error) {
	if err := args.Check(); err != nil {
		return cuda.TreeResult{}, err
	}
	out := args.Result()
	blocks, budget := len(args.Anchors), args.Budget()
	if budget == 0 || args.Depth == 0 {
		for i := range blocks {
			args.Settle(&out, i, cuda.Walk{})
			if args.Nodes {
				out.Nodes[i] = cuda.MakeTree(0)
			}
		}
		return out, nil
	}
	// No prefix that is popped in time has a rank of the budget or more.
	k := min(args.K, budget)
	run := max(1, treeBytes/max(4*args.Depth*k, 8*(budget+1)))
	err := d.card.Do(func() error {
		for lo := 0; lo < blocks; lo += run {
			if err := d.trees(args, &out, lo, min(lo+run, blocks), k); err != nil {
				return fmt.Errorf("growing %d trees of %d nodes: %w", blocks, budget, err)
			}
		}
		return nil
	})
	return out, err
}

// trees grows those of blocks lo..hi-1 and waits for them.
func (d *Device) trees(args cuda.TreeArgs, out *cuda.TreeResult, lo, hi, k int) error {
	n, depth, budget := hi-lo, args.Depth, args.Budget()
	logprobs := args.Logprobs[lo*depth*args.K : hi*depth*args.K]
	if k < args.K {
		narrow := make([]float32, 0, n*depth*k)
		for row := range n * depth {
			narrow = append(narrow, logprobs[row*args.K:][:k]...)
		}
		logprobs = narrow
	}
	truths := make([]int32, 0, n*depth)
	for i := lo; i < hi; i++ {
		for s := range depth {
			truths = append(truths, args.Truth(i, s+1))
		}
	}
	in, err := d.params.send(bytesOf(logprobs), bytesOf(truths))
	if err != nil {
		return err
	}
	// The frontier has one prefix more with each pop, at most. What does not fit
	// into shared memory stays in the device's, which the kernel reads as well.
	g := driver.Grid{Blocks: [3]int{n}, Threads: [3]int{32}, Shared: (budget + 2) * prefixSize}
	outside, staged, wanted := 0, 0, 0
	if g.Shared > d.card.MaxShared {
		outside, g.Shared = g.Shared, 0
	}
	if all := g.Shared + depth*k*4; all <= d.card.MaxShared {
		g.Shared, staged = all, 1
	}
	if args.Nodes {
		wanted = budget + 1
	}
	var walks, nodes, sums, counts, heaps driver.Ptr
	for _, r := range []struct {
		name  string
		bytes int // a block
		to    *driver.Ptr
	}{
		{"tree walks", (depth + 1) * 4, &walks},
		{"tree nodes", (budget + 1) * 8, &nodes},
		{"tree sums", wanted * 8, &sums},
		{"tree counts", 4, &counts},
		{"tree frontiers", outside, &heaps},
	} {
		if r.bytes == 0 {
			continue
		}
		if *r.to, err = d.room(r.name, n*r.bytes); err != nil {
			return fmt.Errorf("making room for %s: %w", r.name, err)
		}
	}
	if err := d.launch("trees", "trees", g, in[0], k, depth, in[1], budget, walks, nodes, sums, counts, heaps, staged); err != nil {
		return err
	}
	t := grown{walks: make([]int32, n*(depth+1)), counts: make([]int32, n)}
	list := []fetched{{bytesOf(t.walks), walks}, {bytesOf(t.counts), counts}}
	if args.Nodes {
		t.nodes, t.sums = make([][2]int32, n*wanted), make([]float64, n*wanted)
		list = append(list, fetched{bytesOf(t.nodes), nodes}, fetched{bytesOf(t.sums), sums})
	}
	if err := d.fetch(list); err != nil {
		return err
	}
	for i := range n {
		args.Settle(out, lo+i, t.walk(i, depth))
		if args.Nodes {
			out.Nodes[lo+i] = t.tree(args, lo+i, i)
		}
	}
	return nil
}

// grown is what the kernel says of a run of blocks.
type grown struct {
	walks, counts []int32
	nodes         [][2]int32 // parent and place
	sums          []float64
}

// walk reads the walk of the run's block i.
func (t *grown) walk(i, depth int) cuda.Walk {
	row := t.walks[i*(depth+1):][:depth+1]
	w := cuda.Walk{Child: row[depth]}
	for _, node := range row[:depth] {
		if node == 0 {
			break
		}
		w.Path = append(w.Path, node)
	}
	return w
}

// tree reads the tree of block, the run's i.
func (t *grown) tree(args cuda.TreeArgs, block, i int) cuda.Tree {
	room := args.Budget() + 1
	tree := cuda.MakeTree(int(t.counts[i]))
	for node := 1; node <= int(t.counts[i]); node++ {
		parent, place := t.nodes[i*room+node][0], t.nodes[i*room+node][1]
		depth, rank := place&(1<<placeBits-1), int(place>>placeBits)
		tree.Add(args.IDs[(block*args.Depth+int(depth)-1)*args.K+rank], depth, parent, t.sums[i*room+node])
	}
	return tree
}
