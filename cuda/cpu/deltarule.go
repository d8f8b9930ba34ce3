package cpu

import (
	"math"

	"github.com/draftscope/draftscope/cuda"
)

// defaultChunk is the number of rows solved at once when the caller leaves
// the choice.
const defaultChunk = 64

// leastDecay is a logarithm whose exponential is 0 in float32, and which, unlike
// -Inf, may be subtracted from itself.
const leastDecay = -1e4

// delta is one call of the gated delta rule. q and k are normalised, q also
// scaled; beta and g hold one value a row and value head.
type delta struct {
	dst, q, k, v, beta, g, state matrix
	keyDim, valDim, chunk        int
}

// DeltaRule implements [cuda.Device]. The state is kept in float32. With
// Chunk 1 a row's result depends on the rows before it alone, bit for bit;
// longer chunks sum in an order that follows the chunks' borders, so cutting
// the rows into other calls changes the last bits.
func (d *Device) DeltaRule(dst cuda.Tensor, args cuda.DeltaArgs) error {
	if err := args.Check(dst); err != nil {
		return err
	}
	var q, k, a, b, aLog, dtBias matrix
	r := &delta{keyDim: args.KeyDim, valDim: args.ValDim, chunk: args.Chunk}
	if err := views("deltarule", operand{dst, &r.dst}, operand{args.Q, &q}, operand{args.K, &k}, operand{args.V, &r.v},
		operand{args.A, &a}, operand{args.B, &b}, operand{args.ALog, &aLog}, operand{args.DTBias, &dtBias},
		operand{args.State, &r.state}); err != nil {
		return err
	}
	hk, hv, t := args.KeyHeads, args.ValHeads, q.rows
	if t == 0 {
		return nil
	}
	if r.chunk == 0 {
		r.chunk = defaultChunk
	}
	r.q, r.k = dense(t, q.cols), dense(t, k.cols)
	r.beta, r.g = dense(t, hv), dense(t, hv)
	scale := 1 / math.Sqrt(float64(r.keyDim))
	d.rows(t, (q.cols+hv)*8, func(lo, hi int) {
		for i := lo; i < hi; i++ {
			for h := 0; h < q.cols; h += r.keyDim {
				unit(r.q.row(i)[h:h+r.keyDim], q.row(i)[h:], scale)
				unit(r.k.row(i)[h:h+r.keyDim], k.row(i)[h:], 1)
			}
			for h := range hv {
				r.beta.row(i)[h] = float32(1 / (1 + math.Exp(-float64(b.row(i)[h]))))
				g := -math.Exp(float64(aLog.row(0)[h])) * softplus(float64(a.row(i)[h])+float64(dtBias.row(0)[h]))
				if g < leastDecay {
					g = leastDecay
				}
				r.g.row(i)[h] = float32(g)
			}
		}
	})
	d.each(hv, t*7*r.keyDim*r.valDim, func(h int) {
		for lo := 0; lo < t; lo += r.chunk {
			if hi := min(lo+r.chunk, t); hi-lo > 1 {
				r.solve(h, h/(hv/hk), lo, hi)
			} else {
				r.step(h, h/(hv/hk), lo)
			}
		}
	})
	return nil
}

// unit sets dst = x / sqrt(Σx² + 1e-6) · scale.
func unit(dst, x []float32, scale float64) {
	x = x[:len(dst)]
	inv := float32(scale / math.Sqrt(kernels.squares(x)+1e-6))
	for i, v := range x {
		dst[i] = v * inv
	}
}

// softplus is log(1+e^x) without overflow.
func softplus(x float64) float64 {
	if x > 0 {
		return x + math.Log1p(math.Exp(-x))
	}
	return math.Log1p(math.Exp(x))
}

// head is the state of value head h.
func (r *delta) head(h int) matrix {
	return r.state.block(h*r.keyDim, (h+1)*r.keyDim, 0, r.valDim)
}

// step is the recurrence for row t of value head h, which reads key head kh:
// S *= α; u = β(v - Sᵀk); S += k uᵀ; o = Sᵀq.
func (r *delta) step(h, kh, t int) {
	s := r.head(h)
	q, k := r.q.row(t)[kh*r.keyDim:(kh+1)*r.keyDim], r.k.row(t)[kh*r.keyDim:(kh+1)*r.keyDim]
	v, o := r.v.row(t)[h*r.valDim:(h+1)*r.valDim], r.dst.row(t)[h*r.valDim:(h+1)*r.valDim]
	alpha, beta := float32(math.Exp(float64(r.g.row(t)[h]))), r.beta.row(t)[h]
	u := make([]float32, r.valDim)
	kernels.mix(u, k, s) // of S before the decay, which commutes with the sum
	for j := range u {
		u[j] = beta * (v[j] - float32(alpha*u[j]))
	}
	for i, ki := range k {
		row := s.row(i)
		for j, uj := range u {
			row[j] = float32(row[j]*alpha) + float32(ki*uj)
		}
	}
	clear(o)
	kernels.mix(o, q, s)
}

// solve is the same for rows lo..hi-1 at once. With G the sums of g since lo,
// D_ij = e^(G_i-G_j) for j <= i, and A the part of diag(β)(K Kᵀ ⊙ D) below
// the diagonal, the rows u are the solution of
//
//	(I+A) U = diag(β)(V - diag(e^G) K S)
//
// and then O = diag(e^G) Q S + (Q Kᵀ ⊙ D) U, S' = e^G_last S + Σ e^(G_last-G_i) k_i u_iᵀ.
// Only differences G_i-G_j <= 0 are ever exponentiated: e^-G alone overflows.
func (r *delta) solve(h, kh, lo, hi int) {
	n := hi - lo
	s := r.head(h)
	q := r.q.block(lo, hi, kh*r.keyDim, (kh+1)*r.keyDim)
	k := r.k.block(lo, hi, kh*r.keyDim, (kh+1)*r.keyDim)
	v := r.v.block(lo, hi, h*r.valDim, (h+1)*r.valDim)
	o := r.dst.block(lo, hi, h*r.valDim, (h+1)*r.valDim)
	sums := make([]float64, n)
	total := 0.0
	for i := range sums {
		total += float64(r.g.row(lo + i)[h])
		sums[i] = total
	}
	kk, qk := dense(n, n), dense(n, n)
	multiply(kk, k, k, false)
	multiply(qk, q, k, false)
	u := dense(n, r.valDim)
	acc := make([]float32, r.valDim)
	for i := range n {
		decay := float32(math.Exp(sums[i]))
		beta := r.beta.row(lo + i)[h]
		clear(acc)
		kernels.mix(acc, k.row(i), s)
		ui := u.row(i)
		for j, x := range v.row(i) {
			ui[j] = x - float32(decay*acc[j])
		}
		oi := o.row(i)
		clear(oi)
		kernels.mix(oi, q.row(i), s)
		for j := range oi {
			oi[j] *= decay
		}
		for j := range i {
			e := float32(math.Exp(sums[i] - sums[j]))
			kk.row(i)[j] *= -e
			qk.row(i)[j] *= e
		}
		kernels.mix(ui, kk.row(i)[:i], u)
		for j := range ui {
			ui[j] *= beta
		}
		kernels.mix(oi, qk.row(i)[:i+1], u)
	}
	last := float32(math.Exp(total))
	for i := range s.rows {
		for j := range s.row(i) {
			s.row(i)[j] *= last
		}
	}
	// S' gains diag(e^(G_last-G)) K, transposed, times U.
	written := dense(s.rows, n)
	for t := range n {
		e := float32(math.Exp(total - sums[t]))
		for i, ki := range k.row(t) {
			written.row(i)[t] = e * ki
		}
	}
	for i := range s.rows {
		kernels.mix(s.row(i), written.row(i), u)
	}
}
