package main

import (
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/cpu"
)

// wrong is a device with one operation that is a little off.
type wrong struct {
	cuda.Device
}

func (w wrong) RMSNorm(dst, x, weight cuda.Tensor, eps, gain float32) error {
	return w.Device.RMSNorm(dst, x, weight, eps+1e-3, gain)
}

func TestTheSelfTestFindsADeviceThatComputesWrongly(t *testing.T) {
	judge, err := cpu.New(cpu.Config{})
	if err != nil {
		t.Fatal(err)
	}
	one, err := cpu.New(cpu.Config{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := selfTest(one, judge); err != nil {
		t.Errorf("a device that computes rightly: %v", err)
	}
	if err := selfTest(wrong{one}, judge); err == nil || !strings.Contains(err.Error(), "of rmsnorm is ") {
		t.Errorf("a device that computes wrongly: %v", err)
	}
}
