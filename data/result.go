package data

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/draftscope/draftscope/schemas"
)

// ResultSink stores what drafters made of the sequences of a run: drafts,
// slots and rounds. Each drafter's results of a sequence are stored once and
// together. It serves one goroutine; several sinks of one dataset may work at
// once.
type ResultSink struct {
	sink
	open    map[string]*resultSeq
	ended   []*results
	pending int64
}

// resultSeq is one sequence on its way, with the results of every drafter of
// which a record came, even an empty one.
type resultSeq struct {
	drafters map[string]*results
	faults   []schemas.Fault // of the whole sequence
}

// results are one drafter's results of one sequence.
type results struct {
	seq, drafter string
	drafts       []schemas.Draft
	slots        []schemas.Slot
	rounds       []schemas.Round
	faults       []schemas.Fault
	streamSeq    uint64
	digest       string
}

// ResultSink makes a sink for one shard of a run. The run and the drafters
// must have been added before. Shard is the stream's partition.
func (d *Dataset) ResultSink(run string, shard int, cfg SinkConfig) (*ResultSink, error) {
	s, err := d.newSink(run, shard, cfg)
	if err != nil {
		return nil, fmt.Errorf("opening the result sink of run %s: %w", run, err)
	}
	return &ResultSink{sink: s, open: map[string]*resultSeq{}}, nil
}

// Write takes the next record of a sequence: rows of drafts, slots or rounds
// of the drafter that its envelope names, or faults. It copies what it keeps.
// Faults without a drafter in their envelope set the whole sequence aside. A
// drafter without any anchor sends a record without rows, so that its being
// done is stored too.
func (s *ResultSink) Write(ctx context.Context, seq string, rec arrow.Record) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := s.write(seq, rec); err != nil {
		return fmt.Errorf("storing results of sequence %s: %w", seq, err)
	}
	return nil
}

func (s *ResultSink) write(seq string, rec arrow.Record) error {
	env, err := s.envelope(rec)
	if err != nil {
		return err
	}
	q := s.open[seq]
	if q == nil {
		q = &resultSeq{drafters: map[string]*results{}}
		s.open[seq] = q
	}
	if env.Table == schemas.TableFaults && env.Drafter == "" {
		rows, err := schemas.Rows[schemas.Fault](rec)
		q.faults = append(q.faults, rows...)
		return err
	}
	r := q.drafters[env.Drafter]
	if r == nil {
		if err := s.knows(env.Drafter); err != nil {
			return err
		}
		r = &results{seq: seq, drafter: env.Drafter}
		q.drafters[env.Drafter] = r
	}
	switch env.Table {
	case schemas.TableDrafts:
		return take(rec, seq, &r.drafts, func(d schemas.Draft) string { return d.SeqID })
	case schemas.TableSlots:
		return take(rec, seq, &r.slots, func(d schemas.Slot) string { return d.SeqID })
	case schemas.TableRounds:
		return take(rec, seq, &r.rounds, func(d schemas.Round) string { return d.SeqID })
	case schemas.TableFaults:
		n := len(r.faults)
		err := take(rec, seq, &r.faults, func(f schemas.Fault) string { return f.SeqID })
		// The table has no column for the drafter: the detail names it.
		for i := range r.faults[n:] {
			f := &r.faults[n+i]
			if name := "drafter " + r.drafter + ": "; !strings.HasPrefix(f.Detail, name) {
				f.Detail = name + f.Detail
			}
		}
		return err
	}
	return fmt.Errorf("%w: table %s among results", ErrRecord, env.Table)
}

// knows refuses a drafter that the dataset does not list.
func (s *ResultSink) knows(drafter string) error {
	run, err := s.d.Run(s.run.Name)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(run.Drafters, func(d Drafter) bool { return d.Name == drafter }) {
		return fmt.Errorf("%w: run %s has no drafter %q", ErrUnknownRun, run.Name, drafter)
	}
	return nil
}

// take appends a record's rows to dst. All must belong to seq.
func take[T any](rec arrow.Record, seq string, dst *[]T, id func(T) string) error {
	rows, err := schemas.Rows[T](rec)
	if err != nil {
		return err
	}
	for _, row := range rows {
		if id(row) != seq {
			return fmt.Errorf("%w: a row of sequence %s", ErrRecord, id(row))
		}
	}
	*dst = append(*dst, rows...)
	return nil
}

// End says that a sequence is complete for every drafter of which records
// came; streamSeq is the stream's number of its last message. A sequence of
// which no record came has nothing to store: its capture was a fault, or no
// drafter had anything to say about it.
func (s *ResultSink) End(ctx context.Context, seq string, streamSeq uint64) error {
	q := s.open[seq]
	if q == nil {
		return nil
	}
	delete(s.open, seq)
	for _, f := range q.faults {
		s.addFault(streamSeq, f)
	}
	for _, name := range sorted(q.drafters) {
		r := q.drafters[name]
		r.streamSeq = streamSeq
		if len(q.faults) == 0 {
			s.end(r)
		} else {
			s.counts.SetAside++
		}
	}
	return nil
}

func (s *ResultSink) end(r *results) {
	ok := len(r.faults) == 0
	if ok {
		ok = r.sanitize()
	}
	for _, f := range r.faults {
		s.addFault(r.streamSeq, f)
	}
	if !ok {
		s.counts.SetAside++
		return
	}
	r.digest = r.sum()
	key := seqKey{r.drafter, r.seq}
	switch result, stored := s.d.claim(s.run.Name, key, r.digest); result {
	case claimEqual:
		s.counts.Repeats++
	case claimOther:
		s.conflict(r.streamSeq, key, stored, r.digest)
	case claimNew:
		s.ended = append(s.ended, r)
		s.pending += r.bytes()
	}
}

// sum brings the rows into their order on disk and digests them.
func (r *results) sum() string {
	slices.SortStableFunc(r.drafts, func(a, b schemas.Draft) int { return cmp.Compare(a.Anchor, b.Anchor) })
	slices.SortStableFunc(r.slots, func(a, b schemas.Slot) int {
		return cmp.Or(cmp.Compare(a.Anchor, b.Anchor), cmp.Compare(a.Slot, b.Slot))
	})
	slices.SortStableFunc(r.rounds, func(a, b schemas.Round) int {
		return cmp.Or(strings.Compare(a.Method, b.Method), cmp.Compare(a.Budget, b.Budget), cmp.Compare(a.Round, b.Round))
	})
	h := newRowHash()
	h.uint(uint64(len(r.drafts)))
	addRows(h, r.drafts)
	h.uint(uint64(len(r.slots)))
	addRows(h, r.slots)
	h.uint(uint64(len(r.rounds)))
	addRows(h, r.rounds)
	return hex64(h.sum())
}

func (r *results) bytes() int64 {
	n := int64(len(r.slots)*80 + len(r.rounds)*64)
	for _, d := range r.drafts {
		n += int64(4 * (4 + len(d.DraftTokens) + len(d.TopIDs) + len(d.TopLogprobs)))
	}
	return n
}

// sanitize keeps NaN and Inf out: a value of a column that has NULL becomes
// NULL, and a fault says so; any other sets the results aside. It reports
// whether the results may be stored.
func (r *results) sanitize() bool {
	type column struct {
		count        int
		anchor, slot int32
	}
	bad := map[string]column{}
	note := func(name string, anchor, slot int32) {
		c, seen := bad[name]
		if !seen {
			c.anchor, c.slot = anchor, slot
		}
		c.count++
		bad[name] = c
	}
	fatal := false
	for i := range r.slots {
		row := &r.slots[i]
		for _, f := range []struct {
			name string
			p    **float32
		}{{"ce", &row.CE}, {"kl", &row.KL}, {"rkl", &row.RKL}, {"jsd", &row.JSD}, {"tv", &row.TV}} {
			if *f.p != nil && !finite(**f.p) {
				*f.p = nil
				note("slots."+f.name, row.Anchor, row.Slot)
			}
		}
		if !finite(row.DraftLogprob) {
			fatal = true
			note("slots.draft_logprob", row.Anchor, row.Slot)
		}
	}
	for _, d := range r.drafts {
		for j, v := range d.TopLogprobs {
			if !finite(v) {
				fatal = true
				// Entry j of (B-1)*K belongs to slot j/K + 1.
				note("drafts.top_logprobs", d.Anchor, int32(j/max(1, len(d.TopLogprobs)/max(1, len(d.DraftTokens))))+1)
			}
		}
	}
	what := "stored as NULL"
	if fatal {
		what = "results set aside"
	}
	for _, name := range sorted(bad) {
		c := bad[name]
		r.faults = append(r.faults, schemas.Fault{
			SeqID: r.seq, Chunk: -1, Check: "K1",
			Detail: fmt.Sprintf("drafter %s: %s: %s not finite, first at anchor %d, slot %d; %s", r.drafter, name, count(c.count, "value"), c.anchor, c.slot, what),
		})
	}
	return !fatal
}

// Drop forgets a sequence that has not ended. One that ended stays: if it
// comes again and is equal, the second is dropped.
func (s *ResultSink) Drop(seq string) { delete(s.open, seq) }

// Pending is about the bytes that Commit would make durable.
func (s *ResultSink) Pending() int64 { return s.pending }

// Commit makes the results of every ended sequence durable, one group of
// files a drafter. When it fails, what has become visible is whole, and the
// rest is kept, so that Commit may be called again.
func (s *ResultSink) Commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := s.commitFaults(); err != nil {
		return fmt.Errorf("storing faults of run %s: %w", s.run.Name, err)
	}
	byDrafter := map[string][]*results{}
	for _, r := range s.ended {
		byDrafter[r.drafter] = append(byDrafter[r.drafter], r)
	}
	for _, drafter := range sorted(byDrafter) {
		if err := s.commit(drafter, byDrafter[drafter]); err != nil {
			return fmt.Errorf("storing results of run %s, drafter %s: %w", s.run.Name, drafter, err)
		}
	}
	return nil
}

// commit stores one drafter's results and takes them off the list.
func (s *ResultSink) commit(drafter string, list []*results) (err error) {
	slices.SortFunc(list, func(a, b *results) int { return strings.Compare(a.seq, b.seq) })
	var (
		sp     span
		seqs   []storedSeq
		keys   []seqKey
		drafts []schemas.Draft
		slots  []schemas.Slot
		rounds []schemas.Round
		bytes  int64
	)
	for _, r := range list {
		sp.add(r.streamSeq)
		seqs = append(seqs, storedSeq{r.seq, r.digest})
		keys = append(keys, seqKey{drafter, r.seq})
		drafts = append(drafts, r.drafts...)
		slots = append(slots, r.slots...)
		rounds = append(rounds, r.rounds...)
		bytes += r.bytes()
	}
	if err := s.d.present(); err != nil {
		return err
	}
	g, release := s.d.reserve(s.shard, sp, func(g group) []string { return g.resultPaths(s.d.dir, s.run.Name, drafter) })
	defer release()
	paths := g.resultPaths(s.d.dir, s.run.Name, drafter)
	var parts []part
	defer func() {
		if err != nil {
			s.discard(parts)
		}
	}()
	p, err := writeSmall(&s.sink, paths[0], schemas.TableDrafts, drafter, sp, seqs, nil, drafts)
	if err != nil {
		return err
	}
	parts = append(parts, p)
	if p, err = writeSmall(&s.sink, paths[1], schemas.TableSlots, drafter, sp, seqs, nil, slots); err != nil {
		return err
	}
	parts = append(parts, p)
	if p, err = writeSmall(&s.sink, paths[2], schemas.TableRounds, drafter, sp, seqs, parts, rounds); err != nil {
		return err
	}
	parts = append(parts, p)
	if err := errors.Join(publish(s.d.disk, parts), s.d.present()); err != nil {
		return err
	}
	s.d.settle(s.run.Name, keys, true)
	s.counts.Stored += len(list)
	s.pending -= bytes
	s.ended = slices.DeleteFunc(s.ended, func(r *results) bool { return r.drafter == drafter })
	return nil
}

// Close gives up what was not committed.
func (s *ResultSink) Close() error {
	var keys []seqKey
	for _, r := range s.ended {
		keys = append(keys, seqKey{r.drafter, r.seq})
	}
	s.d.settle(s.run.Name, keys, false)
	s.forgetFaults()
	s.ended, s.pending = nil, 0
	clear(s.open)
	return nil
}
