package gpu_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/gpu"
)

func TestOpenSaysWhatToUseInstead(t *testing.T) {
	if os.Getenv("DRAFTSCOPE_REQUIRE_GPU") == "1" {
		t.Fatal("DRAFTSCOPE_REQUIRE_GPU=1, but this version has no CUDA kernels")
	}
	_, err := gpu.Open(gpu.Config{})
	if !errors.Is(err, cuda.ErrUnavailable) {
		t.Fatalf("Open = %v, want an error that wraps ErrUnavailable", err)
	}
	if s := err.Error(); !strings.Contains(s, "--backend cpu") || strings.Contains(s, "\n") {
		t.Errorf("%q is not one line with a remedy", s)
	}
}

func TestANegativeDeviceIsNotMerelyUnavailable(t *testing.T) {
	if _, err := gpu.Open(gpu.Config{Device: -1}); err == nil || errors.Is(err, cuda.ErrUnavailable) {
		t.Errorf("Open = %v, want an error about the index", err)
	}
}
