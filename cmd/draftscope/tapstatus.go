package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/extract/tap"
	"github.com/draftscope/draftscope/schemas"
)

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// tapMetrics says what a tap is doing: lines for people to w, and what is
// returned for Prometheus.
func tapMetrics(w io.Writer, run string, s tap.Status) []metric {
	fmt.Fprintf(w, "\ntap: %d engines, %d of %d rows of their rings in use; %d requests open, %d waiting to be published, %d of %d MiB held\n",
		s.Engines, s.Filled, s.Slots, s.Open, s.Waiting, s.Memory>>20, s.Bound>>20)
	fmt.Fprintf(w, "  %d rows of %d MiB came, the last %.1f ms after it was sent, %.1f ms at most\n", s.Rows, s.Bytes>>20, ms(s.Lag), ms(s.Worst))
	fmt.Fprintf(w, "  requests: %d began, %d finished, %d aborted, %d shed by the engine\n", s.Begun, s.Finished, s.Aborted, s.Shed)
	fmt.Fprintf(w, "  of them: %d stored with %d tokens, %d not wanted, %d tombstones, %d faults\n", s.Stored, s.StoredRows, s.Dropped, s.Tombstones, s.Faults)
	fmt.Fprintf(w, "  %d of the stored ones completed with %d rows of the same prefix of others; %d finished requests are kept for that, %d MiB\n", s.Completed, s.CompletedRows, s.Prefixes, s.PrefixBytes>>20)
	one := labels("run", run)
	value := func(name, kind, help string, v int64) metric {
		return metric{"draftscope_tap_" + name, kind, help, []sample{{one, float64(v)}}}
	}
	list := []metric{
		value("engines", "gauge", "Engines that are connected.", int64(s.Engines)),
		value("ring_rows", "gauge", "Rows that the engines' rings can hold.", s.Slots),
		value("ring_used_rows", "gauge", "Rows in the engines' rings that were not read yet.", s.Filled),
		value("open_requests", "gauge", "Requests that have begun and not ended.", int64(s.Open)),
		value("waiting_requests", "gauge", "Requests that have finished and are not published.", int64(s.Waiting)),
		value("memory_bytes", "gauge", "Bytes of states that are held.", s.Memory),
		value("prefix_memory_bytes", "gauge", "Bytes of states that are kept to complete requests whose prefix an engine has cached.", s.PrefixBytes),
		value("completed_rows_total", "counter", "Rows that were published and are another sequence's, of the same prefix.", s.CompletedRows),
		value("rows_total", "counter", "Rows that came through the rings.", s.Rows),
		value("bytes_total", "counter", "Bytes of these rows.", s.Bytes),
		value("stored_rows_total", "counter", "Rows that were published.", s.StoredRows),
		value("shed_rows_total", "counter", "Rows of requests that engines shed, as they said goodbye.", s.ShedRows),
	}
	list = append(list, metric{
		"draftscope_tap_lag_seconds", "gauge", "Time from the engine's sending of a step until its rows were read.",
		[]sample{{labels("run", run, "of", "last"), s.Lag.Seconds()}, {labels("run", run, "of", "most"), s.Worst.Seconds()}},
	})
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
		{"completed", s.Completed},
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

// acceptance is what drafters got accepted so far, as results pass by. A
// sequence that is drafted on twice counts twice.
type acceptance struct {
	mu sync.Mutex
	of map[accepter]*accepted
}

type accepter struct {
	drafter, method string
	budget          int32
}

type accepted struct{ rounds, tokens int64 } // tokens with the target's own one

func (a *acceptance) add(rec arrow.Record) error {
	env, err := schemas.EnvelopeOf(rec)
	if err != nil || env.Table != schemas.TableRounds {
		return err
	}
	rounds, err := schemas.Rows[schemas.Round](rec)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range rounds {
		if r.Truncated {
			continue
		}
		key := accepter{env.Drafter, r.Method, r.Budget}
		if a.of[key] == nil {
			if a.of == nil {
				a.of = map[accepter]*accepted{}
			}
			a.of[key] = &accepted{}
		}
		a.of[key].rounds++
		a.of[key].tokens += int64(r.AcceptLen)
	}
	return nil
}

// metrics says it: lines for people to w, and what is returned for Prometheus.
func (a *acceptance) metrics(w io.Writer, run string) []metric {
	rounds := metric{name: "draftscope_tap_rounds_total", kind: "counter", help: "Rounds of drafters on the traffic, truncated ones left out."}
	tokens := metric{name: "draftscope_tap_accepted_tokens_total", kind: "counter", help: "Tokens of these rounds, the target's own one of each among them; over the rounds it is the mean acceptance length."}
	a.mu.Lock()
	defer a.mu.Unlock()
	keys := slices.SortedFunc(maps.Keys(a.of), func(x, y accepter) int {
		return cmp.Or(cmp.Compare(x.drafter, y.drafter), cmp.Compare(x.method, y.method), cmp.Compare(x.budget, y.budget))
	})
	for _, k := range keys {
		n := a.of[k]
		fmt.Fprintf(w, "  drafter %s, %s of %d: %.3f tokens a round in %d rounds\n", k.drafter, k.method, k.budget, float64(n.tokens)/float64(n.rounds), n.rounds)
		id := labels("run", run, "drafter", k.drafter, "method", k.method, "budget", strconv.Itoa(int(k.budget)))
		rounds.samples = append(rounds.samples, sample{id, float64(n.rounds)})
		tokens.samples = append(tokens.samples, sample{id, float64(n.tokens)})
	}
	return []metric{rounds, tokens}
}

// acceptanceSink stores results and adds up what was accepted.
type acceptanceSink struct {
	*data.ResultSink
	acceptance *acceptance
}

func (s acceptanceSink) Write(ctx context.Context, seq string, rec arrow.Record) error {
	return errors.Join(s.acceptance.add(rec), s.ResultSink.Write(ctx, seq, rec))
}
