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
	dev, err := gpu.Open(gpu.Config{Device: 1000}) // no machine has so many
	if err == nil {
		dev.Close()
	}
	if !errors.Is(err, cuda.ErrUnavailable) {
		t.Fatalf("Open = %v, want an error that wraps ErrUnavailable", err)
	}
	if s := err.Error(); !strings.Contains(s, "--backend cpu") || strings.Contains(s, "\n") {
		t.Errorf("%q is not one line with a remedy", s)
	}
}

func TestARequiredGPUOpens(t *testing.T) {
	if os.Getenv("DRAFTSCOPE_REQUIRE_GPU") != "1" {
		return // the conformance suite says when it skips
	}
	dev, err := gpu.Open(gpu.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(dev.Name(), "cuda f32 (") {
		t.Errorf("the device is called %q", dev.Name())
	}
	must(t, dev.Close())
	must(t, dev.Close())
}

func TestAConfigThatCannotBeMeantIsNotMerelyUnavailable(t *testing.T) {
	for _, cfg := range []gpu.Config{{Device: -1}, {Precision: 2}, {Precision: -1}} {
		if _, err := gpu.Open(cfg); err == nil || errors.Is(err, cuda.ErrUnavailable) {
			t.Errorf("Open(%+v) = %v, want an error about the configuration", cfg, err)
		}
	}
}
