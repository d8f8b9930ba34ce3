// Package gpu is where the CUDA backend of [cuda.Device] opens. [Open] exists
// with and without the build tag "cuda", so that callers need no tag of their
// own: what is missing is an error to be shown, not a program that does not
// build.
//
// With the tag, [Open] gives a device on which every operation is a kernel of
// cuda/kernels, named as the file here that launches it. Devices on one card
// share its context: each can use what another has uploaded. An operation
// only starts its kernels, in order; Upload, Download and Head wait for them.
package gpu

import "fmt"

// Precision is the type in which a device keeps values.
type Precision int

const (
	// F32 keeps and multiplies float32.
	F32 Precision = iota
	// BF16 keeps bfloat16, half the memory, and sums in float32. The state
	// of the delta rule and the logits stay float32.
	BF16
)

// String names the precision as --precision does.
func (p Precision) String() string {
	if p == BF16 {
		return "bf16"
	}
	return "f32"
}

// Config says which device to open.
type Config struct {
	// Device is the index of the device as CUDA counts them.
	Device int
	// Precision is what the device computes in.
	Precision Precision
	// Plain leaves out cuBLASLt and the kernels that only one architecture
	// has, so that the understudies can be tested on any card.
	Plain bool
}

// Validate reports a Config that cannot be meant.
func (c Config) Validate() error {
	if c.Device < 0 {
		return fmt.Errorf("gpu device: index %d is negative", c.Device)
	}
	if c.Precision != F32 && c.Precision != BF16 {
		return fmt.Errorf("gpu precision: %d is neither F32 nor BF16", c.Precision)
	}
	return nil
}
