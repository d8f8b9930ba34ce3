package cuda

import "fmt"

// The operands of every operation are checked here, for all backends: what
// Check lets pass has shapes that fit and views that lie in their buffers.
// Whether a buffer is the backend's own, only the backend knows.

// operand names one tensor for valid.
type operand struct {
	name string
	t    Tensor
}

// String gives the shape, for error messages.
func (t Tensor) String() string { return fmt.Sprintf("[%d %d]", t.Rows, t.Cols) }

// shapeError wraps ErrShape with the operation and what did not fit.
func shapeError(op, format string, args ...any) error {
	return fmt.Errorf("%s: %w: %s", op, ErrShape, fmt.Sprintf(format, args...))
}

// valid checks that each view lies in its buffer.
func valid(op string, operands ...operand) error {
	for _, o := range operands {
		if o.t.Rows < 0 || o.t.Cols < 0 {
			return shapeError(op, "%s is %d x %d", o.name, o.t.Rows, o.t.Cols)
		}
		if err := o.t.Valid(); err != nil {
			return fmt.Errorf("%s: %s: %w", op, o.name, err)
		}
	}
	return nil
}

// CheckCopy checks an upload to t, or a download of it, of n values.
func CheckCopy(op string, t Tensor, n int) error {
	if err := valid(op, operand{"tensor", t}); err != nil {
		return err
	}
	if t.Rows*t.Cols != n {
		return shapeError(op, "%d values for %s", n, t)
	}
	return nil
}

// CheckLoad checks the operands of [Device.Load].
func CheckLoad(dst Tensor, src []byte, as DType) error {
	if err := CheckCopy("load", dst, len(src)/as.Size()); err != nil {
		return err
	}
	if len(src)%as.Size() != 0 {
		return shapeError("load", "%d bytes of %d a value", len(src), as.Size())
	}
	return nil
}

// CheckFetch checks the operands of [Device.Fetch].
func CheckFetch(src Tensor, as DType, to []Landing) error {
	const op = "fetch"
	if err := valid(op, operand{"src", src}); err != nil {
		return err
	}
	for i, l := range to {
		if l.Lo < 0 || l.Hi < l.Lo || l.Hi > src.Rows || len(l.To) != (l.Hi-l.Lo)*src.Cols*as.Size() {
			return shapeError(op, "landing %d takes rows %d..%d of %s in %d bytes", i, l.Lo, l.Hi, src, len(l.To))
		}
	}
	return nil
}

// CheckGemm checks the operands of [Device.Gemm].
func CheckGemm(dst, a, w Tensor) error {
	const op = "gemm"
	if err := valid(op, operand{"dst", dst}, operand{"a", a}, operand{"w", w}); err != nil {
		return err
	}
	if dst.Rows != a.Rows || dst.Cols != w.Rows || a.Cols != w.Cols {
		return shapeError(op, "dst %s, a %s, w %s: want [M N], [M K], [N K]", dst, a, w)
	}
	return nil
}

// CheckRMSNorm checks the operands of [Device.RMSNorm].
func CheckRMSNorm(dst, x, w Tensor) error {
	const op = "rmsnorm"
	if err := valid(op, operand{"dst", dst}, operand{"x", x}, operand{"w", w}); err != nil {
		return err
	}
	if dst.Rows != x.Rows || dst.Cols != x.Cols || w.Rows != 1 || w.Cols != x.Cols {
		return shapeError(op, "dst %s, x %s, w %s: want [M N], [M N], [1 N]", dst, x, w)
	}
	return nil
}

// Check checks the operands of [Device.NormRoPE].
func (a NormRoPEArgs) Check(dst Tensor) error {
	const op = "normrope"
	if err := valid(op, operand{"dst", dst}, operand{"x", a.X}, operand{"w", a.W}); err != nil {
		return err
	}
	if a.Heads <= 0 || a.HeadDim <= 0 || a.Step < a.HeadDim || a.X.Cols < (a.Heads-1)*a.Step+a.HeadDim {
		return shapeError(op, "x %s in %d heads of %d, one every %d", a.X, a.Heads, a.HeadDim, a.Step)
	}
	if dst.Rows != a.X.Rows || dst.Cols != a.Heads*a.HeadDim || a.W.Rows != 1 || a.W.Cols != a.HeadDim {
		return shapeError(op, "dst %s, x %s, w %s: want [T %d], [T N], [1 %d]", dst, a.X, a.W, a.Heads*a.HeadDim, a.HeadDim)
	}
	if a.Rotary < 0 || a.Rotary > a.HeadDim || a.Rotary%2 != 0 {
		return shapeError(op, "%d rotary dims in heads of %d: want an even number, at most the head", a.Rotary, a.HeadDim)
	}
	if len(a.Pos) != a.X.Rows {
		return shapeError(op, "%d positions for x %s", len(a.Pos), a.X)
	}
	return nil
}

// Check checks the operands of [Device.Attention].
func (a AttentionArgs) Check(dst Tensor) error {
	const op = "attention"
	if err := valid(op, operand{"dst", dst}, operand{"q", a.Q}, operand{"context k", a.CtxK}, operand{"context v", a.CtxV},
		operand{"block k", a.BlkK}, operand{"block v", a.BlkV}); err != nil {
		return err
	}
	if a.HeadDim <= 0 || a.KVHeads <= 0 || a.QHeads <= 0 || a.QHeads%a.KVHeads != 0 {
		return shapeError(op, "%d query heads, %d key heads, head dim %d", a.QHeads, a.KVHeads, a.HeadDim)
	}
	if a.Q.Cols != a.QHeads*a.HeadDim || dst.Cols != a.Q.Cols || dst.Rows != a.Q.Rows {
		return shapeError(op, "dst %s, q %s: want [M %d]", dst, a.Q, a.QHeads*a.HeadDim)
	}
	for _, kv := range []struct {
		name string
		k, v Tensor
	}{{"context", a.CtxK, a.CtxV}, {"block", a.BlkK, a.BlkV}} {
		if kv.k.Rows != kv.v.Rows || kv.k.Cols != kv.v.Cols ||
			kv.k.Rows > 0 && kv.k.Cols != a.KVHeads*a.HeadDim {
			return shapeError(op, "%s k %s, v %s: want [S %d]", kv.name, kv.k, kv.v, a.KVHeads*a.HeadDim)
		}
	}
	if len(a.Spans) != a.Q.Rows {
		return shapeError(op, "%d spans for q %s", len(a.Spans), a.Q)
	}
	for i, s := range a.Spans {
		if !within(s.CtxLo, s.CtxHi, a.CtxK.Rows) || !within(s.BlkLo, s.BlkHi, a.BlkK.Rows) {
			return shapeError(op, "row %d sees %+v of %d context and %d block rows", i, s, a.CtxK.Rows, a.BlkK.Rows)
		}
	}
	return nil
}

// within says whether lo..hi-1 is empty or lies in 0..n-1.
func within(lo, hi int32, n int) bool { return lo >= hi || lo >= 0 && int(hi) <= n }

// CheckGateMul checks the operands of [Device.GateMul].
func CheckGateMul(dst, gate, x Tensor, act Activation) error {
	const op = "gatemul"
	if err := valid(op, operand{"dst", dst}, operand{"gate", gate}, operand{"x", x}); err != nil {
		return err
	}
	if dst.Rows != gate.Rows || dst.Cols != gate.Cols || dst.Rows != x.Rows || dst.Cols != x.Cols {
		return shapeError(op, "dst %s, gate %s, x %s: want one shape", dst, gate, x)
	}
	if act != SiLU && act != Sigmoid {
		return shapeError(op, "unknown activation %d", act)
	}
	return nil
}

// CheckGather checks the operands of [Device.GatherRows].
func CheckGather(dst, src Tensor, rows []int32) error {
	const op = "gather"
	if err := valid(op, operand{"dst", dst}, operand{"src", src}); err != nil {
		return err
	}
	if dst.Rows != len(rows) || dst.Cols != src.Cols {
		return shapeError(op, "dst %s, src %s, %d rows: want [R N], [S N], R", dst, src, len(rows))
	}
	for i, r := range rows {
		if r < 0 || int(r) >= src.Rows {
			return shapeError(op, "row %d of %d is %d, but src is %s", i, len(rows), r, src)
		}
	}
	return nil
}

// CheckScatter checks the operands of [Device.ScatterRows].
func CheckScatter(dst, src Tensor, rows []int32) error {
	const op = "scatter"
	if err := valid(op, operand{"dst", dst}, operand{"src", src}); err != nil {
		return err
	}
	if src.Rows != len(rows) || dst.Cols != src.Cols {
		return shapeError(op, "dst %s, src %s, %d rows: want [S N], [R N], R", dst, src, len(rows))
	}
	for i, r := range rows {
		if r < 0 || int(r) >= dst.Rows {
			return shapeError(op, "row %d of %d is %d, but dst is %s", i, len(rows), r, dst)
		}
	}
	return nil
}

// CheckConv checks the operands of [Device.Conv].
func CheckConv(dst, x, w, history Tensor) error {
	const op = "conv"
	if err := valid(op, operand{"dst", dst}, operand{"x", x}, operand{"w", w}, operand{"history", history}); err != nil {
		return err
	}
	if dst.Rows != x.Rows || dst.Cols != x.Cols || w.Rows != x.Cols || w.Cols < 1 ||
		history.Rows != w.Cols-1 || (history.Rows > 0 && history.Cols != x.Cols) {
		return shapeError(op, "dst %s, x %s, w %s, history %s: want [T C], [T C], [C K], [K-1 C]", dst, x, w, history)
	}
	return nil
}

// Check checks the operands of [Device.DeltaRule].
func (a DeltaArgs) Check(dst Tensor) error {
	const op = "deltarule"
	if err := valid(op, operand{"dst", dst}, operand{"q", a.Q}, operand{"k", a.K}, operand{"v", a.V}, operand{"a", a.A},
		operand{"b", a.B}, operand{"A_log", a.ALog}, operand{"dt_bias", a.DTBias}, operand{"state", a.State}); err != nil {
		return err
	}
	hk, hv, t := a.KeyHeads, a.ValHeads, a.Q.Rows
	if hk <= 0 || hv <= 0 || hv%hk != 0 || a.KeyDim <= 0 || a.ValDim <= 0 || a.Chunk < 0 {
		return shapeError(op, "%d key heads of %d, %d value heads of %d, chunk %d", hk, a.KeyDim, hv, a.ValDim, a.Chunk)
	}
	for _, want := range []struct {
		name       string
		t          Tensor
		rows, cols int
	}{
		{"q", a.Q, t, hk * a.KeyDim},
		{"k", a.K, t, hk * a.KeyDim},
		{"v", a.V, t, hv * a.ValDim},
		{"dst", dst, t, hv * a.ValDim},
		{"a", a.A, t, hv},
		{"b", a.B, t, hv},
		{"A_log", a.ALog, 1, hv},
		{"dt_bias", a.DTBias, 1, hv},
		{"state", a.State, hv * a.KeyDim, a.ValDim},
	} {
		if want.t.Rows != want.rows || want.t.Cols != want.cols {
			return shapeError(op, "%s is %s: want [%d %d]", want.name, want.t, want.rows, want.cols)
		}
	}
	return nil
}

// Check checks the operands of [Device.Head].
func (a HeadArgs) Check() error {
	const op = "head"
	if err := valid(op, operand{"hidden", a.Hidden}, operand{"weight", a.Weight}); err != nil {
		return err
	}
	m, vocab := a.Hidden.Rows, a.Weight.Rows
	if m > 0 && (vocab == 0 || a.Hidden.Cols != a.Weight.Cols) {
		return shapeError(op, "hidden %s, weight %s: want [M H], [V H]", a.Hidden, a.Weight)
	}
	if a.K < 0 || a.K > vocab {
		return shapeError(op, "top %d of %d logits", a.K, vocab)
	}
	if a.Labels != nil && len(a.Labels) != m {
		return shapeError(op, "%d labels for hidden %s", len(a.Labels), a.Hidden)
	}
	for i, id := range a.Labels {
		if id < -1 || int(id) >= vocab {
			return shapeError(op, "label %d is %d: want -1 or an id below %d", i, id, vocab)
		}
	}
	if a.Losses == 0 {
		return nil
	}
	if err := valid(op, operand{"target", a.Target}); err != nil {
		return err
	}
	if a.Target.Rows > 0 && a.Target.Cols != a.Weight.Cols {
		return shapeError(op, "target %s, weight %s: want [P H], [V H]", a.Target, a.Weight)
	}
	if len(a.TargetRow) != m {
		return shapeError(op, "%d target rows for hidden %s", len(a.TargetRow), a.Hidden)
	}
	for i, r := range a.TargetRow {
		if r < -1 || int(r) >= a.Target.Rows {
			return shapeError(op, "target row %d is %d: want -1 or a row of target %s", i, r, a.Target)
		}
	}
	return nil
}
