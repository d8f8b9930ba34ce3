package cuda

// DType is how values lie in memory outside of a device, little-endian.
type DType int

// The dtypes of states and weights.
const (
	F32 DType = iota
	BF16
)

// Size is the number of bytes of a value.
func (t DType) Size() int {
	if t == BF16 {
		return 2
	}
	return 4
}

// Landing is where rows Lo..Hi-1 of a [Device.Fetch] go.
type Landing struct {
	Lo, Hi int
	To     []byte // (Hi-Lo)*Cols values
}

// Flight is rows on their way to the host.
type Flight interface {
	// Wait returns when they have landed, and how many values of each row of
	// the fetched tensor are NaN or infinite as they arrived. It is called
	// once, before the device closes.
	Wait() (odd []int32, err error)
}
