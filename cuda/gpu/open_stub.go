//go:build !cuda || !cgo

package gpu

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
)

// Built says whether the program has the backend, whatever the machine has.
const Built = false

// Open opens a CUDA device. This build has none: the error wraps
// [cuda.ErrUnavailable] and says what to do instead.
func Open(cfg Config) (cuda.Device, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("opening CUDA device %d: %w: this program was built without the tag cuda; build it with -tags cuda, or use --backend cpu",
		cfg.Device, cuda.ErrUnavailable)
}
