package main

import (
	"flag"
	"fmt"
	"runtime"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/cpu"
	"github.com/draftscope/draftscope/cuda/gpu"
)

// backendFlags registers what decides the device.
func (j *jobFlags) backendFlags(fs *flag.FlagSet) {
	j.backend = oneOfFlag(fs, "backend", "auto", "compute by the backend `NAME`: auto, cpu or cuda", "cpu", "cuda")
	j.precision = oneOfFlag(fs, "precision", "f32", "let a CUDA device compute in `TYPE`: f32, or bf16 (half the memory, faster, rounded)", "bf16")
}

// newDevice opens the backend that --backend names. Workers that run side by
// side divide the processor's threads. What auto chose first holds for the
// devices that follow, which lend each other weights.
func (j *job) newDevice(workers int) (cuda.Device, error) {
	precision := gpu.F32
	if j.precision.value == gpu.BF16.String() {
		precision = gpu.BF16
	}
	if j.backend.value == "cpu" {
		if precision != gpu.F32 {
			return nil, badUsage("--precision %s needs a CUDA device: use --backend cuda, or f32", precision)
		}
		return cpu.New(cpu.Config{Threads: max(1, runtime.GOMAXPROCS(0)/workers)})
	}
	dev, err := gpu.Open(gpu.Config{Precision: precision})
	switch {
	case err == nil:
		j.backend.value = "cuda"
		return dev, nil
	case j.backend.value == "cuda" || precision != gpu.F32:
		return nil, withCode(exitMissing, fmt.Errorf("--backend %s --precision %s: %w", j.backend.value, precision, err))
	case gpu.Built:
		// Where the program has the backend, its absence is news.
		j.say("computing on the CPU: %v", err)
	}
	j.backend.value = "cpu"
	return j.newDevice(workers)
}
