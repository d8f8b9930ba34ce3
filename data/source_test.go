package data

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/draftscope/draftscope/schemas"
	"github.com/google/go-cmp/cmp"
)

// replayAll reads a source to its end.
func replayAll(t testing.TB, src *ReplaySource) map[string]sample {
	t.Helper()
	got := map[string]sample{}
	for {
		seq, rec, last, err := src.Next(t.Context())
		if errors.Is(err, io.EOF) {
			return got
		}
		if err != nil {
			t.Fatal(err)
		}
		s := got[seq]
		if s.sequence.SeqID != "" {
			t.Fatalf("sequence %s goes on after its last record", seq)
		}
		if last {
			rows, err := schemas.Rows[schemas.Sequence](rec)
			if err != nil || len(rows) != 1 {
				t.Fatalf("the last record of %s is no row of sequences: %v", seq, err)
			}
			s.sequence = rows[0]
		} else {
			c, err := schemas.ReadCapture(rec)
			if err != nil {
				t.Fatal(err)
			}
			s.spec = c.Spec
			s.tokens = append(s.tokens, c.Tokens...)
			if s.states == nil {
				s.states = make([][]byte, len(c.States))
			}
			for i, raw := range c.States {
				s.states[i] = append(s.states[i], raw...)
			}
		}
		got[seq] = s
		rec.Release()
	}
}

// compareReplay checks that the run holds exactly want.
func compareReplay(t *testing.T, d *Dataset, run string, want map[string]sample) {
	t.Helper()
	src, err := d.Replay(run, ReplayConfig{BatchRows: 10, Allocator: checked(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	got := replayAll(t, src)
	if len(got) != len(want) {
		t.Errorf("%d sequences came back, want %d", len(got), len(want))
	}
	for id, w := range want {
		g, ok := got[id]
		if !ok {
			t.Errorf("sequence %s is missing", id)
			continue
		}
		if diff := cmp.Diff(w.sequence, g.sequence); diff != "" {
			t.Errorf("the row of %s (-want +got):\n%s", id, diff)
		}
		if diff := cmp.Diff(w.tokens, g.tokens); diff != "" {
			t.Errorf("tokens of %s (-want +got):\n%s", id, diff)
		}
		if diff := cmp.Diff(w.spec, g.spec); diff != "" {
			t.Errorf("the capture of %s (-want +got):\n%s", id, diff)
		}
		for i := range w.states {
			if i >= len(g.states) || !bytes.Equal(w.states[i], g.states[i]) {
				t.Errorf("state %d of %s is not bit-equal", w.spec.States[i], id)
			}
		}
	}
}
