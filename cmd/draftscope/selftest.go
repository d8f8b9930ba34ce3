package main

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/draftscope/draftscope/cuda"
)

// selfTest runs every operation of a drafter once on dev and on the judge, the
// processor, and compares. It is the part of the conformance suite that a
// user's machine can run: a driver or a card that computes wrongly shows here.
func selfTest(dev, judge cuda.Device) error {
	got, err := probe(dev)
	if err != nil {
		return fmt.Errorf("the self-test fails: %w", err)
	}
	want, err := probe(judge)
	if err != nil {
		return err
	}
	for i, step := range want {
		for k, w := range step.values {
			if g := got[i].values[k]; !(math.Abs(float64(g-w)) <= 1e-4*(1+math.Abs(float64(w)))) {
				return fmt.Errorf("the self-test fails: value %d of %s is %g, not %g; update the driver, or use --backend cpu", k, step.name, g, w)
			}
		}
	}
	return nil
}

// probed is what one operation of a self-test gave.
type probed struct {
	name   string
	values []float32
}

// probe is a small drafter layer with made-up weights, operation by
// operation.
func probe(dev cuda.Device) (out []probed, err error) {
	const rows, width, heads, dim, vocab, top = 33, 96, 4, 24, 500, 3
	rng := rand.New(rand.NewPCG(1, 2))
	var errs []error
	var bufs []cuda.Buffer
	defer func() {
		for _, b := range bufs {
			b.Close()
		}
	}()
	place := func(r int) cuda.Tensor {
		buf, err := dev.New(r * width)
		if err != nil {
			errs = append(errs, err)
			return cuda.Tensor{}
		}
		bufs = append(bufs, buf)
		values := make([]float32, r*width)
		for i := range values {
			values[i] = float32(rng.NormFloat64() / 4)
		}
		m := cuda.Matrix(buf, r, width)
		errs = append(errs, dev.Upload(m, values))
		return m
	}
	note := func(name string, m cuda.Tensor, err error) {
		values := make([]float32, m.Rows*m.Cols)
		if err == nil {
			err = dev.Download(values, m)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
		out = append(out, probed{name, values})
	}
	x, w, gain, qkv := place(rows), place(width), place(1), place(rows)
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	pos, spans, order := make([]int32, rows), make([]cuda.Span, rows), make([]int32, rows)
	for i := range pos {
		pos[i], spans[i], order[i] = int32(i), cuda.Span{CtxHi: int32(i), BlkLo: int32(i), BlkHi: int32(i + 1)}, int32(rows-1-i)
	}
	note("rmsnorm", qkv, dev.RMSNorm(qkv, x, gain, 1e-6, 1))
	note("gemm", x, dev.Gemm(x, qkv, w, true))
	note("normrope", x, dev.NormRoPE(x, cuda.NormRoPEArgs{
		X: x, W: gain.ColRange(0, dim), Heads: heads, HeadDim: dim, Step: dim, Eps: 1e-6, Gain: 1, Pos: pos, Rotary: dim, Theta: 1e4,
	}))
	note("attention", qkv, dev.Attention(qkv, cuda.AttentionArgs{
		Q: x, CtxK: x, CtxV: x, BlkK: x, BlkV: x, Spans: spans, QHeads: heads, KVHeads: heads, HeadDim: dim, Scale: .2,
	}))
	note("gatemul", qkv, dev.GateMul(qkv, x, qkv, cuda.SiLU))
	note("gather", x, dev.GatherRows(x, qkv, order))
	labels := make([]int32, rows)
	for i := range labels {
		labels[i] = int32(i * 7)
	}
	head, err := dev.Head(cuda.HeadArgs{
		Hidden: x, Weight: place(vocab), K: top, Labels: labels, Target: qkv, TargetRow: order, Losses: cuda.KL,
	})
	if err != nil {
		errs = append(errs, fmt.Errorf("head: %w", err))
	}
	similar, err := dev.Similarity(x, qkv)
	if err != nil {
		errs = append(errs, fmt.Errorf("similarity: %w", err))
	}
	cosines := probed{name: "similarity"}
	for _, s := range similar {
		c, _ := s.Cosine()
		cosines.values = append(cosines.values, float32(c))
	}
	trees, err := treesOf(dev, rng)
	if err != nil {
		errs = append(errs, fmt.Errorf("trees: %w", err))
	}
	out = append(out, cosines, trees)
	out = append(out, probed{"head, top", head.TopLogits}, probed{"head, log-sum-exp", head.LSE}, probed{"head, labels", head.LabelLogit}, probed{"head, KL", head.KL})
	return out, errors.Join(errs...)
}

// treesOf grows a few trees from made-up log-probabilities: each node's token,
// and then each block's outcome.
func treesOf(dev cuda.Device, rng *rand.Rand) (probed, error) {
	const blocks, depth, k, budget = 5, 7, 8, 40
	args := cuda.TreeArgs{Depth: depth, K: k, Budgets: []int{budget / 4, budget}, Nodes: true}
	for range blocks + depth {
		args.Tokens = append(args.Tokens, rng.Int32N(2))
	}
	for i := range int32(blocks) {
		args.Anchors, args.Ends = append(args.Anchors, i), append(args.Ends, i+depth)
		for range depth {
			lp := -rng.Float32()
			for r := range int32(k) {
				args.IDs, args.Logprobs = append(args.IDs, r), append(args.Logprobs, lp)
				lp -= rng.Float32()
			}
		}
	}
	got, err := dev.Trees(args)
	p := probed{name: "trees"}
	for _, t := range got.Nodes {
		for _, token := range t.Tokens {
			p.values = append(p.values, float32(token))
		}
	}
	for _, o := range got.Trees {
		p.values = append(p.values, float32(o.Accepted))
	}
	return p, err
}
