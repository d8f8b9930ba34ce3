package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/extract/tap"
	"github.com/draftscope/draftscope/schemas"
)

func TestATapSaysWhatBecameOfItsRequests(t *testing.T) {
	s := tap.Status{Engines: 1, Open: 2, Slots: 128, Filled: 5, Bytes: 7 << 20, Lag: 2 * time.Millisecond, Worst: 40 * time.Millisecond, Memory: 3 << 20, Bound: 8 << 20, Norms: []tap.Norm{{State: 4, Least: 1, Mean: 2, Most: 3}}}
	s.Begun, s.Finished, s.Aborted, s.Shed, s.Stored, s.StoredRows, s.Tombstones = 9, 4, 2, 1, 4, 300, 3
	s.Completed, s.CompletedRows, s.Prefixes, s.PrefixBytes = 2, 70, 3, 5<<20
	var page, text bytes.Buffer
	if err := writeMetrics(&text, tapMetrics(&page, "r1", s)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"1 engines, 5 of 128 rows of their rings in use; 2 requests open", "7 MiB came, the last 2.0 ms after it was sent, 40.0 ms at most", "3 of 8 MiB held", "9 began, 4 finished, 2 aborted, 1 shed", "4 stored with 300 tokens", "state 4: norms 1 to 3, mean 2",
		"2 of the stored ones completed with 70 rows of the same prefix of others; 3 finished requests are kept for that, 5 MiB",
	} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("the page lacks %q:\n%s", want, page.String())
		}
	}
	for _, want := range []string{
		`draftscope_tap_requests_total{run="r1",what="tombstone"} 3`, `draftscope_tap_state_norm{run="r1",state="4",band="most"} 3`, `draftscope_tap_stored_rows_total{run="r1"} 300`,
		`draftscope_tap_requests_total{run="r1",what="completed"} 2`, `draftscope_tap_completed_rows_total{run="r1"} 70`, `draftscope_tap_prefix_memory_bytes{run="r1"} 5.24288e+06`,
		`draftscope_tap_ring_used_rows{run="r1"} 5`, `draftscope_tap_bytes_total{run="r1"} 7.340032e+06`, `draftscope_tap_lag_seconds{run="r1",of="most"} 0.04`,
	} {
		if !strings.Contains(text.String(), want+"\n") {
			t.Errorf("the metrics lack %s:\n%s", want, text.String())
		}
	}
}

func TestATapSaysWhatDraftersGotAccepted(t *testing.T) {
	var a acceptance
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	defer mem.AssertSize(t, 0)
	env := schemas.Envelope{Table: schemas.TableRounds, Run: "r1", Drafter: "good"}
	for _, rec := range []arrow.Record{
		schemas.Record(mem, env, []schemas.Round{
			{SeqID: "a", Method: schemas.MethodChain, Budget: 7, AcceptLen: 4},
			{SeqID: "a", Method: schemas.MethodChain, Budget: 7, Round: 1, AcceptLen: 1},
			{SeqID: "a", Method: schemas.MethodDDTree, Budget: 8, AcceptLen: 5},
			{SeqID: "a", Method: schemas.MethodDDTree, Budget: 8, Round: 1, AcceptLen: 1, Truncated: true},
		}),
		schemas.Record(mem, schemas.Envelope{Table: schemas.TableFaults, Run: "r1"}, []schemas.Fault{{SeqID: "b"}}),
	} {
		if err := a.add(rec); err != nil {
			t.Error(err)
		}
		rec.Release()
	}
	var page, text bytes.Buffer
	if err := writeMetrics(&text, a.metrics(&page, "r1")); err != nil {
		t.Fatal(err)
	}
	if want := "drafter good, " + schemas.MethodChain + " of 7: 2.500 tokens a round in 2 rounds"; !strings.Contains(page.String(), want) {
		t.Errorf("the page lacks %q:\n%s", want, page.String())
	}
	if want := `accepted_tokens_total{run="r1",drafter="good",method="` + schemas.MethodDDTree + `",budget="8"} 5`; !strings.Contains(text.String(), want) {
		t.Errorf("the metrics lack %s:\n%s", want, text.String())
	}
}
