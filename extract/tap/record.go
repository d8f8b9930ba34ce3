package tap

import (
	"fmt"
	"math"
	"slices"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/extract/target"
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
	if q.check != "" {
		return f, nil
	}
	if q.probe {
		if err := s.prober.test(q); err != nil {
			return nil, err
		}
	}
	turn, role := make([]int32, len(q.ids)), slices.Repeat([]string{"unknown"}, len(q.ids))
	if s.cfg.Tokenizer != nil {
		turn, role = s.cfg.Tokenizer.Turns(q.ids)
	}
	f.tokens = q.tokens(turn, role)
	n := s.hello.Model.Layers
	if i := slices.Index(s.cfg.States, n); i >= 0 && s.cfg.Target != nil {
		bad, err := score(s.cfg.Target, f.tokens, func(lo, hi int) []float32 { return q.rowsOf(i, lo, hi, s.cfg.DType) })
		if err != nil {
			return nil, fmt.Errorf("scoring sequence %s: %w", q.id, err)
		}
		if bad != "" {
			q.fault(checkFinite, "%s", bad)
			return f, nil
		}
	}
	f.row = schemas.Sequence{
		SeqID: q.id, PromptLen: int32(min(len(q.begin.Prompt), len(q.ids))), Length: int32(len(q.ids)), FinishReason: q.finish,
		Temperature: q.begin.Temperature, Tags: q.begin.Tags, CreatedAt: s.cfg.Now().UTC(),
	}
	if s.cfg.Tokenizer != nil && !s.cfg.Policy.Redact {
		text := s.cfg.Tokenizer.Decode(q.ids)
		f.row.Text = &text
	}
	return f, nil
}

// scoreRows bounds the rows of one head product.
const scoreRows = 256

// score fills in the target's argmax after every token, and the
// log-probability of the token that does follow. final gives rows of state n.
// bad names a row whose logits are not finite.
func score(m *target.Model, tokens []schemas.Token, final func(lo, hi int) []float32) (bad string, err error) {
	dev, h := m.Device(), m.Config().Hidden
	buf, err := dev.New(min(len(tokens), scoreRows) * h)
	if err != nil {
		return "", err
	}
	defer buf.Close()
	for lo := 0; lo < len(tokens); lo += scoreRows {
		hi := min(lo+scoreRows, len(tokens))
		x := cuda.Matrix(buf, hi-lo, h)
		if err := dev.Upload(x, final(lo, hi)); err != nil {
			return "", err
		}
		normed, err := m.Normed(x)
		if err != nil {
			return "", err
		}
		labels := make([]int32, hi-lo)
		for i := range labels {
			labels[i] = -1
			if lo+i+1 < len(tokens) {
				labels[i] = tokens[lo+i+1].TokenID
			}
		}
		res, err := dev.Head(cuda.HeadArgs{Hidden: normed, Weight: m.Head(), K: 1, Labels: labels})
		if err != nil {
			return "", err
		}
		for i := range labels {
			if lse := float64(res.LSE[i]); math.IsNaN(lse) || math.IsInf(lse, 0) {
				return fmt.Sprintf("row %d: the logits are not finite (log-sum-exp %v)", lo+i, lse), nil
			}
			t := &tokens[lo+i]
			t.TargetArgmax = &res.TopIDs[i]
			if labels[i] >= 0 {
				logprob := res.LabelLogit[i] - res.LSE[i]
				t.TargetLogprob = &logprob
			}
		}
	}
	return "", nil
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
