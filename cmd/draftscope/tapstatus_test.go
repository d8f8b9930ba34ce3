package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/extract/tap"
)

func TestATapSaysWhatBecameOfItsRequests(t *testing.T) {
	s := tap.Status{Engines: 1, Open: 2, Slots: 128, Memory: 3 << 20, Bound: 8 << 20, Norms: []tap.Norm{{State: 4, Least: 1, Mean: 2, Most: 3}}}
	s.Begun, s.Finished, s.Aborted, s.Shed, s.Stored, s.StoredRows, s.Tombstones = 9, 4, 2, 1, 4, 300, 3
	var page, text bytes.Buffer
	if err := writeMetrics(&text, tapMetrics(&page, "r1", s)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"1 engines, rings of 128 rows; 2 requests open", "3 of 8 MiB held", "9 began, 4 finished, 2 aborted, 1 shed", "4 stored with 300 tokens", "state 4: norms 1 to 3, mean 2",
	} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("the page lacks %q:\n%s", want, page.String())
		}
	}
	for _, want := range []string{
		`draftscope_tap_requests_total{run="r1",what="tombstone"} 3`, `draftscope_tap_state_norm{run="r1",state="4",band="most"} 3`, `draftscope_tap_stored_rows_total{run="r1"} 300`,
	} {
		if !strings.Contains(text.String(), want+"\n") {
			t.Errorf("the metrics lack %s:\n%s", want, text.String())
		}
	}
}
