package cpu

import "github.com/draftscope/draftscope/cuda"

// A run of query rows is scored together. Runs only save work: they never
// enter a sum.
const (
	runRows   = 16      // rows of a run, at most
	runScores = 1 << 20 // scores of a run, at most, unless one row has more
)

// attention is one call's operands as matrices.
type attention struct {
	cuda.AttentionArgs
	dst, q, ctxK, ctxV, blkK, blkV matrix
	group                          int // query heads a key/value head
}

// run is query rows lo..hi-1 and the keys that any of them sees.
type run struct {
	lo, hi int
	span   cuda.Span
}

func (r run) keys() int {
	return int(r.span.CtxHi-r.span.CtxLo) + int(r.span.BlkHi-r.span.BlkLo)
}

// Attention implements [cuda.Device]. Keys are summed in the order of the
// span, context first, in float32; the softmax denominator in float64.
func (d *Device) Attention(dst cuda.Tensor, args cuda.AttentionArgs) error {
	a := &attention{AttentionArgs: args}
	if err := a.check(dst); err != nil {
		return err
	}
	if a.q.rows == 0 || a.q.cols == 0 {
		return nil
	}
	runs := a.runs()
	cost := 0
	for _, r := range runs {
		cost = max(cost, (r.hi-r.lo)*a.group*r.keys()*a.HeadDim*2)
	}
	d.each(len(runs)*a.KVHeads, cost, func(i int) { a.attend(runs[i/a.KVHeads], i%a.KVHeads) })
	return nil
}

// check turns the operands into matrices that fit together.
func (a *attention) check(dst cuda.Tensor) error {
	if err := a.Check(dst); err != nil {
		return err
	}
	a.group = a.QHeads / a.KVHeads
	return views("attention", operand{dst, &a.dst}, operand{a.Q, &a.q}, operand{a.CtxK, &a.ctxK}, operand{a.CtxV, &a.ctxV},
		operand{a.BlkK, &a.blkK}, operand{a.BlkV, &a.blkV})
}

// union is the smallest span that covers both; empty parts count for nothing.
func union(s, t cuda.Span) cuda.Span {
	s.CtxLo, s.CtxHi = cover(s.CtxLo, s.CtxHi, t.CtxLo, t.CtxHi)
	s.BlkLo, s.BlkHi = cover(s.BlkLo, s.BlkHi, t.BlkLo, t.BlkHi)
	return s
}

func cover(lo, hi, lo2, hi2 int32) (int32, int32) {
	switch {
	case lo >= hi && lo2 >= hi2:
		return 0, 0
	case lo >= hi:
		return lo2, hi2
	case lo2 >= hi2:
		return lo, hi
	}
	return min(lo, lo2), max(hi, hi2)
}

// runs cuts the query rows into runs of neighbours that see much the same.
func (a *attention) runs() []run {
	var out []run
	for i, s := range a.Spans {
		own := run{i, i + 1, union(s, cuda.Span{})}
		if n := len(out); n > 0 {
			last := out[n-1]
			both := run{last.lo, i + 1, union(last.span, own.span)}
			// A longer union is scored and then not used: allow a little.
			waste := both.keys() - min(last.keys(), own.keys())
			if both.hi-both.lo <= runRows && waste <= 2*runRows &&
				(both.hi-both.lo)*a.group*both.keys() <= runScores {
				out[n-1] = both
				continue
			}
		}
		out = append(out, own)
	}
	return out
}

// attend computes the outputs of run r for the query heads of key/value head h.
func (a *attention) attend(r run, h int) {
	dim := a.HeadDim
	left, right := h*a.group*dim, (h+1)*a.group*dim
	queries := dense((r.hi-r.lo)*a.group, dim)
	for i := r.lo; i < r.hi; i++ {
		src := a.q.row(i)[left:right]
		for g := range a.group {
			// The scale goes into the query: once a row, not once a key.
			q := queries.row((i-r.lo)*a.group + g)
			for c, v := range src[g*dim : (g+1)*dim] {
				q[c] = v * a.Scale
			}
		}
	}
	nctx := int(r.span.CtxHi - r.span.CtxLo)
	scores := dense(queries.rows, r.keys())
	ctx, blk := scores.block(0, scores.rows, 0, nctx), scores.block(0, scores.rows, nctx, scores.cols)
	if nctx > 0 {
		multiply(ctx, queries, a.ctxK.block(int(r.span.CtxLo), int(r.span.CtxHi), h*dim, (h+1)*dim), false)
	}
	if nctx < scores.cols {
		multiply(blk, queries, a.blkK.block(int(r.span.BlkLo), int(r.span.BlkHi), h*dim, (h+1)*dim), false)
	}
	// From here on each row has its own span, as offsets into the run's.
	inv := make([]float32, queries.rows)
	seen := make([]cuda.Span, r.hi-r.lo)
	for i := range seen {
		s := union(a.Spans[r.lo+i], cuda.Span{})
		if s.CtxLo < s.CtxHi {
			s.CtxLo, s.CtxHi = s.CtxLo-r.span.CtxLo, s.CtxHi-r.span.CtxLo
		}
		if s.BlkLo < s.BlkHi {
			s.BlkLo, s.BlkHi = s.BlkLo-r.span.BlkLo, s.BlkHi-r.span.BlkLo
		}
		seen[i] = s
		for g := range a.group {
			clear(a.out(r.lo+i, h, g))
			row := scores.row(i*a.group + g)
			inv[i*a.group+g] = softmax(row[s.CtxLo:s.CtxHi], row[nctx+int(s.BlkLo):nctx+int(s.BlkHi)])
		}
	}
	a.weigh(r, h, ctx, a.ctxV, int(r.span.CtxLo), func(i int) (int, int) { return int(seen[i].CtxLo), int(seen[i].CtxHi) })
	a.weigh(r, h, blk, a.blkV, int(r.span.BlkLo), func(i int) (int, int) { return int(seen[i].BlkLo), int(seen[i].BlkHi) })
	for i := range seen {
		if seen[i] == (cuda.Span{}) {
			continue // zeros, not zeros over zero
		}
		for g := range a.group {
			o, n := a.out(r.lo+i, h, g), inv[i*a.group+g]
			for j := range o {
				o[j] *= n
			}
		}
	}
}

// out is query row i of query head g of key/value head h.
func (a *attention) out(i, h, g int) []float32 {
	lo := (h*a.group + g) * a.HeadDim
	return a.dst.row(i)[lo : lo+a.HeadDim]
}

// weigh adds the weighted values to the outputs of a run, weights column 0
// belonging to row first of v. Keys are taken in blocks that stay in cache
// while all rows pass; for one row their order is that of the span.
func (a *attention) weigh(r run, h int, weights, v matrix, first int, span func(i int) (lo, hi int)) {
	const block = 64
	left := h * a.HeadDim
	for at := 0; at < weights.cols; at += block {
		for i := range r.hi - r.lo {
			lo, hi := span(i)
			if lo, hi = max(lo, at), min(hi, at+block); lo >= hi {
				continue
			}
			values := v.block(first+lo, first+hi, left, left+a.HeadDim)
			for g := range a.group {
				kernels.mix(a.out(r.lo+i, h, g), weights.row(i*a.group + g)[lo:hi], values)
			}
		}
	}
}

// softmax replaces the scores a and b, one row in two pieces, by
// e^(score - largest) and returns one over their sum.
func softmax(a, b []float32) float32 {
	top := max(kernels.largest(a), kernels.largest(b))
	return float32(1 / (kernels.exps(a, a, top) + kernels.exps(b, b, top)))
}
