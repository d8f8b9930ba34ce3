package data

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/cespare/xxhash/v2"
	"github.com/draftscope/draftscope/data/statefile"
	"github.com/draftscope/draftscope/schemas"
	"github.com/draftscope/draftscope/schemas/sound"
)

// CaptureSink stores captured sequences: their tokens, states and own rows.
// It holds the records of a sequence, uncopied, until the Commit after its
// End. A sequence with a fault is stored as that fault and nothing else.
//
// It serves one goroutine; several sinks of one dataset may work at once.
type CaptureSink struct {
	sink
	open    map[string]*captureSeq
	ended   []*captureSeq
	pending int64
}

// captureSeq is one sequence on its way.
type captureSeq struct {
	id        string
	tokens    []schemas.Token
	batches   []captureBatch
	sequence  *schemas.Sequence
	faults    []schemas.Fault
	checker   *sound.Checker
	rounded   []RoundingError       // by state
	lossless  []*statefile.VecMeter // by state; of a rounded run
	hashes    []*xxhash.Digest
	bytes     int64
	streamSeq uint64
	digest    string
}

// captureBatch is one record: for each state its raw rows and their norms.
type captureBatch struct {
	rec    arrow.Record // that the rows are views of, retained; nil when they were rounded
	rows   int
	states [][]byte
	norms  [][]float32
}

func (s *captureSeq) release() {
	for _, b := range s.batches {
		if b.rec != nil {
			b.rec.Release()
		}
	}
	s.batches = nil
}

// CaptureSink makes a sink for one shard of a run, which must have been added
// before. Shard is the stream's partition.
func (d *Dataset) CaptureSink(run string, shard int, cfg SinkConfig) (*CaptureSink, error) {
	s, err := d.newSink(run, shard, cfg)
	if err != nil {
		return nil, fmt.Errorf("opening the capture sink of run %s: %w", run, err)
	}
	return &CaptureSink{sink: s, open: map[string]*captureSeq{}}, nil
}

// Write takes the next record of a sequence: a batch of the capture, its one
// row of the table sequences, or faults. It retains what it keeps. A record
// of another run, table or shape is an error; what is wrong with the data in
// it becomes a fault.
func (s *CaptureSink) Write(ctx context.Context, seq string, rec arrow.Record) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := s.write(seq, rec); err != nil {
		return fmt.Errorf("storing sequence %s: %w", seq, err)
	}
	return nil
}

func (s *CaptureSink) write(seq string, rec arrow.Record) error {
	env, err := s.envelope(rec)
	if err != nil {
		return err
	}
	q := s.open[seq]
	if q == nil {
		q = &captureSeq{id: seq, checker: sound.NewChecker(s.run.Profile), rounded: s.run.noErrors()}
		for range s.run.States {
			q.hashes = append(q.hashes, xxhash.New())
			if s.run.Rounding != Lossless {
				m, err := statefile.NewVecMeter(statefile.Config{DType: s.run.DType, Hidden: s.run.Hidden})
				if err != nil {
					return err
				}
				q.lossless = append(q.lossless, m)
			}
		}
		s.open[seq] = q
	}
	switch env.Table {
	case schemas.TableCapture:
		return s.writeCapture(q, rec)
	case schemas.TableSequences:
		rows, err := schemas.Rows[schemas.Sequence](rec)
		if err != nil {
			return err
		}
		for _, row := range rows {
			if row.SeqID != seq || q.sequence != nil {
				q.fault("K3", fmt.Sprintf("a row of the table sequences too many: %q", row.SeqID))
				continue
			}
			q.sequence = &row
		}
		return nil
	case schemas.TableFaults:
		rows, err := schemas.Rows[schemas.Fault](rec)
		q.faults = append(q.faults, rows...)
		return err
	}
	return fmt.Errorf("%w: table %s in a capture", ErrRecord, env.Table)
}

func (s *CaptureSink) writeCapture(q *captureSeq, rec arrow.Record) error {
	c, err := schemas.ReadCapture(rec)
	if err != nil {
		return err
	}
	if c.Spec.Hidden != s.run.Hidden || c.Spec.Layers != s.run.Layers || c.Spec.DType != s.run.DType || !slices.Equal(c.Spec.States, s.run.States) {
		return fmt.Errorf("%w: states %v of %d values, %s, %d layers; run %s records %v of %d, %s, %d", ErrMismatch,
			c.Spec.States, c.Spec.Hidden, c.Spec.DType, c.Spec.Layers, s.run.Name, s.run.States, s.run.Hidden, s.run.DType, s.run.Layers)
	}
	for i, t := range c.Tokens {
		if want := int32(len(q.tokens) + i); t.Pos != want || t.SeqID != q.id {
			q.fault("K3", fmt.Sprintf("row %d is position %d of %q", want, t.Pos, t.SeqID))
			break
		}
	}
	if s.run.Rounding != Lossless {
		q.checker.Add(c, nil)
		for i, raw := range c.States {
			if err := q.lossless[i].Add(raw); err != nil {
				return err
			}
			c.States[i] = s.run.Rounding.round(c.Spec.DType, c.Spec.Hidden, raw, &q.rounded[i])
		}
		rec = nil
	}
	b := captureBatch{rec: rec, rows: len(c.Tokens), states: c.States, norms: make([][]float32, len(c.States))}
	for i, raw := range c.States {
		q.hashes[i].Write(raw)
		b.norms[i] = statefile.AppendNorms(make([]float32, 0, b.rows), c.Spec.DType, c.Spec.Hidden, raw)
		q.bytes += int64(len(raw))
	}
	if s.run.Rounding == Lossless {
		q.checker.Add(c, b.norms)
	}
	q.tokens = append(q.tokens, c.Tokens...)
	if rec != nil {
		rec.Retain()
	}
	q.batches = append(q.batches, b)
	return nil
}

func (q *captureSeq) fault(check, detail string) {
	q.faults = append(q.faults, schemas.Fault{SeqID: q.id, Chunk: -1, Check: check, Detail: detail})
}

// End says that a sequence is complete; streamSeq is the stream's number of
// its last message.
func (s *CaptureSink) End(ctx context.Context, seq string, streamSeq uint64) error {
	q := s.open[seq]
	if q == nil {
		return fmt.Errorf("storing sequence %s: %w: it ended and no record of it came", seq, ErrRecord)
	}
	delete(s.open, seq)
	q.streamSeq = streamSeq
	for i, m := range q.lossless {
		var err error
		if q.rounded[i].LosslessBytes, err = m.Sum(); err != nil {
			return fmt.Errorf("storing sequence %s: %w", seq, err)
		}
	}
	s.check(q)
	if len(q.faults) > 0 {
		s.counts.SetAside++
		for _, f := range q.faults {
			s.addFault(streamSeq, f)
		}
		q.release()
		return nil
	}
	for _, f := range q.nullBadScores() {
		s.addFault(streamSeq, f)
	}
	h := newRowHash()
	q.digest = captureDigest(h, *q.sequence, q.tokens, q.hashes)
	switch result, stored := s.d.claim(s.run.Name, seqKey{seq: seq}, q.digest); result {
	case claimEqual:
		s.counts.Repeats++
		q.release()
	case claimOther:
		s.conflict(streamSeq, seqKey{seq: seq}, stored, q.digest)
		q.release()
	case claimNew:
		s.ended = append(s.ended, q)
		s.pending += q.bytes + int64(len(q.tokens))*64
	}
	return nil
}

// captureDigest is the digest of all that is stored of a captured sequence:
// its row, its tokens, and the bytes of each state in order.
func captureDigest(h *rowHash, seq schemas.Sequence, tokens []schemas.Token, states []*xxhash.Digest) string {
	addRows(h, []schemas.Sequence{seq})
	addRows(h, tokens)
	for _, st := range states {
		h.uint(st.Sum64())
	}
	return hex64(h.sum())
}

// check turns what is wrong with a complete sequence into faults.
func (s *CaptureSink) check(q *captureSeq) {
	if len(q.faults) > 0 {
		return
	}
	for _, f := range q.checker.End() {
		q.fault(f.Check, f.String())
	}
	if len(q.faults) > 0 {
		return
	}
	switch row := q.sequence; {
	case row == nil:
		q.fault("K3", "it ended without its row of the table sequences")
	case int(row.Length) != len(q.tokens):
		q.fault("K3", fmt.Sprintf("length %d and %d rows of states", row.Length, len(q.tokens)))
	case row.Length == 0:
		q.fault("K3", "it has no tokens")
	case row.PromptLen < 0 || row.PromptLen > row.Length:
		q.fault("K3", fmt.Sprintf("prompt of %d tokens in a sequence of %d", row.PromptLen, row.Length))
	case !finite(row.Temperature):
		q.fault("K1", "temperature is not finite")
	default:
		ids, answers := sound.Recorded(q.tokens)
		if detail := sound.Greedy(ids, answers, *row); detail != "" {
			q.fault("K5", detail)
		}
	}
}

// nullBadScores replaces log-probabilities that are not finite by NULL.
func (q *captureSeq) nullBadScores() []schemas.Fault {
	bad, first := 0, 0
	for i := range q.tokens {
		if p := q.tokens[i].TargetLogprob; p != nil && !finite(*p) {
			q.tokens[i].TargetLogprob = nil
			if bad++; bad == 1 {
				first = i
			}
		}
	}
	if bad == 0 {
		return nil
	}
	return []schemas.Fault{{
		SeqID: q.id, Chunk: -1, Check: "K1",
		Detail: fmt.Sprintf("target_logprob, row %d: %d values not finite, stored as NULL", first, bad),
	}}
}

func finite(v float32) bool { return !math.IsNaN(float64(v)) && !math.IsInf(float64(v), 0) }

// Drop forgets a sequence that has not ended. One that ended stays: if it
// comes again and is equal, the second is dropped.
func (s *CaptureSink) Drop(seq string) {
	if q := s.open[seq]; q != nil {
		q.release()
		delete(s.open, seq)
	}
}

// Pending is about the bytes, as captured, that Commit would make durable.
func (s *CaptureSink) Pending() int64 { return s.pending }

// Commit makes every ended sequence durable. When it fails nothing of them is
// visible and all are kept, so that Commit may be called again.
func (s *CaptureSink) Commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := s.commitFaults(); err != nil {
		return fmt.Errorf("storing faults of run %s: %w", s.run.Name, err)
	}
	if len(s.ended) == 0 {
		return nil
	}
	slices.SortFunc(s.ended, func(a, b *captureSeq) int { return strings.Compare(a.id, b.id) })
	if err := s.commit(ctx); err != nil {
		return fmt.Errorf("storing %d sequences of run %s: %w", len(s.ended), s.run.Name, err)
	}
	keys := make([]seqKey, len(s.ended))
	for i, q := range s.ended {
		keys[i] = seqKey{seq: q.id}
		q.release()
	}
	s.d.settle(s.run.Name, keys, true)
	s.counts.Stored += len(keys)
	s.ended, s.pending = nil, 0
	return nil
}

func (s *CaptureSink) commit(ctx context.Context) (err error) {
	var (
		sp        span
		list      []storedSeq
		tokens    []schemas.Token
		sequences []schemas.Sequence
	)
	for _, q := range s.ended {
		sp.add(q.streamSeq)
		list = append(list, storedSeq{q.id, q.digest})
		tokens = append(tokens, q.tokens...)
		sequences = append(sequences, *q.sequence)
	}
	if err := s.d.present(); err != nil {
		return err
	}
	g, release := s.d.reserve(s.shard, sp, func(g group) []string { return g.capturePaths(s.d.dir, s.run.Name) })
	defer release()
	paths := g.capturePaths(s.d.dir, s.run.Name)
	var parts []part
	defer func() {
		if err != nil {
			s.discard(parts)
		}
	}()
	rounded := s.run.noErrors()
	for _, q := range s.ended {
		addErrors(rounded, q.rounded)
	}
	p, err := s.writeStates(ctx, paths[0], sp, list, rounded)
	if err != nil {
		return err
	}
	parts = append(parts, p)
	if p, err = writeSmall(&s.sink, paths[1], schemas.TableTokens, "", sp, list, nil, tokens); err != nil {
		return err
	}
	parts = append(parts, p)
	if p, err = writeSmall(&s.sink, paths[2], schemas.TableSequences, "", sp, list, parts, sequences); err != nil {
		return err
	}
	parts = append(parts, p)
	if err := publish(s.d.disk, parts); err != nil {
		return err
	}
	return s.d.present()
}

// writeStates writes state after state, and within a state sequence after
// sequence. A row group never holds two states.
func (s *CaptureSink) writeStates(ctx context.Context, path string, sp span, list []storedSeq, rounded []RoundingError) (part, error) {
	f, err := s.statesFooter(sp, list, rounded)
	if err != nil {
		return part{}, err
	}
	cfg := statefile.Config{DType: s.run.DType, Hidden: s.run.Hidden, GroupBytes: s.cfg.RowGroupBytes, Workers: s.cfg.EncodeWorkers}
	return writePart(s.d.disk, path, f, func(out io.Writer) (*statefile.Writer, error) {
		return statefile.NewWriter(out, cfg)
	}, func(w *statefile.Writer) error {
		for i, c := range s.run.States {
			for _, q := range s.ended {
				pos := 0
				for _, b := range q.batches {
					if err := errors.Join(w.Write(statefile.Rows{SeqID: q.id, Pos: int32(pos), State: int32(c), Norms: b.norms[i], Raw: b.states[i]}), ctx.Err()); err != nil {
						return err
					}
					pos += b.rows
				}
			}
		}
		return nil
	})
}

// statesFooter is what a file of the table states says.
func (s *sink) statesFooter(sp span, list []storedSeq, rounded []RoundingError) (footer, error) {
	f, err := newFooter[schemas.State](schemas.TableStates, s.run.Name, "", s.shard, s.cfg, sp, list)
	if err != nil {
		return nil, err
	}
	f[keyDType] = string(s.run.DType)
	f[keyHidden] = strconv.Itoa(s.run.Hidden)
	f[keyLayers] = strconv.Itoa(s.run.Layers)
	f[keyStates] = strings.Trim(strings.Join(strings.Fields(fmt.Sprint(s.run.States)), ","), "[]")
	if s.run.Rounding != Lossless {
		b, err := json.Marshal(rounded)
		if err != nil {
			return nil, fmt.Errorf("encoding the rounding errors: %w", err)
		}
		f[keyEncoding], f[keyRounding] = string(s.run.Rounding), string(b)
	}
	return f, nil
}

// Close gives up what was not committed.
func (s *CaptureSink) Close() error {
	var keys []seqKey
	for _, q := range s.ended {
		keys = append(keys, seqKey{seq: q.id})
		q.release()
	}
	s.d.settle(s.run.Name, keys, false)
	s.forgetFaults()
	s.ended, s.pending = nil, 0
	for seq := range s.open {
		s.Drop(seq)
	}
	return nil
}
