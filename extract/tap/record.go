package tap

import (
	"fmt"
	"slices"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/draftscope/draftscope/schemas"
)

// finished is a sequence whose records Next gives out.
type finished struct {
	*sequence
	tokens []schemas.Token
	row    schemas.Sequence
	given  int // blocks
}

// complete tests a sequence's claims where it is the turn of that, and makes
// its rows of the tables.
func (s *Source) complete(q *sequence) (*finished, error) {
	f := &finished{sequence: q}
	if s.fill(q); q.check != "" {
		return f, nil
	}
	if q.probe {
		err := s.prober.Test(q.ids, q.lent, func(i, r int) []float32 { return q.rowsOf(i, r, r+1, s.cfg.DType) })
		if err != nil {
			return nil, fmt.Errorf("testing the states of sequence %s: %w", q.id, err)
		}
	}
	turn, role := make([]int32, len(q.ids)), slices.Repeat([]string{"unknown"}, len(q.ids))
	if s.cfg.Tokenizer != nil {
		turn, role = s.cfg.Tokenizer.Turns(q.ids)
	}
	f.tokens = q.tokens(turn, role)
	n := s.hello.Model.Layers
	if i := slices.Index(s.cfg.States, n); i >= 0 && s.cfg.Target != nil {
		bad, err := s.cfg.Target.Score(f.tokens, func(lo, hi int) []float32 { return q.rowsOf(i, lo, hi, s.cfg.DType) }, false)
		if err != nil {
			return nil, fmt.Errorf("scoring sequence %s: %w", q.id, err)
		}
		if bad != "" {
			q.fault(checkFinite, "%s", bad)
			s.mu.Lock()
			s.prefixes.drop(func(k *kept) bool { return k.id == q.id })
			s.mu.Unlock()
			return f, nil
		}
	}
	s.measure(q)
	f.row = schemas.Sequence{
		SeqID: q.id, PromptLen: int32(min(len(q.begin.Prompt), len(q.ids))), Length: int32(len(q.ids)), FinishReason: q.finish,
		Temperature: q.begin.Temperature, Tags: q.tags(), CreatedAt: s.cfg.Now().UTC(),
	}
	if s.cfg.Tokenizer != nil && !s.cfg.Policy.Redact {
		text := s.cfg.Tokenizer.Decode(q.ids)
		f.row.Text = &text
	}
	return f, nil
}

// record is the sequence's next record: a fault, the next rows, or at last
// its row of the table sequences. freed says that a block was given out.
func (f *finished) record(s *Source) (rec arrow.Record, freed, last bool, err error) {
	mem, run := s.cfg.Allocator, s.cfg.Run
	switch {
	case f.check != "":
		if f.blocks != nil { // the fault was found by Next
			s.mu.Lock()
			s.freeLocked(f.sequence)
			s.mu.Unlock()
			f.blocks = nil
		}
		rows := []schemas.Fault{{SeqID: f.id, Chunk: -1, Check: f.check, Detail: f.detail, At: s.cfg.Now().UTC()}}
		return schemas.Record(mem, schemas.Envelope{Table: schemas.TableFaults, Run: run}, rows), false, true, nil
	case f.given == len(f.blocks):
		rows := []schemas.Sequence{f.row}
		return schemas.Record(mem, schemas.Envelope{Table: schemas.TableSequences, Run: run}, rows), false, true, nil
	}
	b := f.blocks[f.given]
	lo := f.given * blockRows
	rec, err = schemas.CaptureRecord(mem, schemas.Capture{Spec: s.Spec(), Tokens: f.tokens[lo : lo+b.rows], States: b.states})
	if err != nil {
		return nil, false, false, err
	}
	f.blocks[f.given] = nil
	f.given++
	return rec, true, false, nil
}
