package backendtest

import (
	"testing"
	"time"

	"github.com/draftscope/draftscope/cuda"
)

func testLimits(t *testing.T, l *lab) {
	t.Run("a device says what it can do", func(t *testing.T) {
		limits, err := l.d.Limits()
		must(t, err)
		t.Log(limits)
		if limits.Flops < 1e7 || limits.Flops > 1e17 || limits.Bytes < 1e7 || limits.Bytes > 1e15 || limits.Width != 2 && limits.Width != 4 {
			t.Errorf("%+v", limits)
		}
	})
	t.Run("a floor is the longer of arithmetic and memory", func(t *testing.T) {
		limits := cuda.Limits{Flops: 100, Bytes: 10, Width: 2}
		for work, want := range map[cuda.Work]time.Duration{
			{}:                        0,
			{Flops: 200}:              2 * time.Second,
			{Values: 15}:              3 * time.Second,
			{Flops: 200, Values: 15}:  3 * time.Second,
			{Flops: 1000, Values: 15}: 10 * time.Second,
		} {
			if got := limits.Floor(work); got != want {
				t.Errorf("%+v takes %v, want %v", work, got, want)
			}
		}
		if got := (cuda.Limits{}).Floor(cuda.Work{Flops: 1}); got != 0 {
			t.Errorf("without limits the floor is %v", got)
		}
	})
}
