package diagnose

import (
	"slices"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
)

// pass is one forward pass of a replica. The first error stays in err and the
// rest do nothing, so that the pass reads as its formula.
type pass struct {
	*replica
	graph Graph
	blocks
	err error
}

func (p *pass) do(op func() error) {
	if p.err == nil {
		p.err = op()
	}
}

func (p *pass) tensor(name string, rows, cols int) cuda.Tensor {
	t := cuda.Tensor{Rows: rows, Cols: cols, Stride: cols}
	p.do(func() (err error) { t, err = p.work(name, rows, cols); return err })
	return t
}

func (p *pass) gemm(dst, a, w cuda.Tensor, add bool) {
	p.do(func() error { return p.dev.Gemm(dst, a, w, add) })
}

func (p *pass) rms(dst, x, w cuda.Tensor) {
	p.do(func() error { return p.dev.RMSNorm(dst, x, w, p.spec.Eps, 0) })
}

func (p *pass) gather(dst, src cuda.Tensor, rows []int32) {
	p.do(func() error { return p.dev.GatherRows(dst, src, rows) })
}

// turn norms and rotates heads.
func (p *pass) turn(x, norm cuda.Tensor, pos []int32) {
	dim := p.spec.HeadDim
	p.do(func() error {
		return p.dev.NormRoPE(x, cuda.NormRoPEArgs{
			X: x, W: norm, Heads: x.Cols / dim, HeadDim: dim, Step: dim, Eps: p.spec.Eps,
			Pos: pos, Rotary: p.graph.Rotary, Theta: p.graph.Theta,
		})
	})
}

// run gives the drafted slots' vectors, ready for the head.
func (p *pass) run(rows tapRows) (cuda.Tensor, error) {
	heads := make([]headLayer, len(p.layers))
	for i := range heads {
		o := ordering{interleaved: p.graph.Interleaved.has(i), tiled: p.graph.Tiled.has(i)}
		if o.interleaved {
			o.rotary = p.graph.Rotary
		}
		ready, err := p.ordered(o)
		if err != nil {
			return cuda.Tensor{}, err
		}
		heads[i] = ready[i]
	}
	known := p.contextRows()
	ctx := p.context(rows, known)
	ctxPos := make([]int32, known)
	for t := range ctxPos {
		ctxPos[t] = int32(t)
	}
	b, h := p.spec.BlockSize, p.spec.Hidden
	n := len(p.anchors) * b
	pos, source, all := make([]int32, n), make([]int32, n), make([]int32, n)
	var keep []int32 // rows of the slots that are wanted
	for i := range n {
		a, j := p.anchors[i/b], i%b
		if p.graph.Relative {
			a = 0
		}
		pos[i], source[i], all[i] = a+int32(j+p.graph.Offset), int32(len(p.anchors)), int32(i)
		if j == 0 && !p.graph.MaskAnchor {
			source[i] = int32(i / b)
		}
		if j >= 1 && j <= p.slots {
			keep = append(keep, int32(i))
		}
	}
	distinct := append(slices.Clip(p.tokens), p.graph.MaskToken)
	first := p.tensor("distinct", len(distinct), h)
	p.gather(first, p.embedding, distinct)
	x := p.tensor("x", n, h)
	p.gather(x, first, source)
	for i, l := range p.layers {
		ctxK, ctxV := p.contextKeys(heads[i], l, ctx, ctxPos)
		want := all
		if i == len(p.layers)-1 {
			want = keep // nobody reads the other rows any more
		}
		x = p.layer(heads[i], l, p.graph.Attention[i], layerRows{x: x, pos: pos, want: want, ctxK: ctxK, ctxV: ctxV, last: i == len(p.layers)-1})
	}
	z := p.tensor("z", len(keep), h)
	p.rms(z, x, p.norm)
	return z, p.err
}

// contextRows is how many positions the context needs.
func (p *pass) contextRows() int {
	return min(max(int(p.anchors[len(p.anchors)-1])+p.graph.Context, 1), p.length)
}

// context is c_t = RMSNorm(Wfc·[taps]) of positions 0..known-1.
func (p *pass) context(rows tapRows, known int) cuda.Tensor {
	h := p.spec.Hidden
	ctx := p.tensor("ctx", known, h)
	add := false
	for i, tap := range p.graph.Taps {
		if p.graph.Mute == i+1 {
			continue
		}
		var from cuda.Tensor
		p.do(func() (err error) { from, err = rows(tap); return err })
		if late := p.graph.late(i); late != 0 {
			moved := p.tensor("late", known, h)
			p.gather(moved, from, lateRows(known, late, p.length))
			from = moved
		}
		p.gemm(ctx, from.RowRange(0, known), p.fc.ColRange(i*h, (i+1)*h), add)
		add = true
	}
	p.rms(ctx, ctx, p.ctxNorm)
	return ctx
}

// lateRows are the rows that stand at 0..n-1 when a state is late.
func lateRows(n, late, length int) []int32 {
	rows := make([]int32, n)
	for t := range rows {
		rows[t] = int32(min(max(t-late, 0), length-1))
	}
	return rows
}

func (p *pass) contextKeys(hl headLayer, l plainLayer, ctx cuda.Tensor, pos []int32) (k, v cuda.Tensor) {
	width := p.spec.KVHeads * p.spec.HeadDim
	k, v = p.tensor("ctxK", ctx.Rows, width), p.tensor("ctxV", ctx.Rows, width)
	p.gemm(k, ctx, hl.k, false)
	p.gemm(v, ctx, l.v, false)
	p.turn(k, hl.kNorm, pos)
	return k, v
}

type layerRows struct {
	x          cuda.Tensor
	pos        []int32
	want       []int32 // the rows whose output is needed
	ctxK, ctxV cuda.Tensor
	last       bool
}

// layer is one transformer layer over the block's rows; it gives the wanted
// rows.
func (p *pass) layer(hl headLayer, l plainLayer, rule drafter.Visibility, r layerRows) cuda.Tensor {
	b, h, wide, narrow := p.spec.BlockSize, p.spec.Hidden, p.spec.Heads*p.spec.HeadDim, p.spec.KVHeads*p.spec.HeadDim
	u := p.tensor("u", r.x.Rows, h)
	p.rms(u, r.x, l.in)
	k, v := p.tensor("k", u.Rows, narrow), p.tensor("v", u.Rows, narrow)
	p.gemm(k, u, hl.k, false)
	p.gemm(v, u, l.v, false)
	p.turn(k, hl.kNorm, r.pos)
	x, asked, pos := r.x, u, r.pos
	if r.last {
		x, asked = p.tensor("xLast", len(r.want), h), p.tensor("uLast", len(r.want), h)
		p.gather(x, r.x, r.want)
		p.gather(asked, u, r.want)
		pos = make([]int32, len(r.want))
		for i, row := range r.want {
			pos[i] = r.pos[row]
		}
	}
	q := p.tensor("q", asked.Rows, wide)
	p.gemm(q, asked, hl.q, false)
	p.turn(q, hl.qNorm, pos)
	spans := make([]cuda.Span, len(r.want))
	for i, row := range r.want {
		block := int(row) / b
		s := rule.Span(int(p.anchors[block]), int(row)%b, block*b, b)
		s.CtxHi = min(max(s.CtxHi+int32(p.graph.Context), s.CtxLo), int32(r.ctxK.Rows))
		s.BlkHi = min(s.BlkHi, int32(block*b+p.graph.Block))
		if p.graph.Across {
			s.BlkLo, s.BlkHi = 0, int32(k.Rows)
		}
		spans[i] = s
	}
	mixed := p.tensor("mixed", asked.Rows, wide)
	p.do(func() error {
		return p.dev.Attention(mixed, cuda.AttentionArgs{
			Q: q, CtxK: r.ctxK, CtxV: r.ctxV, BlkK: k, BlkV: v, Spans: spans,
			QHeads: p.spec.Heads, KVHeads: p.spec.KVHeads, HeadDim: p.spec.HeadDim, Scale: p.scale(),
		})
	})
	p.gemm(x, mixed, hl.o, true)
	y, gate, up := p.tensor("y", x.Rows, h), p.tensor("gate", x.Rows, p.spec.Inter), p.tensor("up", x.Rows, p.spec.Inter)
	p.rms(y, x, l.post)
	p.gemm(gate, y, l.gate, false)
	p.gemm(up, y, l.up, false)
	p.do(func() error { return p.dev.GateMul(gate, gate, up, cuda.SiLU) })
	p.gemm(x, gate, l.down, true)
	return x
}
