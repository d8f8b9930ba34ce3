package main

import (
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/draftscope/draftscope/cuda"
)

// effort is how long this process's drafting stages were at work, and how long
// the device cannot but take for what they did.
type effort struct {
	run    string
	limits cuda.Limits

	mu sync.Mutex
	by map[string]spent // by drafter; "" is the stages, all of them
}

type spent struct{ busy, floor time.Duration }

// measureEffort begins with what dev can do.
func measureEffort(run string, dev cuda.Device) (*effort, error) {
	limits, err := dev.Limits()
	if err != nil {
		return nil, fmt.Errorf("measuring the device for the metrics: %w", err)
	}
	return &effort{run: run, limits: limits, by: map[string]spent{}}, nil
}

// add is told by the stages; each part of the work has a floor of its own.
func (e *effort) add(drafter string, busy time.Duration, work ...cuda.Work) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.by[drafter]
	s.busy += busy
	for _, w := range work {
		s.floor += e.limits.Floor(w)
	}
	e.by[drafter] = s
}

// metrics adds to those of a [monitor], and to its page for people.
func (e *effort) metrics(status io.Writer) []metric {
	e.mu.Lock()
	defer e.mu.Unlock()
	stage := metric{name: "draftscope_stage_busy_seconds_total", kind: "counter", help: "Time that the drafting stages of this worker were at work."}
	busy := metric{name: "draftscope_drafter_busy_seconds_total", kind: "counter", help: "Time that a drafter's context, drafts, head and trees took."}
	floor := metric{name: "draftscope_drafter_floor_seconds_total", kind: "counter", help: "Time that the device cannot but take for a drafter's products, attention and weights."}
	share := metric{name: "draftscope_drafter_floor_ratio", kind: "gauge", help: "Floor over busy time of a drafter; 1 is the device's limit."}
	var names []string
	for name := range e.by {
		names = append(names, name)
	}
	slices.Sort(names)
	fmt.Fprintf(status, "\ndrafting in run %s, on a device with %s\n", e.run, e.limits)
	for _, name := range names {
		s := e.by[name]
		if name == "" {
			stage.samples = append(stage.samples, sample{labels("run", e.run), s.busy.Seconds()})
			continue
		}
		id, ratio := labels("run", e.run, "drafter", name), 0.
		if s.busy > 0 {
			ratio = s.floor.Seconds() / s.busy.Seconds()
		}
		busy.samples = append(busy.samples, sample{id, s.busy.Seconds()})
		floor.samples = append(floor.samples, sample{id, s.floor.Seconds()})
		share.samples = append(share.samples, sample{id, ratio})
		fmt.Fprintf(status, "  %s: at work for %.1f s, %.0f %% of it the device's own floor\n", name, s.busy.Seconds(), 100*ratio)
	}
	return []metric{stage, busy, floor, share}
}
