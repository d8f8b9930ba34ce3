package target

import (
	"fmt"
	"math"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/schemas"
)

// scoreRows is how many rows are scored at once: few would read the head's
// weights often.
const scoreRows = 2048

// Score fills in the target's argmax after every token and the log-probability
// of the token that does follow. final gives rows of state n, or, with
// normed, of what the final norm makes of it. bad names a row whose logits are
// not finite.
func (m *Model) Score(tokens []schemas.Token, final func(lo, hi int) []float32, normed bool) (bad string, err error) {
	return m.score(tokens, func(x cuda.Tensor, lo, hi int) error { return m.dev.Upload(x, final(lo, hi)) }, normed)
}

// score is Score of rows lo..hi-1 that final brings to x.
func (m *Model) score(tokens []schemas.Token, final func(x cuda.Tensor, lo, hi int) error, normed bool) (bad string, err error) {
	h := m.cfg.Hidden
	for lo := 0; lo < len(tokens); lo += scoreRows {
		hi := min(lo+scoreRows, len(tokens))
		x, err := m.work("scored", hi-lo, h)
		if err != nil {
			return "", err
		}
		if err := final(x, lo, hi); err != nil {
			return "", err
		}
		if !normed {
			if x, err = m.Normed(x); err != nil {
				return "", err
			}
		}
		labels := make([]int32, hi-lo)
		for i := range labels {
			labels[i] = -1
			if lo+i+1 < len(tokens) {
				labels[i] = tokens[lo+i+1].TokenID
			}
		}
		res, err := m.dev.Head(cuda.HeadArgs{Hidden: x, Weight: m.head, K: 1, Labels: labels})
		if err != nil {
			return "", err
		}
		for i := range labels {
			t := &tokens[lo+i]
			if lse := float64(res.LSE[i]); math.IsNaN(lse) || math.IsInf(lse, 0) {
				return fmt.Sprintf("row %d: the logits are not finite (log-sum-exp %v)", lo+i, lse), nil
			}
			t.TargetArgmax = &res.TopIDs[i]
			if labels[i] >= 0 {
				logprob := res.LabelLogit[i] - res.LSE[i]
				t.TargetLogprob = &logprob
			}
		}
	}
	return "", nil
}

// record is the sequence's next record.
func (f *finished) record(s *Source) (rec arrow.Record, last bool, err error) {
	mem, run := s.cfg.Allocator, s.cfg.Run
	if f.fault != "" {
		rows := []schemas.Fault{{SeqID: f.id, Chunk: -1, Check: checkFinite, Detail: f.fault, At: s.cfg.Now().UTC()}}
		return schemas.Record(mem, schemas.Envelope{Table: schemas.TableFaults, Run: run}, rows), true, nil
	}
	if f.rows == len(f.tokens) {
		rows := []schemas.Sequence{f.row}
		return schemas.Record(mem, schemas.Envelope{Table: schemas.TableSequences, Run: run}, rows), true, nil
	}
	lo, hi := f.rows, min(f.rows+s.cfg.BatchRows, len(f.tokens))
	spec := s.Spec()
	width := spec.Hidden * spec.DType.Size()
	var states []*memory.Buffer
	for _, all := range f.states {
		rows := memory.SliceBuffer(all, lo*width, (hi-lo)*width)
		defer rows.Release()
		states = append(states, rows)
	}
	if rec, err = schemas.CaptureRecordOf(mem, spec, f.tokens[lo:hi], states); err != nil {
		return nil, false, err
	}
	f.rows = hi
	return rec, false, nil
}
