package main

import (
	"strings"
	"testing"
	"time"

	"github.com/draftscope/draftscope/cuda"
)

func TestAStageReportsItsShareOfTheFloor(t *testing.T) {
	e := &effort{run: "r1", limits: cuda.Limits{Flops: 100, Bytes: 10, Width: 2}, by: map[string]spent{}}
	e.add("v1", 3*time.Second, cuda.Work{Flops: 100})                                     // a floor of 1 s
	e.add("v1", 5*time.Second, cuda.Work{Flops: 50}, cuda.Work{Flops: 100, Values: 12.5}) // 0.5 s and 2.5 s
	e.add("v2", time.Second)
	e.add("", 10*time.Second)
	var page, text strings.Builder
	if err := writeMetrics(&text, e.metrics(&page)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`draftscope_stage_busy_seconds_total{run="r1"} 10`,
		`draftscope_drafter_busy_seconds_total{run="r1",drafter="v1"} 8`,
		`draftscope_drafter_floor_seconds_total{run="r1",drafter="v1"} 4`,
		`draftscope_drafter_floor_ratio{run="r1",drafter="v1"} 0.5`,
		`draftscope_drafter_floor_ratio{run="r1",drafter="v2"} 0`,
		"# TYPE draftscope_drafter_floor_ratio gauge",
	} {
		if !strings.Contains(text.String(), want+"\n") {
			t.Errorf("no %s in\n%s", want, &text)
		}
	}
	if want := "v1: at work for 8.0 s, 50 % of it"; !strings.Contains(page.String(), want) {
		t.Errorf("no %s in\n%s", want, &page)
	}
}
