package backendtest

import "github.com/draftscope/draftscope/cuda"

// Rounding is a plain bf16 version of a float32 device: the same operations,
// with every value that is kept rounded to bf16. It is the yardstick of what
// bf16 must cost, and slow. Logits stay float32, as does the state of the
// delta rule.
func Rounding(d cuda.Device) cuda.Device { return rounding{d} }

type rounding struct{ cuda.Device }

// round rounds t where an operation succeeded.
func (r rounding) round(t cuda.Tensor, err error) error {
	if err != nil || t.Rows == 0 || t.Cols == 0 {
		return err
	}
	values := make([]float32, t.Rows*t.Cols)
	if err := r.Download(values, t); err != nil {
		return err
	}
	return r.Device.Upload(t, rounded(values))
}

func (r rounding) Name() string { return "bf16 emulated on " + r.Device.Name() }

func (r rounding) Upload(dst cuda.Tensor, src []float32) error {
	return r.Device.Upload(dst, rounded(src))
}

func (r rounding) Load(dst cuda.Tensor, src []byte, as cuda.DType) error {
	return r.round(dst, r.Device.Load(dst, src, as))
}

func (r rounding) Gemm(dst, a, w cuda.Tensor, add bool) error {
	return r.round(dst, r.Device.Gemm(dst, a, w, add))
}

func (r rounding) RMSNorm(dst, x, w cuda.Tensor, eps, gain float32) error {
	return r.round(dst, r.Device.RMSNorm(dst, x, w, eps, gain))
}

func (r rounding) NormRoPE(dst cuda.Tensor, args cuda.NormRoPEArgs) error {
	return r.round(dst, r.Device.NormRoPE(dst, args))
}

func (r rounding) Attention(dst cuda.Tensor, args cuda.AttentionArgs) error {
	return r.round(dst, r.Device.Attention(dst, args))
}

func (r rounding) GateMul(dst, gate, x cuda.Tensor, act cuda.Activation) error {
	return r.round(dst, r.Device.GateMul(dst, gate, x, act))
}

func (r rounding) Conv(dst, x, w, history cuda.Tensor) error {
	return r.round(dst, r.Device.Conv(dst, x, w, history))
}

func (r rounding) DeltaRule(dst cuda.Tensor, args cuda.DeltaArgs) error {
	return r.round(dst, r.Device.DeltaRule(dst, args))
}
