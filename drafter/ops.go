package drafter

import "github.com/draftscope/draftscope/cuda"

// ops issues operations until one fails, so that a forward pass reads as its
// formula. The first error stays in err and the rest do nothing.
type ops struct {
	dev cuda.Device
	err error
}

func (o *ops) do(f func() error) {
	if o.err == nil {
		o.err = f()
	}
}

func (o *ops) gemm(dst, a, w cuda.Tensor, add bool) {
	o.do(func() error { return o.dev.Gemm(dst, a, w, add) })
}

// norm is the drafters' RMSNorm: gain w, never (1+w).
func (o *ops) norm(dst, x, w cuda.Tensor, eps float32) {
	o.do(func() error { return o.dev.RMSNorm(dst, x, w, eps, 0) })
}

// normRope norms and rotates the heads of x, which lie one after the other, in
// place.
func (o *ops) normRope(x, w cuda.Tensor, pos []int32, s Spec) {
	o.do(func() error {
		return o.dev.NormRoPE(x, cuda.NormRoPEArgs{
			X: x, W: w, Heads: x.Cols / s.HeadDim, HeadDim: s.HeadDim, Step: s.HeadDim, Eps: s.Eps,
			Pos: pos, Rotary: s.Rotary, Theta: s.Theta,
		})
	})
}

func (o *ops) gather(dst, src cuda.Tensor, rows []int32) {
	o.do(func() error { return o.dev.GatherRows(dst, src, rows) })
}

func (o *ops) attention(dst cuda.Tensor, args cuda.AttentionArgs) {
	o.do(func() error { return o.dev.Attention(dst, args) })
}

func (o *ops) gateMul(dst, gate, x cuda.Tensor) {
	o.do(func() error { return o.dev.GateMul(dst, gate, x, cuda.SiLU) })
}

// scratch keeps one buffer a name and grows it as needed, so that a pass
// allocates nothing once the largest one has run.
type scratch struct {
	dev  cuda.Device
	bufs map[string]cuda.Buffer
}

// tensor is rows x cols of the buffer called name; its content is whatever was
// left there. Taking it again takes the same memory.
func (s *scratch) tensor(o *ops, name string, rows, cols int) cuda.Tensor {
	if o.err != nil {
		return cuda.Tensor{Rows: rows, Cols: cols, Stride: cols}
	}
	buf := s.bufs[name]
	if buf == nil || buf.Len() < rows*cols {
		grown, err := s.dev.New(rows * cols)
		if err != nil {
			o.err = err
			return cuda.Tensor{Rows: rows, Cols: cols, Stride: cols}
		}
		if buf != nil {
			buf.Close()
		}
		if s.bufs == nil {
			s.bufs = map[string]cuda.Buffer{}
		}
		s.bufs[name], buf = grown, grown
	}
	return cuda.Matrix(buf, rows, cols)
}

func (s *scratch) close() {
	for _, b := range s.bufs {
		b.Close()
	}
	s.bufs = nil
}
