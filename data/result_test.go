package data

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/schemas"
	"github.com/google/go-cmp/cmp"
)

// sampleResults are three anchors of three slots; the third anchor's slots
// are unscored.
func sampleResults(seq, drafter string) *results {
	r := &results{seq: seq, drafter: drafter}
	for a := range int32(3) {
		d := schemas.Draft{SeqID: seq, Anchor: a + 2}
		for k := range int32(3) {
			d.DraftTokens = append(d.DraftTokens, 10*a+k)
			d.TopIDs = append(d.TopIDs, 100+k, 200+k)
			d.TopLogprobs = append(d.TopLogprobs, -1, -2)
			slot := schemas.Slot{SeqID: seq, Anchor: a + 2, Slot: k + 1, DraftToken: 10*a + k, DraftLogprob: -1}
			if a < 2 {
				slot.Label, slot.DataToken = new(10*a+k), new(10*a+k)
				slot.Hit, slot.LossMask, slot.CE = new(a == 0), new(true), new(float32(1.5))
				if a == 0 {
					slot.Rank = new(int32(0))
				}
			}
			r.slots = append(r.slots, slot)
		}
		r.drafts = append(r.drafts, d)
		r.rounds = append(r.rounds, schemas.Round{SeqID: seq, Method: schemas.MethodChain, Budget: 3, Round: a, Anchor: a + 2, Proposed: 3, Accepted: 1, AcceptLen: 2, Truncated: a == 2})
	}
	return r
}

// records sends each table in records of two rows, the rounds last; a table
// without rows is a record without rows.
func (r *results) records(mem memory.Allocator, run string) []arrow.Record {
	env := func(table string) schemas.Envelope {
		return schemas.Envelope{Table: table, Run: run, Drafter: r.drafter}
	}
	recs := cut(mem, env(schemas.TableDrafts), r.drafts)
	recs = append(recs, cut(mem, env(schemas.TableSlots), r.slots)...)
	return append(recs, cut(mem, env(schemas.TableRounds), r.rounds)...)
}

func cut[T any](mem memory.Allocator, env schemas.Envelope, rows []T) []arrow.Record {
	if len(rows) == 0 {
		return []arrow.Record{schemas.Record(mem, env, rows)}
	}
	var recs []arrow.Record
	for chunk := range slices.Chunk(rows, 2) {
		recs = append(recs, schemas.Record(mem, env, chunk))
	}
	return recs
}

// resultDataset is a dataset with run r1 and drafters good and early.
func resultDataset(t *testing.T) *Dataset {
	t.Helper()
	d := mustCreate(t, t.TempDir())
	if err := d.AddRun(testRun("r1", 8, schemas.F32)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"good", "early"} {
		if err := d.AddDrafter("r1", Drafter{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func mustResultSink(t *testing.T, d *Dataset) *ResultSink {
	t.Helper()
	s, err := d.ResultSink("r1", 0, SinkConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// stored reads all rows of a table.
func stored[T any](t *testing.T, d *Dataset, table string) []T {
	t.Helper()
	var rows []T
	for _, path := range partsOf(t, d, table) {
		r, err := readRows[T](path)
		if err != nil {
			t.Fatal(err)
		}
		rows = append(rows, r...)
	}
	return rows
}

func TestResultsAreStoredPerDrafter(t *testing.T) {
	mem := checked(t)
	d := resultDataset(t)
	s := mustResultSink(t, d)
	good, early := sampleResults("p0", "good"), sampleResults("p0", "early")
	early.rounds[0].Accepted = 3
	feed(t, s, "p0", 3, append(good.records(mem, "r1"), early.records(mem, "r1")...))
	none := &results{seq: "p1", drafter: "good"}
	feed(t, s, "p1", 4, none.records(mem, "r1"))
	if s.Pending() == 0 {
		t.Error("nothing is pending before the commit")
	}
	if err := s.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s.Pending() != 0 {
		t.Errorf("%d bytes pending after the commit", s.Pending())
	}
	if diff := cmp.Diff(append(early.rounds, good.rounds...), stored[schemas.Round](t, d, "rounds")); diff != "" {
		t.Errorf("rounds (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(append(early.slots, good.slots...), stored[schemas.Slot](t, d, "slots")); diff != "" {
		t.Errorf("slots (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(append(early.drafts, good.drafts...), stored[schemas.Draft](t, d, "drafts")); diff != "" {
		t.Errorf("drafts (-want +got):\n%s", diff)
	}
	for drafter, want := range map[string][]string{"good": {"p0", "p1"}, "early": {"p0"}, "other": nil} {
		got, err := d.Scored("r1", drafter)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, sorted(got)); diff != "" {
			t.Errorf("scored by %s (-want +got):\n%s", drafter, diff)
		}
	}
}

func TestABatchCutDoesNotChangeTheDigest(t *testing.T) {
	mem := checked(t)
	d := resultDataset(t)
	s := mustResultSink(t, d)
	r := sampleResults("p0", "good")
	feed(t, s, "p0", 1, r.records(mem, "r1"))
	slices.Reverse(r.slots) // another order of arrival
	feed(t, s, "p0", 2, r.records(mem, "r1"))
	if got := s.Counts(); got != (Counts{Repeats: 1}) {
		t.Errorf("counts %+v, want one repeat", got)
	}
}

func TestNoNaNIsStored(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for name, tt := range map[string]struct {
		spoil  func(*results)
		stored int
		detail string
	}{
		"a loss becomes NULL": {
			func(r *results) { r.slots[4].CE = &nan; r.slots[5].CE = &inf }, 1,
			"drafter good: slots.ce: 2 values not finite, first at anchor 3, slot 2; stored as NULL",
		},
		"a log-probability that has no NULL": {
			func(r *results) { r.slots[2].DraftLogprob = nan }, 0,
			"drafter good: slots.draft_logprob: 1 value not finite, first at anchor 2, slot 3; results set aside",
		},
		"a top log-probability": {
			func(r *results) { r.drafts[1].TopLogprobs[3] = -inf }, 0,
			"drafter good: drafts.top_logprobs: 1 value not finite, first at anchor 3, slot 2; results set aside",
		},
	} {
		t.Run(name, func(t *testing.T) {
			mem := checked(t)
			d := resultDataset(t)
			s := mustResultSink(t, d)
			r := sampleResults("p0", "good")
			tt.spoil(r)
			feed(t, s, "p0", 1, r.records(mem, "r1"))
			if err := s.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			faults, err := d.Faults("r1")
			if err != nil || len(faults) != 1 || faults[0].Check != "K1" || faults[0].Detail != tt.detail {
				t.Errorf("faults %+v (%v), want K1 %q", faults, err, tt.detail)
			}
			if got := s.Counts(); got != (Counts{Stored: tt.stored, SetAside: 1 - tt.stored}) {
				t.Errorf("counts %+v, want %d stored", got, tt.stored)
			}
			for _, slot := range stored[schemas.Slot](t, d, "slots") {
				if slot.CE != nil && !finite(*slot.CE) || !finite(slot.DraftLogprob) {
					t.Errorf("slot %+v is stored", slot)
				}
			}
		})
	}
}

func TestRowsOfAnotherSequenceAreRefused(t *testing.T) {
	mem := checked(t)
	d := resultDataset(t)
	s := mustResultSink(t, d)
	for name, rec := range map[string]arrow.Record{
		"another sequence": schemas.Record(mem, schemas.Envelope{Table: "rounds", Run: "r1", Drafter: "good"}, []schemas.Round{{SeqID: "p1"}}),
		"another run":      schemas.Record(mem, schemas.Envelope{Table: "rounds", Run: "r2", Drafter: "good"}, []schemas.Round{{SeqID: "p0"}}),
		"unknown drafter":  schemas.Record(mem, schemas.Envelope{Table: "rounds", Run: "r1", Drafter: "late"}, []schemas.Round{{SeqID: "p0"}}),
		"another table":    schemas.Record(mem, schemas.Envelope{Table: "tokens", Run: "r1", Drafter: "good"}, []schemas.Token{{SeqID: "p0"}}),
	} {
		if err := s.Write(t.Context(), "p0", rec); err == nil {
			t.Errorf("%s: accepted", name)
		}
		rec.Release()
	}
}

func TestAFaultOfTheSequenceSetsAllDraftersAside(t *testing.T) {
	mem := checked(t)
	d := resultDataset(t)
	s := mustResultSink(t, d)
	recs := sampleResults("p0", "good").records(mem, "r1")
	recs = append(recs, sampleResults("p0", "early").records(mem, "r1")...)
	recs = append(recs, schemas.Record(mem, schemas.Envelope{Table: "faults", Run: "r1"}, []schemas.Fault{{SeqID: "p0", Check: "K9", Detail: "why"}}))
	feed(t, s, "p0", 1, recs)
	one := sampleResults("p1", "good").records(mem, "r1")
	one = append(one, sampleResults("p1", "early").records(mem, "r1")...)
	one = append(one, schemas.Record(mem, schemas.Envelope{Table: "faults", Run: "r1", Drafter: "early"}, []schemas.Fault{{SeqID: "p1", Check: "K9", Detail: "early only"}, {SeqID: "p1", Check: "K9", Detail: "drafter early: known"}}))
	feed(t, s, "p1", 2, one)
	if err := s.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.Counts(); got != (Counts{Stored: 1, SetAside: 3}) {
		t.Errorf("counts %+v, want 1 stored and 3 set aside", got)
	}
	faults, err := d.Faults("r1")
	if err != nil {
		t.Fatal(err)
	}
	var details []string
	for _, f := range faults {
		details = append(details, f.Detail)
	}
	if diff := cmp.Diff([]string{"why", "drafter early: early only", "drafter early: known"}, details); diff != "" {
		t.Errorf("details of faults (-want +got):\n%s", diff)
	}
	got := fmt.Sprint(sorted(mustScored(t, d, "good")), sorted(mustScored(t, d, "early")))
	if got != "[p1] []" {
		t.Errorf("scored %s, want p1 by good only", got)
	}
}

func TestASequenceWithoutAnyResultEndsAndTheOthersAreStored(t *testing.T) {
	d := resultDataset(t)
	s := mustResultSink(t, d)
	feed(t, s, "p0", 1, sampleResults("p0", "good").records(checked(t), "r1"))
	if err := s.End(t.Context(), "p1", 2); err != nil {
		t.Fatalf("a sequence that ended without a record: %v", err)
	}
	feed(t, s, "p2", 3, sampleResults("p2", "good").records(checked(t), "r1"))
	if err := s.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.Counts(); got != (Counts{Stored: 2}) {
		t.Errorf("counts %+v, want 2 stored and nothing else", got)
	}
	if got := sorted(mustScored(t, d, "good")); fmt.Sprint(got) != "[p0 p2]" {
		t.Errorf("scored %v, want p0 and p2", got)
	}
}

func mustScored(t *testing.T, d *Dataset, drafter string) map[string]string {
	t.Helper()
	m, err := d.Scored("r1", drafter)
	if err != nil {
		t.Fatal(err)
	}
	return m
}
