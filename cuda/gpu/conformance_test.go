package gpu_test

import (
	"testing"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/backendtest"
	"github.com/draftscope/draftscope/cuda/gpu"
)

func open(t testing.TB) cuda.Device { return backendtest.OpenGPU(t, gpu.Config{}) }

func TestTheBackendPassesTheConformanceSuite(t *testing.T) {
	must(t, open(t).Close()) // skips as a whole, not part by part
	backendtest.Run(t, open)
}

func BenchmarkDevice(b *testing.B) {
	must(b, open(b).Close())
	backendtest.Bench(b, open)
}

func BenchmarkDeltaNet(b *testing.B) {
	bf16 := func(t testing.TB) cuda.Device { return backendtest.OpenGPU(t, gpu.Config{Precision: gpu.BF16}) }
	must(b, bf16(b).Close())
	backendtest.BenchDeltaNet(b, bf16)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestTheBackendPassesTheSuiteInBF16(t *testing.T) {
	must(t, open(t).Close())
	for name, cfg := range map[string]gpu.Config{
		"all that the card has": {Precision: gpu.BF16},
		"plain kernels":         {Precision: gpu.BF16, Plain: true},
	} {
		t.Run(name, func(t *testing.T) {
			d := backendtest.OpenGPU(t, cfg)
			t.Log(d.Name())
			must(t, d.Close())
			backendtest.RunBF16(t, func(t testing.TB) cuda.Device { return backendtest.OpenGPU(t, cfg) })
		})
	}
}
