package backendtest

import (
	"errors"
	"os"
	"testing"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/cpu"
	"github.com/draftscope/draftscope/cuda/gpu"
)

// Open opens the backend that tests of the models run on: the processor's, or
// the one that DRAFTSCOPE_TEST_BACKEND names (cpu, cuda). The caller closes
// it.
func Open(t testing.TB) cuda.Device {
	t.Helper()
	switch name := os.Getenv("DRAFTSCOPE_TEST_BACKEND"); name {
	case "", "cpu":
		dev, err := cpu.New(cpu.Config{})
		if err != nil {
			t.Fatal(err)
		}
		return dev
	case "cuda":
		return OpenGPU(t, gpu.Config{})
	default:
		t.Fatalf("DRAFTSCOPE_TEST_BACKEND is %q, not cpu or cuda", name)
		return nil
	}
}

// OpenGPU opens a CUDA device. Without one the test is skipped, or fails when
// DRAFTSCOPE_REQUIRE_GPU is 1.
func OpenGPU(t testing.TB, cfg gpu.Config) cuda.Device {
	t.Helper()
	dev, err := gpu.Open(cfg)
	switch {
	case err == nil:
		return dev
	case errors.Is(err, cuda.ErrUnavailable) && os.Getenv("DRAFTSCOPE_REQUIRE_GPU") != "1":
		t.Skipf("no CUDA device to test on: %v", err)
	default:
		t.Fatal(err)
	}
	return nil
}
