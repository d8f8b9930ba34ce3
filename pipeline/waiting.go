package pipeline

import (
	"log/slog"
	"time"
)

// waiting tells people what a process waits for: after so long for the first
// time, then ever more rarely, and anew when it waits for something else.
type waiting struct {
	log         *slog.Logger
	what        string
	since, told time.Time
}

const firstTold = 10 * time.Second

// tell is called again and again while the process waits for what. Empty is
// for nothing.
func (w *waiting) tell(what string) {
	now := time.Now()
	if what != w.what {
		w.what, w.since, w.told = what, now, time.Time{}
	}
	long := now.Sub(w.since)
	if what == "" || long < firstTold || !w.told.IsZero() && now.Sub(w.told) < long/2 {
		return
	}
	w.told = now
	w.log.Warn("waiting", "for", what, "since", long.Round(time.Second))
}
