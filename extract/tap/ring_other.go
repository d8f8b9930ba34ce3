//go:build !linux

package tap

import (
	"errors"
	"fmt"
	"os"
)

const kindMemfd = "memfd"

func mapRing(f *os.File, _ ringAd, _ int64) (*ring, error) {
	return nil, errors.Join(fmt.Errorf("mapping the ring: %w", errors.ErrUnsupported), f.Close())
}
