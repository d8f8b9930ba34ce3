// Package cuda declares the numeric operations that draftscope needs, once,
// for every backend: [cpu] is always built, [gpu] needs the build
// tag "cuda" and a device. Models (extract/target, drafter) are written over
// [Device] alone, so that a draft means the same thing on both.
//
// All matrices are row-major. Every operation is deterministic, and the
// result for one row never depends on which other rows share the call: the
// same states cut into other batches give bit-equal numbers. The one exception
// is [Device.DeltaRule] in chunks, whose sums follow the borders of the
// chunks, counted from the first row of a call: there, calls must end where
// chunks end.
//
// [cpu]: https://pkg.go.dev/github.com/draftscope/draftscope/cuda/cpu
// [gpu]: https://pkg.go.dev/github.com/draftscope/draftscope/cuda/gpu
package cuda

import "fmt"

// Buffer is a block of device memory that holds n float32 values, owned by
// whoever called [Device.New].
type Buffer interface {
	// Len is the number of float32 values.
	Len() int
	// Close gives the memory back. A second call does nothing.
	Close()
}

// Tensor is a view of a buffer: Rows rows of Cols values, each row starting
// Stride values after the one before it. Off is the index of the first value.
// The zero Tensor stands for "not given" where an operation allows that.
type Tensor struct {
	Buf    Buffer
	Off    int
	Rows   int
	Cols   int
	Stride int
}

// Matrix views the start of buf as rows x cols, densely packed.
func Matrix(buf Buffer, rows, cols int) Tensor {
	return Tensor{Buf: buf, Rows: rows, Cols: cols, Stride: cols}
}

// RowRange is the view of rows lo..hi-1.
func (t Tensor) RowRange(lo, hi int) Tensor {
	t.Off += lo * t.Stride
	t.Rows = hi - lo
	return t
}

// ColRange is the view of columns lo..hi-1 of every row.
func (t Tensor) ColRange(lo, hi int) Tensor {
	t.Off += lo
	t.Cols = hi - lo
	return t
}

// Heads views each row of n*dim columns as n rows of dim columns. The tensor
// must be dense (Stride == Cols).
func (t Tensor) Heads(dim int) Tensor {
	if t.Stride != t.Cols || t.Cols%dim != 0 {
		panic(fmt.Sprintf("cuda: cannot view %d columns (stride %d) as heads of %d", t.Cols, t.Stride, dim))
	}
	t.Rows *= t.Cols / dim
	t.Cols, t.Stride = dim, dim
	return t
}

// Valid reports an error when the view leaves its buffer.
func (t Tensor) Valid() error {
	if t.Rows == 0 || t.Cols == 0 {
		return nil
	}
	if t.Buf == nil || t.Off < 0 || t.Stride < t.Cols || t.Off+(t.Rows-1)*t.Stride+t.Cols > t.Buf.Len() {
		return fmt.Errorf("%w: %d x %d (stride %d, offset %d) leaves its buffer", ErrShape, t.Rows, t.Cols, t.Stride, t.Off)
	}
	return nil
}

// Activation names the function that [Device.GateMul] applies to its gate.
type Activation int

// The activations of the models that draftscope runs.
const (
	SiLU    Activation = iota // x·sigmoid(x)
	Sigmoid                   // 1/(1+e^-x)
)

// Span says which keys one query row may see: context rows CtxLo..CtxHi-1
// and rows BlkLo..BlkHi-1 of its own call ("block" rows). Masks are decided
// by the models, in plain Go, and only carried out here. A row that sees
// nothing yields zeros, never NaN.
type Span struct {
	CtxLo, CtxHi int32
	BlkLo, BlkHi int32
}

// KeyTile is how many keys a backend may sum at once, in tiles that begin at
// multiples of it in CtxK. Keys that move to another place must move by a
// multiple of KeyTile for a row's result to stay the same to the bit.
const KeyTile = 64

// AttentionArgs are the operands of [Device.Attention]. Query head g reads
// key/value head g div (QHeads/KVHeads). The context may hold the keys of many
// sequences, each at a multiple of [KeyTile] rows, of which spans show a row
// its own.
type AttentionArgs struct {
	Q          Tensor // [M, QHeads*HeadDim]
	CtxK, CtxV Tensor // [S, KVHeads*HeadDim]; may be zero
	BlkK, BlkV Tensor // [R, KVHeads*HeadDim]; may be zero
	Spans      []Span // one a query row
	// Block is how many query rows always come together, as those of a draft
	// block do, the first of them at a multiple of Block; 0 promises nothing.
	// It changes no meaning: a backend may use it to share work among rows
	// that share every call anyway.
	Block   int
	QHeads  int
	KVHeads int
	HeadDim int
	Scale   float32
}

// NormRoPEArgs are the operands of [Device.NormRoPE]. Head h of a row of X is
// its columns h*Step..h*Step+HeadDim-1: Step is HeadDim where heads lie one
// after the other, more where something lies between them, such as the gates
// of Qwen3.5's queries.
type NormRoPEArgs struct {
	X       Tensor // [T, at least (Heads-1)*Step+HeadDim]
	W       Tensor // [1, HeadDim]
	Heads   int
	HeadDim int
	Step    int
	Eps     float32
	Gain    float32 // added to W: 0, or 1 for Qwen3.5's (1+w) norms
	Pos     []int32 // one a row
	Rotary  int     // dims of a head that turn, the first ones
	Theta   float64
}

// DeltaArgs are the operands of [Device.DeltaRule], the gated delta rule of
// Qwen3.5 (hybrid.md §4.4-4.7). Q, K, V come after the convolution; the
// operation L2-normalises q and k, scales q by KeyDim^-0.5, and computes
// beta = sigmoid(b), g = -exp(A_log)·softplus(a + dt_bias) itself.
type DeltaArgs struct {
	Q, K     Tensor // [T, KeyHeads*KeyDim]
	V        Tensor // [T, ValueHeads*ValueDim]
	A, B     Tensor // [T, ValueHeads]
	ALog     Tensor // [1, ValueHeads]
	DTBias   Tensor // [1, ValueHeads]
	State    Tensor // [ValueHeads*KeyDim, ValueDim] fp32, read and updated
	KeyHeads int
	ValHeads int
	KeyDim   int
	ValDim   int
	// Chunk is the number of rows solved at once; 1 is the plain recurrence,
	// 0 lets the backend choose.
	Chunk int
}

// Losses is a set of divergences between a draft distribution q and the
// target's distribution p (dflash.md §3.5), natural logarithm, T = 1.
type Losses uint8

// The divergences that [Device.Head] can compute beside the cross-entropy.
const (
	KL  Losses = 1 << iota // Σ p log(p/q)
	RKL                    // Σ q log(q/p)
	JSD                    // ½ KL(p‖m) + ½ KL(q‖m), m = (p+q)/2
	TV                     // 1 − Σ min(p, q)
)

// HeadArgs are the operands of [Device.Head].
type HeadArgs struct {
	Hidden Tensor // [M, H], already normed
	Weight Tensor // [V, H]
	// K is how many of the largest logits to return for each row.
	K int
	// Labels has one token id a row, -1 for none; nil for no labels at all.
	Labels []int32
	// Target holds normed target states [P, H]; TargetRow[i] is the row of
	// Target whose distribution row i is compared with, -1 for none. Both are
	// unused when Losses is 0.
	Target    Tensor
	TargetRow []int32
	Losses    Losses
}

// HeadResult has one entry a row of HeadArgs.Hidden. What was not asked for
// is nil; a row without a label or target row has NaN there (rank: -1).
type HeadResult struct {
	LSE        []float32 // log Σ exp(logit) over the vocabulary
	TopIDs     []int32   // [M*K], largest logit first, ties by lowest id
	TopLogits  []float32 // [M*K]
	LabelLogit []float32
	LabelRank  []int32 // ids that come before the label in TopIDs' order
	KL         []float32
	RKL        []float32
	JSD        []float32
	TV         []float32
}

// Device is one backend on one device. Calls are made from one goroutine at a
// time; they may run behind, but results are visible to later calls and to
// Download. Shape mistakes are errors that wrap [ErrShape].
type Device interface {
	// Name says what runs the operations, for people ("cpu avx2 (2 threads)"):
	// the kind of arithmetic, which decides the last bits, and in parentheses
	// what does not.
	Name() string
	// New allocates n zeroed float32 values.
	New(n int) (Buffer, error)
	// Grow gives a buffer of n values which begins with those of buf, and zeros
	// after them; use it in place of buf, as with append. A nil buf is an empty
	// one, and one that is long enough already comes back as it is. Growing by
	// little often is cheap. On an error buf is as it was.
	Grow(buf Buffer, n int) (Buffer, error)
	// Upload copies Rows*Cols values into dst, Download copies them out.
	Upload(dst Tensor, src []float32) error
	Download(dst []float32, src Tensor) error
	// DType is how the device keeps values.
	DType() DType
	// Load is Upload of Rows*Cols values of any dtype, as files hold them.
	Load(dst Tensor, src []byte, as DType) error
	// Fetch starts a copy of src's rows, as they are now, to the host: each
	// landing gets its rows one after the other. Values of the device's own
	// dtype arrive bit by bit, others are converted, and rounded to nearest.
	// The copy runs beside later calls; landings are left alone until
	// [Flight.Wait] has returned.
	Fetch(src Tensor, as DType, to []Landing) (Flight, error)
	// HostAlloc takes n bytes of the host's memory that Fetch fills at the full
	// rate. HostFree gives them back, from any goroutine.
	HostAlloc(n int) ([]byte, error)
	HostFree(b []byte)

	// Gemm sets dst[M,N] = a[M,K] · w[N,K]ᵀ, or adds that to dst.
	Gemm(dst, a, w Tensor, add bool) error
	// RMSNorm sets each row of dst to x / sqrt(mean(x²)+eps) · (gain + w),
	// where w has one row of Cols values and gain is 0, or 1 for Qwen3.5's
	// (1+w) norms. dst may be x.
	RMSNorm(dst, x, w Tensor, eps, gain float32) error
	// NormRoPE gives every head of X RMSNorm and then RoPE, in one pass, and
	// sets dst [T, Heads*HeadDim] to them: row t is rotated by Pos[t], halves
	// within the rotary dims (neox). dst may be the heads of X themselves where
	// Step is HeadDim, and else shares no memory with it.
	NormRoPE(dst Tensor, args NormRoPEArgs) error
	// Attention sets dst [M, QHeads*HeadDim] to softmax(q·kᵀ·scale + mask)·v.
	Attention(dst Tensor, args AttentionArgs) error
	// GateMul sets dst = act(gate) ⊙ x. dst may be either operand.
	GateMul(dst, gate, x Tensor, act Activation) error
	// GatherRows sets dst's row i to src's row rows[i].
	GatherRows(dst, src Tensor, rows []int32) error
	// ScatterRows sets dst's row rows[i] to src's row i. No row is named twice,
	// and dst shares no memory with src.
	ScatterRows(dst, src Tensor, rows []int32) error
	// Conv is the causal depthwise convolution with SiLU of hybrid.md §4.2:
	// x [T, C], w [C, taps], history [taps-1, C] holds the rows before x,
	// oldest first, and is updated to the last taps-1 rows. dst is not x.
	Conv(dst, x, w, history Tensor) error
	// DeltaRule sets dst [T, ValHeads*ValDim] to the gated delta rule's output.
	DeltaRule(dst Tensor, args DeltaArgs) error
	// Head multiplies hidden rows with the vocabulary head and reduces each
	// row of logits at once; no full logits survive the call.
	Head(args HeadArgs) (HeadResult, error)
	// Trees builds the trees of the most likely prefixes of many blocks (DDTree,
	// arXiv 2604.12989, Algorithm 1), and verifies them, and the chains, against
	// the tokens that followed. A tree of budget N is that of the first N
	// prefixes popped: the most likely first, followed by its next sibling and
	// its first child. A prefix's log-probability is that of its parent plus its
	// token's, or its elder sibling's less that one's token's plus its own,
	// rounded to float64 at each step; equal ones go by the lexicographically
	// smaller tuple of ranks, a prefix before its extensions.
	Trees(args TreeArgs) (TreeResult, error)
	// Similarity compares each row of a with that of b, in one pass.
	Similarity(a, b Tensor) ([]Similarity, error)
	// Limits measures what the device reaches at its best, in products of its
	// own type and in copies. It takes a moment and some memory: ask once, before
	// the work begins.
	Limits() (Limits, error)

	// Close frees the device. Buffers must be closed before, and host memory
	// given back.
	Close() error
}
