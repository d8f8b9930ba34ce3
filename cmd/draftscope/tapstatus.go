package main

import (
	"fmt"
	"io"
	"strconv"

	"github.com/draftscope/draftscope/extract/tap"
)

// tapMetrics says what a tap is doing: lines for people to w, and what is
// returned for Prometheus.
func tapMetrics(w io.Writer, run string, s tap.Status) []metric {
	fmt.Fprintf(w, "\ntap: %d engines, rings of %d rows; %d requests open, %d waiting to be published, %d of %d MiB held\n",
		s.Engines, s.Slots, s.Open, s.Waiting, s.Memory>>20, s.Bound>>20)
	fmt.Fprintf(w, "  requests: %d began, %d finished, %d aborted, %d shed by the engine\n", s.Begun, s.Finished, s.Aborted, s.Shed)
	fmt.Fprintf(w, "  of them: %d stored with %d tokens, %d not wanted, %d tombstones, %d faults\n", s.Stored, s.StoredRows, s.Dropped, s.Tombstones, s.Faults)
	one := labels("run", run)
	value := func(name, kind, help string, v int64) metric {
		return metric{"draftscope_tap_" + name, kind, help, []sample{{one, float64(v)}}}
	}
	list := []metric{
		value("engines", "gauge", "Engines that are connected.", int64(s.Engines)),
		value("ring_rows", "gauge", "Rows that the engines' rings hold.", s.Slots),
		value("open_requests", "gauge", "Requests that have begun and not ended.", int64(s.Open)),
		value("waiting_requests", "gauge", "Requests that have finished and are not published.", int64(s.Waiting)),
		value("memory_bytes", "gauge", "Bytes of states that are held.", s.Memory),
		value("rows_total", "counter", "Rows that came through the rings.", s.Rows),
		value("stored_rows_total", "counter", "Rows that were published.", s.StoredRows),
		value("shed_rows_total", "counter", "Rows of requests that engines shed, as they said goodbye.", s.ShedRows),
	}
	requests := metric{name: "draftscope_tap_requests_total", kind: "counter", help: "Requests by what became of them."}
	for _, c := range []struct {
		what string
		n    int64
	}{
		{"begun", s.Begun},
		{"finished", s.Finished},
		{"aborted", s.Aborted},
		{"shed", s.Shed},
		{"stored", s.Stored},
		{"dropped", s.Dropped},
		{"tombstone", s.Tombstones},
		{"fault", s.Faults},
	} {
		requests.samples = append(requests.samples, sample{labels("run", run, "what", c.what), float64(c.n)})
	}
	norms := metric{name: "draftscope_tap_state_norm", kind: "gauge", help: "L2 norm of a state in the last row of stored sequences."}
	for _, n := range s.Norms {
		fmt.Fprintf(w, "  state %d: norms %.4g to %.4g, mean %.4g\n", n.State, n.Least, n.Most, n.Mean)
		for _, v := range []struct {
			band string
			x    float64
		}{{"least", n.Least}, {"mean", n.Mean}, {"most", n.Most}} {
			norms.samples = append(norms.samples, sample{labels("run", run, "state", strconv.Itoa(n.State), "band", v.band), v.x})
		}
	}
	return append(list, requests, norms)
}
