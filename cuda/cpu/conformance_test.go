package cpu_test

import (
	"fmt"
	"testing"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/backendtest"
	"github.com/draftscope/draftscope/cuda/cpu"
)

// open returns an Opener of devices with so many threads; 0 for all.
func open(threads int) backendtest.Opener {
	return func(t testing.TB) cuda.Device {
		d, err := cpu.New(cpu.Config{Threads: threads})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
}

func TestTheBackendPassesTheConformanceSuite(t *testing.T) {
	for _, threads := range []int{1, 3} {
		t.Run(fmt.Sprintf("%d threads", threads), func(t *testing.T) { backendtest.Run(t, open(threads)) })
	}
}

func BenchmarkDevice(b *testing.B) { backendtest.Bench(b, open(0)) }

func BenchmarkOneThread(b *testing.B) { backendtest.Bench(b, open(1)) }
