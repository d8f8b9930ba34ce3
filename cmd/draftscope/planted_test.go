package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/pipeline"
	"github.com/draftscope/draftscope/schemas"
)

// plantedSequence is a captured sequence that a test may spoil.
type plantedSequence struct {
	ID     string
	Spec   schemas.CaptureSpec
	Tokens []schemas.Token
	States map[int][]float32
	Row    schemas.Sequence
}

// row is row r of a state.
func (q *plantedSequence) row(state, r int) []float32 {
	return q.States[state][r*q.Spec.Hidden : (r+1)*q.Spec.Hidden]
}

// capturedIn reads the sequences of a dataset's run r1.
func capturedIn(t *testing.T, dir string) (run data.Run, seqs []*plantedSequence) {
	t.Helper()
	ds, err := data.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer ds.Close()
	if run, err = ds.Run("r1"); err != nil {
		t.Fatal(err)
	}
	source, err := ds.Replay("r1", data.ReplayConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer source.Close()
	q := &plantedSequence{States: map[int][]float32{}}
	for {
		id, rec, last, err := source.Next(t.Context())
		if errors.Is(err, io.EOF) {
			return run, seqs
		}
		if err != nil {
			t.Fatal(err)
		}
		q.ID = id
		if c, err := schemas.ReadCapture(rec); err == nil {
			q.Spec = c.Spec
			q.Tokens = append(q.Tokens, c.Tokens...)
			for i, state := range c.Spec.States {
				q.States[state] = c.Spec.DType.AppendFloats(q.States[state], c.States[i])
			}
		} else if rows, err := schemas.Rows[schemas.Sequence](rec); err == nil {
			q.Row = rows[0]
		}
		rec.Release()
		if last {
			seqs = append(seqs, q)
			q = &plantedSequence{States: map[int][]float32{}}
		}
	}
}

// plantedSource sends sequences as they are, sound or not.
type plantedSource struct {
	seqs  []*plantedSequence
	given bool // the rows of the first
}

func (s *plantedSource) Next(context.Context) (seq string, rec arrow.Record, last bool, err error) {
	if len(s.seqs) == 0 {
		return "", nil, false, io.EOF
	}
	q, mem := s.seqs[0], memory.NewGoAllocator()
	if s.given = !s.given; s.given {
		c := schemas.Capture{Spec: q.Spec, Tokens: q.Tokens}
		for _, state := range q.Spec.States {
			c.States = append(c.States, q.Spec.DType.AppendBytes(nil, q.States[state]))
		}
		rec, err = schemas.CaptureRecord(mem, c)
		return q.ID, rec, false, err
	}
	s.seqs = s.seqs[1:]
	return q.ID, schemas.Record(mem, schemas.Envelope{Table: schemas.TableSequences, Run: q.Spec.Run}, []schemas.Sequence{q.Row}), true, nil
}

// plant publishes the sequences of a dataset's run r1, after spoil has seen
// each of them, as another program would.
func plant(t *testing.T, url, dir string, spoil func(*plantedSequence)) {
	t.Helper()
	run, seqs := capturedIn(t, dir)
	run.Drafters = nil
	for _, q := range seqs {
		spoil(q)
	}
	session, err := pipeline.Open(t.Context(), pipeline.Config{Run: "r1", URL: url, Partitions: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	about, err := json.Marshal(run)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := session.DescribeRun(t.Context(), about); err != nil {
		t.Fatal(err)
	}
	if _, err := session.Publish(t.Context(), &plantedSource{seqs: seqs}); err != nil {
		t.Fatal(err)
	}
}
