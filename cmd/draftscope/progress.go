package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// tally is how far a job has come, in sequences.
type tally struct {
	captured, scored, stored int64
	tokens                   int64 // captured
}

// meter shows the progress of a job: one line that rewrites itself on a
// terminal, a plain line now and then elsewhere.
type meter struct {
	w     io.Writer
	tty   bool
	total int64
	score bool // whether the job scores
	now   func() tally

	start time.Time
	last  string
	stop  chan struct{}
	done  sync.WaitGroup
}

// startMeter shows now() until stopped. total is the number of sequences.
func startMeter(w io.Writer, total int, score bool, now func() tally) *meter {
	m := &meter{w: w, total: int64(total), score: score, now: now, start: time.Now(), stop: make(chan struct{})}
	if f, ok := w.(*os.File); ok {
		m.tty = term.IsTerminal(int(f.Fd()))
	}
	every := 5 * time.Second
	if m.tty {
		every = 200 * time.Millisecond
	}
	m.show()
	m.done.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-m.stop:
				return
			case <-tick.C:
				m.show()
			}
		}
	})
	return m
}

// close shows the last state and ends the line.
func (m *meter) close() {
	close(m.stop)
	m.done.Wait()
	m.show()
	if m.tty {
		fmt.Fprintln(m.w)
	}
}

func (m *meter) show() {
	line := m.line(m.now(), time.Since(m.start))
	if line == m.last && !m.tty {
		return
	}
	if m.tty {
		fmt.Fprint(m.w, "\r", line, strings.Repeat(" ", max(0, len(m.last)-len(line))))
	} else {
		fmt.Fprintln(m.w, line)
	}
	m.last = line
}

// line is one state in words: counts, rate, time left.
func (m *meter) line(t tally, elapsed time.Duration) string {
	parts := []string{fmt.Sprintf("captured %d/%d", t.captured, m.total)}
	if m.score {
		parts = append(parts, fmt.Sprintf("scored %d/%d", t.scored, m.total))
	}
	parts = append(parts, fmt.Sprintf("stored %d/%d", t.stored, m.total))
	if s := elapsed.Seconds(); s > 0 && t.tokens > 0 {
		parts = append(parts, fmt.Sprintf("%.0f tokens/s", float64(t.tokens)/s))
	}
	at := t.captured
	if m.score {
		at = t.scored
	}
	if at > 0 && at < m.total {
		left := time.Duration(float64(elapsed) / float64(at) * float64(m.total-at))
		parts = append(parts, "about "+left.Round(time.Second).String()+" left")
	}
	return strings.Join(parts, "  ")
}
