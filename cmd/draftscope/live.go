package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/draftscope/draftscope/data/query"
	"github.com/draftscope/draftscope/data/report"
)

// What a live page may cost the process that stores a run.
const (
	liveReaders  = 32               // browsers at a time
	liveEvery    = 2 * time.Second  // between two reports, at least
	liveShare    = 4                // times as long as a report takes is waited before the next
	livePatience = 10 * time.Second // for a browser that does not read
)

// live follows a dataset for browsers, by server-sent events. Reports are made
// by one goroutine while somebody reads, on one thread, and never more than a
// fifth of the time; nothing that stores or drafts waits for it.
type live struct {
	dataset string
	changes func() int64  // grows as the dataset does
	now     func() string // a line about the moment
	build   func(context.Context) ([]byte, error)
	every   time.Duration

	cancel context.CancelFunc
	done   chan struct{}
	wake   chan struct{} // a reader came

	mu      sync.Mutex
	readers int
	version int64 // of latest; 0 is none
	latest  []byte
	fresh   chan struct{} // closed when latest is replaced
	closed  bool
	handled sync.WaitGroup
}

func newLive(dataset string, every time.Duration, changes func() int64, now func() string, build func(context.Context) ([]byte, error)) *live {
	ctx, cancel := context.WithCancel(context.Background())
	l := &live{
		dataset: dataset, changes: changes, now: now, build: build, every: every,
		cancel: cancel, done: make(chan struct{}), wake: make(chan struct{}, 1), fresh: make(chan struct{}),
	}
	go l.follow(ctx)
	return l
}

// liveReport makes the report of a dataset that is being written, with little.
func liveReport(dir string) func(context.Context) ([]byte, error) {
	decode := decoder(dir, "")
	return func(ctx context.Context) ([]byte, error) {
		db, err := query.Open(ctx, dir, query.Options{Threads: 1, MemoryLimit: "512MB"})
		if err != nil {
			return nil, err
		}
		defer db.Close()
		r, err := report.Build(ctx, db, report.Options{Resamples: 400, Texts: readTexts, Decode: decode})
		if err != nil {
			return nil, err
		}
		var b bytes.Buffer
		err = report.WriteMain(&b, r)
		return b.Bytes(), err
	}
}

// close ends all streams and waits for what goes on.
func (l *live) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.cancel()
	<-l.done
	l.handled.Wait()
}

// follow makes a report whenever the dataset has changed and somebody reads.
func (l *live) follow(ctx context.Context) {
	defer close(l.done)
	seen := int64(-1)
	wait := time.Duration(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		case <-time.After(max(wait, l.every)):
		}
		if !l.watched() {
			wait = l.every
			continue
		}
		changes := l.changes()
		if changes == seen {
			wait = l.every
			continue
		}
		begun := time.Now()
		page, err := l.build(ctx)
		took := time.Since(begun)
		if ctx.Err() != nil {
			return
		}
		seen, wait = changes, liveShare*took
		if err != nil {
			seen, page = -1, fmt.Appendf(nil, "<main><h1>draftscope</h1><p class=\"verdict warn\">%s</p></main>", plainError(err))
		}
		l.publish(page)
		// A reader who comes meanwhile gets this one, and no report of its own.
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(wait, l.every)):
		}
	}
}

// plainError is an error for the page. What DuckDB or a file's name says is
// not to be taken for a tag.
func plainError(err error) string {
	var b bytes.Buffer
	text := err.Error()
	if errors.Is(err, query.ErrNoDuckDB) {
		text = "This program was built without DuckDB: it stores all the same, and has no report to show."
	}
	for _, r := range text {
		switch r {
		case '<':
			b.WriteString("&lt;")
		case '>':
			b.WriteString("&gt;")
		case '&':
			b.WriteString("&amp;")
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

func (l *live) watched() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.readers > 0
}

func (l *live) publish(page []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if bytes.Equal(page, l.latest) {
		return
	}
	l.latest = page
	l.version++
	close(l.fresh)
	l.fresh = make(chan struct{})
}

// after is the latest report if it is newer than version, and what is closed
// when there is a newer one.
func (l *live) after(version int64) (page []byte, at int64, fresh <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.version > version {
		page = l.latest
	}
	return page, l.version, l.fresh
}

func (l *live) register(mux *http.ServeMux) {
	mux.HandleFunc("GET /live", func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Cache-Control", "no-store")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		_ = report.WriteLive(w, l.dataset) // the reader is gone
	})
	mux.HandleFunc("GET /live/events", l.stream)
}

// enter counts a reader in; false when there are too many, or no more.
func (l *live) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.readers >= liveReaders {
		return false
	}
	l.readers++
	l.handled.Add(1)
	select {
	case l.wake <- struct{}{}:
	default:
	}
	return true
}

func (l *live) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.readers--
	l.handled.Done()
}

// stream sends one browser what there is and what comes. One that does not
// read in time is let go: it comes again by itself.
func (l *live) stream(w http.ResponseWriter, r *http.Request) {
	if !l.enter() {
		http.Error(w, "too many readers", http.StatusServiceUnavailable)
		return
	}
	defer l.leave()
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	out := http.NewResponseController(w)
	send := func(event string, data []byte) error {
		if err := out.SetWriteDeadline(time.Now().Add(livePatience)); err != nil {
			return err
		}
		var b bytes.Buffer
		fmt.Fprintf(&b, "event: %s\n", event)
		for line := range bytes.SplitSeq(data, []byte("\n")) {
			fmt.Fprintf(&b, "data: %s\n", bytes.TrimRight(line, "\r"))
		}
		b.WriteByte('\n')
		if _, err := w.Write(b.Bytes()); err != nil {
			return err
		}
		return out.Flush()
	}
	tick := time.NewTicker(min(l.every, time.Second))
	defer tick.Stop()
	version, said := int64(0), ""
	for {
		page, at, fresh := l.after(version)
		if page != nil {
			if send("report", page) != nil {
				return
			}
		}
		version = at
		if now := l.now(); now != said {
			if send("now", []byte(now)) != nil {
				return
			}
			said = now
		}
		select {
		case <-r.Context().Done():
			return
		case <-l.done:
			return
		case <-fresh:
		case <-tick.C:
		}
	}
}
