package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/draftscope/draftscope/pipeline"
)

// monitor watches the sessions of this process, for Prometheus and for people.
type monitor struct {
	mu       sync.Mutex
	sessions []watched
	commits  map[string]*histogram // by stream
	stored   map[string]int64      // bytes, by stream
	// more, where set, adds what else this process does: metrics, and lines
	// for people.
	more func(status io.Writer) []metric
	// live, where set, is the page that follows the dataset.
	live *live
}

type watched struct {
	run     string
	session *pipeline.Session
}

// histogram counts durations in buckets, as Prometheus wants it.
type histogram struct {
	counts []int64 // one more than bounds
	sum    float64
	total  int64
}

var commitBounds = []float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30}

func newMonitor() *monitor {
	return &monitor{commits: map[string]*histogram{}, stored: map[string]int64{}}
}

// with adds a session.
func (m *monitor) with(run string, s *pipeline.Session) *monitor {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sessions = append(m.sessions, watched{run, s})
	return m
}

// without takes a session out before it is closed.
func (m *monitor) without(s *pipeline.Session) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sessions = slices.DeleteFunc(m.sessions, func(w watched) bool { return w.session == s })
}

func (m *monitor) committed(c pipeline.Commit) {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := m.commits[c.Stream]
	if h == nil {
		h = &histogram{counts: make([]int64, len(commitBounds)+1)}
		m.commits[c.Stream] = h
	}
	s := c.Took.Seconds()
	i, _ := slices.BinarySearch(commitBounds, s)
	h.counts[i]++
	h.sum += s
	h.total++
	m.stored[c.Stream] += c.Bytes
}

// commitCount counts all commits so far.
func (m *monitor) commitCount() (n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, h := range m.commits {
		n += h.total
	}
	return n
}

// now is what the sessions have done, in one line, without asking the server.
func (m *monitor) now() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var parts []string
	for _, w := range m.sessions {
		p := w.session.Progress()
		parts = append(parts, fmt.Sprintf("run %s: %d sequences stored, results of %d, %d set aside", w.run, p.Stored, p.ResultsStored, p.Faults))
	}
	if len(parts) == 0 {
		return "no run is going"
	}
	return strings.Join(parts, "; ")
}

// metric is one family of the text format.
type metric struct {
	name, kind, help string
	samples          []sample
}

type sample struct {
	labels string // within the braces
	value  float64
}

// labels spells pairs of names and values.
func labels(pairs ...string) string {
	var parts []string
	escape := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			parts = append(parts, pairs[i]+`="`+escape.Replace(pairs[i+1])+`"`)
		}
	}
	return strings.Join(parts, ",")
}

// state is what one look at a session finds.
type state struct {
	run    string
	p      pipeline.Progress
	survey pipeline.Survey
	err    error
}

func (m *monitor) look(ctx context.Context) []state {
	m.mu.Lock()
	sessions := slices.Clone(m.sessions)
	m.mu.Unlock()
	var out []state
	for _, w := range sessions {
		s := state{run: w.run, p: w.session.Progress()}
		ask, cancel := context.WithTimeout(ctx, 2*time.Second)
		s.survey, s.err = w.session.Survey(ask)
		cancel()
		out = append(out, s)
	}
	return out
}

// metrics is everything for Prometheus.
func (m *monitor) metrics(ctx context.Context) []metric {
	var list []*metric
	family := func(name, kind, help string) *metric {
		f := &metric{name: "draftscope_" + name, kind: kind, help: help}
		list = append(list, f)
		return f
	}
	add := func(f *metric, labels string, v float64) { f.samples = append(f.samples, sample{labels, v}) }
	states := m.look(ctx)
	for _, c := range []struct {
		name, help string
		of         func(pipeline.Progress) int64
	}{
		{"published_sequences_total", "Sequences that this source published whole.", func(p pipeline.Progress) int64 { return p.Published }},
		{"published_rows_total", "Tokens of published sequences.", func(p pipeline.Progress) int64 { return p.Rows }},
		{"published_bytes_total", "Payload that this source published.", func(p pipeline.Progress) int64 { return p.Bytes }},
		{"shed_sequences_total", "Sequences that were dropped because the stream was full.", func(p pipeline.Progress) int64 { return p.Shed }},
		{"shed_rows_total", "Tokens of dropped sequences.", func(p pipeline.Progress) int64 { return p.ShedRows }},
		{"processed_sequences_total", "Sequences that this worker drafted on.", func(p pipeline.Progress) int64 { return p.Processed }},
		{"processed_rows_total", "Tokens that this worker drafted on.", func(p pipeline.Progress) int64 { return p.ProcessedRows }},
		{"result_bytes_total", "Payload of results that this worker published.", func(p pipeline.Progress) int64 { return p.ResultBytes }},
		{"stored_sequences_total", "Captured sequences that were made durable, repeats counted.", func(p pipeline.Progress) int64 { return p.Stored }},
		{"stored_results_total", "Results of sequences that were made durable, repeats counted.", func(p pipeline.Progress) int64 { return p.ResultsStored }},
		{"faults_total", "Sequences that were set aside.", func(p pipeline.Progress) int64 { return p.Faults }},
	} {
		f := family(c.name, "counter", c.help)
		for _, s := range states {
			add(f, labels("run", s.run), float64(c.of(s.p)))
		}
	}
	held := family("partitions_held", "gauge", "Partitions whose lease this worker holds.")
	owner := family("lease_info", "gauge", "Which worker holds which partition.")
	lag := family("lag_messages", "gauge", "Messages that a reader has not acknowledged.")
	bytes := family("stream_bytes", "gauge", "Size of a stream on the server.")
	messages := family("stream_messages", "gauge", "Messages of a stream on the server.")
	dropped := family("run_shed_sequences", "gauge", "Sequences that all sources of the run have dropped.")
	up := family("server_up", "gauge", "Whether the server answered.")
	for _, s := range states {
		add(held, labels("run", s.run), float64(s.p.Leases))
		if s.err != nil {
			add(up, labels("run", s.run), 0)
			continue
		}
		add(up, labels("run", s.run), 1)
		add(dropped, labels("run", s.run), float64(s.survey.Shed))
		for _, l := range s.survey.Leases {
			add(owner, labels("run", s.run, "group", l.Group, "partition", strconv.Itoa(l.Partition), "worker", l.Worker), 1)
		}
		for _, st := range s.survey.Streams {
			id := labels("run", s.run, "stream", st.Name)
			add(bytes, id, float64(st.Bytes))
			add(messages, id, float64(st.Messages))
			for _, r := range st.Readers {
				group := r.Group
				if group == "" {
					group = st.Group
				}
				add(lag, labels("run", s.run, "stream", st.Stream, "reader", r.Role, "group", group, "partition", strconv.Itoa(r.Partition)), float64(r.Lag))
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	written := family("stored_bytes_total", "counter", "Raw bytes that were made durable.")
	commits := family("commit_seconds", "histogram", "Duration of commits.")
	for _, stream := range []string{pipeline.CaptureStream, pipeline.ResultsStream} {
		h := m.commits[stream]
		if h == nil {
			continue
		}
		add(written, labels("stream", stream), float64(m.stored[stream]))
		n := int64(0)
		for i, c := range h.counts {
			n += c
			le := "+Inf"
			if i < len(commitBounds) {
				le = fmt.Sprint(commitBounds[i])
			}
			commits.samples = append(commits.samples, sample{"_bucket{" + labels("stream", stream, "le", le) + "}", float64(n)})
		}
		commits.samples = append(commits.samples,
			sample{"_sum{" + labels("stream", stream) + "}", h.sum}, sample{"_count{" + labels("stream", stream) + "}", float64(h.total)})
	}
	out := make([]metric, len(list))
	for i, f := range list {
		out[i] = *f
	}
	if m.more != nil {
		out = append(out, m.more(io.Discard)...)
	}
	return out
}

// writeMetrics writes the text format of Prometheus.
func writeMetrics(w io.Writer, list []metric) error {
	var b bytes.Buffer
	for _, f := range list {
		if len(f.samples) == 0 {
			continue
		}
		fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", f.name, f.help, f.name, f.kind)
		for _, s := range f.samples {
			switch {
			case f.kind == "histogram":
				fmt.Fprintf(&b, "%s%s %v\n", f.name, s.labels, s.value)
			case s.labels == "":
				fmt.Fprintf(&b, "%s %v\n", f.name, s.value)
			default:
				fmt.Fprintf(&b, "%s{%s} %v\n", f.name, s.labels, s.value)
			}
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

// writeStatus is the page for people.
func writeStatus(w io.Writer, states []state) {
	fmt.Fprintln(w, "draftscope; metrics for Prometheus are at /metrics")
	if len(states) == 0 {
		fmt.Fprintln(w, "\nno run yet")
	}
	for _, s := range states {
		fmt.Fprintf(w, "\nrun %s\n", s.run)
		fmt.Fprintf(w, "  here: %d sequences published, %d drafted on, %d stored, results of %d stored, %d set aside, %d shed, %d partitions held\n",
			s.p.Published, s.p.Processed, s.p.Stored, s.p.ResultsStored, s.p.Faults, s.p.Shed, s.p.Leases)
		if s.err != nil {
			fmt.Fprintf(w, "  the server does not answer: %v\n", s.err)
			continue
		}
		writeSurvey(w, s.survey)
	}
}

// writeSurvey is the state of a run on the server, as a table.
func writeSurvey(w io.Writer, survey pipeline.Survey) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "  stream\tbytes\tmessages\treader\tpartition\tlag")
	for _, st := range survey.Streams {
		fmt.Fprintf(t, "  %s\t%d\t%d\t\t\t\n", st.Name, st.Bytes, st.Messages)
		for _, r := range st.Readers {
			fmt.Fprintf(t, "  \t\t\t%s\t%d\t%d\n", strings.TrimSpace(r.Role+" "+r.Group), r.Partition, r.Lag)
		}
	}
	for _, l := range survey.Leases {
		fmt.Fprintf(t, "  partition %d of group %s is worked on by %s\t\t\t\t\t\n", l.Partition, l.Group, l.Worker)
	}
	_ = t.Flush() // as w
	if survey.Shed > 0 {
		fmt.Fprintf(w, "  %d sequences with %d tokens were shed\n", survey.Shed, survey.ShedRows)
	}
}

// serveHTTP serves the monitor at addr until closed; nothing when addr is
// empty.
func serveHTTP(addr string, say func(string, ...any), m *monitor) (closeHTTP func(), err error) {
	if addr == "" {
		return func() {}, nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, withCode(exitMissing, fmt.Errorf("listening at --http %s: %w", addr, err))
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_ = writeMetrics(w, m.metrics(r.Context())) // the reader is gone
	})
	if m.live != nil {
		m.live.register(mux)
	}
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		// A browser gets the page for eyes, everything else the plain one.
		if m.live != nil && strings.Contains(r.Header.Get("Accept"), "text/html") {
			http.Redirect(w, r, "/live", http.StatusSeeOther)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		writeStatus(w, m.look(r.Context()))
		if m.more != nil {
			m.more(w)
		}
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			say("metrics have stopped: %v", err)
		}
	}()
	say("metrics at http://%s/metrics, status at http://%s/", l.Addr(), l.Addr())
	if m.live != nil {
		say("the report, live: http://%s/live", l.Addr())
	}
	return func() {
		srv.Close()
		<-done
		if m.live != nil {
			m.live.close()
		}
	}, nil
}
