// Package gpu is where the CUDA backend of [cuda.Device] opens. [Open] exists
// with and without the build tag "cuda", so that callers need no tag of their
// own: what is missing is an error to be shown, not a program that does not
// build.
package gpu

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
)

// Config says which device to open.
type Config struct {
	// Device is the index of the device as CUDA counts them.
	Device int
}

// Validate reports a Config that cannot be meant.
func (c Config) Validate() error {
	if c.Device < 0 {
		return fmt.Errorf("gpu device: index %d is negative", c.Device)
	}
	return nil
}

// reason is why no device opens, and what to do.
const reason = "this version has no CUDA kernels yet; use --backend cpu"

// Open opens a CUDA device. This version has no kernels: the error always
// wraps [cuda.ErrUnavailable] and says what to do instead.
func Open(cfg Config) (cuda.Device, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("opening CUDA device %d: %w: %s", cfg.Device, cuda.ErrUnavailable, reason)
}
