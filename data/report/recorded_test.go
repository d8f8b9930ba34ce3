//go:build cgo

package report

import (
	"bytes"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/schemas"
)

// recordedRun is a dataset with run r and drafters; fill may store results.
func recordedRun(t *testing.T, drafters []string, fill func(*data.ResultSink)) string {
	t.Helper()
	dir := t.TempDir()
	ds, err := data.Create(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer ds.Close()
	if err := ds.AddRun(data.Run{Name: "r", Target: "demo", States: []int{0}, Layers: 1, Hidden: 4, FinalNorm: data.FinalPreNorm, DType: schemas.F32, Engine: "test"}); err != nil {
		t.Fatal(err)
	}
	for _, name := range drafters {
		if err := ds.AddDrafter("r", data.Drafter{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	sink, err := ds.ResultSink("r", 0, data.SinkConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer sink.Close()
	fill(sink)
	if err := sink.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	return dir
}

// send stores the rows of one table for one sequence.
func send[T any](t *testing.T, sink *data.ResultSink, table, drafter, seq string, rows ...T) {
	t.Helper()
	rec := schemas.Record(memory.NewGoAllocator(), schemas.Envelope{Table: table, Run: "r", Drafter: drafter}, rows)
	defer rec.Release()
	if err := sink.Write(t.Context(), seq, rec); err != nil {
		t.Fatal(err)
	}
}

func TestADrafterWithoutAScoredSequenceIsListedWithTheReason(t *testing.T) {
	dir := recordedRun(t, []string{"good", "faulty", "short", "idle"}, func(s *data.ResultSink) {
		for i, seq := range []string{"a", "b"} {
			send(t, s, schemas.TableRounds, "good", seq, schemas.Round{SeqID: seq, Method: schemas.MethodChain, Budget: 7, Accepted: 2, AcceptLen: 3})
			send(t, s, schemas.TableFaults, "faulty", seq, schemas.Fault{SeqID: seq, Chunk: -1, Check: "K1", Detail: "state 3 is not finite"})
			send[schemas.Round](t, s, schemas.TableRounds, "short", seq)
			if err := s.End(t.Context(), seq, uint64(i+1)); err != nil {
				t.Fatal(err)
			}
		}
	})
	r := build(t, dir, Options{Run: "r", Resamples: 50})
	notes := map[string]string{}
	for _, d := range r.Runs[0].Drafters {
		notes[d.Drafter] = d.Note
		if d.Drafter == "faulty" && d.Faulty != 2 {
			t.Errorf("faulty: %d sequences, want 2", d.Faulty)
		}
	}
	for name, want := range map[string]string{"good": "", "faulty": "set aside by faults in 2 sequences", "short": "no anchor in 2 sequences", "idle": "nothing of it is stored"} {
		if got, ok := notes[name]; !ok || got != want {
			t.Errorf("%s: note is %q (listed: %t), want %q", name, got, ok, want)
		}
	}
	if got, want := r.Runs[0].Verdict, "good is the only drafter with a scored sequence, faulty, idle and short have none: there is nothing to compare it with."; got != want {
		t.Errorf("verdict is %q, want %q", got, want)
	}
	for _, s := range []string{text(t, r), html(t, r)} {
		if !strings.Contains(s, "drafter faulty: n/a, set aside by faults in 2 sequences") || strings.Contains(s, "Capture only") {
			t.Errorf("it reads\n%s", s)
		}
	}
}

func TestARunWhoseOnlyDrafterFailedIsNoCaptureAlone(t *testing.T) {
	dir := recordedRun(t, []string{"d"}, func(s *data.ResultSink) {
		send(t, s, schemas.TableFaults, "d", "a", schemas.Fault{SeqID: "a", Chunk: -1, Check: "K1", Detail: "state 3 is not finite"})
		if err := s.End(t.Context(), "a", 1); err != nil {
			t.Fatal(err)
		}
	})
	r := build(t, dir, Options{})
	if got := r.Runs[0].Verdict; got != "No sequence was scored by d." {
		t.Errorf("verdict is %q", got)
	}
	if s := text(t, r); !strings.Contains(s, "drafter d: n/a, set aside by faults in 1 sequence\n") || strings.Contains(s, "1 sequences") {
		t.Errorf("it reads\n%s", s)
	}
}

func TestARunOfWhichNothingIsStoredYetIsReported(t *testing.T) {
	for _, drafters := range [][]string{nil, {"d"}} {
		dir := recordedRun(t, drafters, func(*data.ResultSink) {})
		r := build(t, dir, Options{Run: "r"})
		if len(r.Runs) != 1 || r.Runs[0].Sequences != 0 || len(r.Runs[0].Drafters) != len(drafters) {
			t.Fatalf("runs are %+v", r.Runs)
		}
		var b bytes.Buffer
		if err := WriteJSON(&b, r); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(b.String(), `"sequences": 0`) {
			t.Errorf("JSON is\n%s", &b)
		}
		for _, s := range []string{text(t, r), html(t, r)} {
			if !strings.Contains(s, "Nothing of this run is stored yet.") {
				t.Errorf("it reads\n%s", s)
			}
		}
	}
}
