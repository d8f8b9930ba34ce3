//go:build !unix

package pipeline

import (
	"fmt"
	"os"
)

// lockStore only creates the directory: this system has no flock, and it is
// the user's duty not to open one store twice.
func lockStore(dir string) (unlock func() error, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("creating the stream store: %w", err)
	}
	return func() error { return nil }, nil
}
