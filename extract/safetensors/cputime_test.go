//go:build unix

package safetensors_test

import (
	"syscall"
	"testing"
	"time"
)

// processTime is the processor time that this test binary has used so far,
// which other work on the machine does not lengthen.
func processTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
