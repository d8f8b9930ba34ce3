package data

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/cespare/xxhash/v2"
	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go"
)

// ReplayConfig says what is replayed. The zero value is all of the run.
type ReplayConfig struct {
	// Want picks sequences; nil takes all.
	Want func(seqID string) bool
	// BatchRows is the most tokens in a record; 0 means 64.
	BatchRows int
	// Allocator makes the records; nil means the Go heap.
	Allocator memory.Allocator
	// Damaged, when not nil, is told of a file, or a sequence in it, that
	// cannot be read or is not what was stored; the replay goes on without.
	// When it is nil the replay ends with that error.
	Damaged func(path string, err error)
}

// Validate reports what of the config cannot be used.
func (c ReplayConfig) Validate() error {
	if c.BatchRows < 0 {
		return fmt.Errorf("batches of %d rows: want 0 or more", c.BatchRows)
	}
	return nil
}

// ReplaySource yields the stored captures of a run as the records that a live
// capture would send: batches of tokens and states, then the sequence's own
// row. The states have the run's dtype and are bit-equal to what was
// captured: each sequence is compared with its stored digest before anything
// of it is yielded. It holds one sequence at a time, and one page of each
// state. It serves one goroutine.
type ReplaySource struct {
	run   Run
	cfg   ReplayConfig
	root  string
	parts []string // markers left to read
	part  *replayPart
	// marker is that of part.
	marker string
	queue  []arrow.Record // of the current sequence
	seq    string
}

// Replay makes a source of the stored sequences of a run, in the order of
// their files.
func (d *Dataset) Replay(run string, cfg ReplayConfig) (*ReplaySource, error) {
	r, err := d.Run(run)
	if err == nil {
		err = cfg.Validate()
	}
	if err != nil {
		return nil, fmt.Errorf("replaying run %s: %w", run, err)
	}
	if cfg.BatchRows == 0 {
		cfg.BatchRows = 64
	}
	if cfg.Allocator == nil {
		cfg.Allocator = memory.NewGoAllocator()
	}
	parts, err := d.captureMarkers(run)
	if err != nil {
		return nil, fmt.Errorf("replaying run %s: %w", run, err)
	}
	return &ReplaySource{run: r, cfg: cfg, root: d.dir, parts: parts}, nil
}

// Next returns the next record, the sequence it belongs to, and whether it is
// that sequence's last. The caller releases the record. At the end it returns
// io.EOF.
func (s *ReplaySource) Next(ctx context.Context) (seq string, rec arrow.Record, last bool, err error) {
	if len(s.queue) == 0 {
		q, err := s.Sequence(ctx)
		if err == nil {
			s.seq = q.SeqID
			err = s.enqueue(q)
		}
		if err != nil {
			return "", nil, false, err
		}
	}
	rec, s.queue = s.queue[0], s.queue[1:]
	return s.seq, rec, len(s.queue) == 0, nil
}

// StoredSequence is one stored capture as a whole.
type StoredSequence struct {
	schemas.Sequence
	Tokens []schemas.Token
	// States holds a raw matrix [length, hidden] of the run's dtype for each
	// of the run's states, in their order. The caller owns it.
	States [][]byte
}

// Sequence returns the next sequence whole, without making records of it. At
// the end it returns io.EOF. Records of [ReplaySource.Next] that were not
// fetched yet are not in it.
func (s *ReplaySource) Sequence(ctx context.Context) (q StoredSequence, err error) {
	for ok := false; !ok; {
		if err := ctx.Err(); err != nil {
			return q, err
		}
		if q, ok, err = s.load(); err != nil {
			return q, err
		}
	}
	return q, nil
}

// load reads the next sequence, or moves to the next part.
func (s *ReplaySource) load() (q StoredSequence, ok bool, err error) {
	if s.part == nil {
		if len(s.parts) == 0 {
			return q, false, io.EOF
		}
		path := s.parts[0]
		s.parts = s.parts[1:]
		s.marker = path
		part, bad, err := openReplayPart(s.root, s.run, path)
		if err != nil {
			return q, false, s.damaged(bad, err)
		}
		if err := part.states.verifyBody(); err != nil {
			return q, false, s.damaged(part.states.path, errors.Join(err, part.Close()))
		}
		s.part = part
	}
	if s.part.done() {
		err := s.part.Close()
		s.part = nil
		return q, false, err
	}
	q.Sequence = s.part.sequences[0]
	if s.cfg.Want != nil && !s.cfg.Want(q.SeqID) {
		s.part.skip()
		return q, false, nil
	}
	if q.Tokens, q.States, err = s.part.read(); err != nil {
		return q, false, s.damaged(s.part.states.path, fmt.Errorf("replaying sequence %s: %w", q.SeqID, err))
	}
	return q, true, nil
}

// damaged reports err, or returns it when nobody asked for reports.
func (s *ReplaySource) damaged(path string, err error) error {
	err = withRemedy(err, s.marker, false)
	if s.cfg.Damaged == nil {
		return err
	}
	s.cfg.Damaged(path, err)
	return nil
}

func (s *ReplaySource) enqueue(q StoredSequence) error {
	spec := schemas.CaptureSpec{Run: s.run.Name, Hidden: s.run.Hidden, Layers: s.run.Layers, States: s.run.States, DType: s.run.DType}
	width := spec.Hidden * spec.DType.Size()
	for lo := 0; lo < len(q.Tokens); lo += s.cfg.BatchRows {
		hi := min(lo+s.cfg.BatchRows, len(q.Tokens))
		c := schemas.Capture{Spec: spec, Tokens: q.Tokens[lo:hi]}
		for _, raw := range q.States {
			c.States = append(c.States, raw[lo*width:hi*width])
		}
		rec, err := schemas.CaptureRecord(s.cfg.Allocator, c)
		if err != nil {
			return fmt.Errorf("replaying sequence %s: %w", q.SeqID, err)
		}
		s.queue = append(s.queue, rec)
	}
	env := schemas.Envelope{Table: schemas.TableSequences, Run: s.run.Name}
	s.queue = append(s.queue, schemas.Record(s.cfg.Allocator, env, []schemas.Sequence{q.Sequence}))
	return nil
}

// Close releases what was not fetched, and closes the open files.
func (s *ReplaySource) Close() error {
	for _, rec := range s.queue {
		rec.Release()
	}
	s.queue, s.parts = nil, nil
	if s.part == nil {
		return nil
	}
	part := s.part
	s.part = nil
	return part.Close()
}

// replayPart is one open commit group of a capture.
type replayPart struct {
	run       Run
	sequences []schemas.Sequence // left to read, the next one first
	digests   map[string]string
	tokens    []schemas.Token // of all sequences of the part
	total     int64           // their number
	at        int64           // the next sequence's first token among them
	states    *openedPart
	cursors   []*vecCursor // by index into run.States
}

// openReplayPart returns the file to blame with an error. The content of the
// states file is not compared with its digest yet.
func openReplayPart(root string, run Run, marker string) (_ *replayPart, bad string, err error) {
	g, ok := parseGroup(filepath.Base(marker))
	if !ok {
		return nil, marker, fmt.Errorf("reading %s: %w: not a name of ours", marker, ErrDamaged)
	}
	paths := g.capturePaths(root, run.Name)
	p := &replayPart{run: run, digests: map[string]string{}}
	m, err := openPart(marker)
	if err != nil {
		return nil, marker, err
	}
	list, err := m.sequences()
	if err = errors.Join(err, m.Close()); err != nil {
		return nil, marker, err
	}
	for _, s := range list {
		p.digests[s.SeqID] = s.Digest
	}
	if p.sequences, err = readRows[schemas.Sequence](marker); err != nil {
		return nil, marker, err
	}
	if p.tokens, err = readRows[schemas.Token](paths[1]); err != nil {
		return nil, paths[1], err
	}
	p.total = int64(len(p.tokens))
	var promised int64
	for _, s := range p.sequences {
		promised += int64(max(s.Length, 0))
	}
	if promised != p.total {
		return nil, paths[1], fmt.Errorf("reading %s: %w: %d tokens, its sequences have %d", paths[1], ErrDamaged, p.total, promised)
	}
	if p.states, err = openPart(paths[0]); err != nil {
		return nil, paths[0], err
	}
	defer func() {
		if err != nil {
			p.Close()
		}
	}()
	if want := p.total * int64(len(run.States)); p.states.NumRows() != want {
		return nil, paths[0], fmt.Errorf("reading %s: %w: %d rows, want %d tokens of %d states", paths[0], ErrDamaged, p.states.NumRows(), p.total, len(run.States))
	}
	for i := range run.States {
		p.cursors = append(p.cursors, &vecCursor{file: p.states, next: int64(i) * p.total, hidden: run.Hidden, dtype: run.DType})
	}
	return p, "", nil
}

func (p *replayPart) done() bool { return len(p.sequences) == 0 }

func (p *replayPart) skip() {
	p.at += int64(p.sequences[0].Length)
	p.sequences = p.sequences[1:]
}

// read returns the tokens and, for each state, the raw rows of the next
// sequence, and moves past it, also on an error.
func (p *replayPart) read() (tokens []schemas.Token, states [][]byte, err error) {
	seq, at := p.sequences[0], p.at
	p.skip()
	tokens = p.tokens[at:p.at]
	var hashes []*xxhash.Digest
	for i, cur := range p.cursors {
		var raw []byte
		if err := guard(func() error {
			raw, err = cur.rows(int64(i)*p.total+at, len(tokens))
			return err
		}); err != nil {
			return nil, nil, fmt.Errorf("reading state %d in %s: %w", p.run.States[i], p.states.path, err)
		}
		h := xxhash.New()
		h.Write(raw)
		hashes, states = append(hashes, h), append(states, raw)
	}
	if err := p.checkDigest(seq, tokens, hashes); err != nil {
		return nil, nil, err
	}
	return tokens, states, nil
}

// checkDigest compares a sequence with what was stored of it; the hashes are
// of all rows of each state.
func (p *replayPart) checkDigest(seq schemas.Sequence, tokens []schemas.Token, hashes []*xxhash.Digest) error {
	if got, want := captureDigest(newRowHash(), seq, tokens, hashes), p.digests[seq.SeqID]; got != want {
		return fmt.Errorf("reading %s: %w: its content has digest %s, stored was %s", p.states.path, ErrDamaged, got, want)
	}
	return nil
}

func (p *replayPart) Close() error {
	var errs []error
	for _, c := range p.cursors {
		errs = append(errs, c.close())
	}
	return errors.Join(append(errs, p.states.Close())...)
}

// vecPath is the column that takes nearly all of a dataset's space.
var vecPath = []string{"vec", "list", "element"}

// vecCursor reads the column vec forwards, a page at a time.
type vecCursor struct {
	file   *openedPart
	hidden int
	dtype  schemas.DType
	next   int64 // the file's row that vals starts with
	pages  parquet.Pages
	end    int64 // the file's row after the open row group
	vals   []float32
	page   parquet.Page
}

// rows reads n rows from the file's row first on.
func (c *vecCursor) rows(first int64, n int) ([]byte, error) {
	raw := make([]byte, 0, n*c.hidden*c.dtype.Size())
	for n > 0 {
		have := int64(len(c.vals) / c.hidden)
		switch {
		case first >= c.next && first < c.next+have:
			skip := first - c.next
			take := min(int64(n), have-skip)
			vals := c.vals[skip*int64(c.hidden) : (skip+take)*int64(c.hidden)]
			if c.dtype == schemas.BF16 && slices.ContainsFunc(vals, func(v float32) bool { return math.Float32bits(v)&0xffff != 0 }) {
				return nil, fmt.Errorf("%w: a value that is no bf16", ErrDamaged)
			}
			raw = c.dtype.AppendBytes(raw, vals)
			first += take
			n -= int(take)
		default:
			if err := c.advance(first); err != nil {
				return nil, err
			}
		}
	}
	return raw, nil
}

// advance loads the page that holds row first.
func (c *vecCursor) advance(first int64) error {
	c.drop()
	if c.pages == nil || first >= c.end {
		if err := c.close(); err != nil {
			return err
		}
		if err := c.openGroup(first); err != nil {
			return err
		}
	}
	page, err := c.pages.ReadPage()
	if err != nil {
		return fmt.Errorf("%w: a page is missing or broken: %w", ErrDamaged, err)
	}
	c.page = page
	if page.NumRows()*int64(c.hidden) != page.NumValues() || page.NumRows() == 0 {
		return fmt.Errorf("%w: %d values in %d rows, want %d a row", ErrDamaged, page.NumValues(), page.NumRows(), c.hidden)
	}
	data := page.Data()
	c.vals = data.Float()
	if int64(len(c.vals)) != page.NumValues() {
		return fmt.Errorf("%w: %d values of %d", ErrDamaged, len(c.vals), page.NumValues())
	}
	return nil
}

// openGroup opens the row group that holds row first, at that row.
func (c *vecCursor) openGroup(first int64) error {
	var start int64
	for _, rg := range c.file.RowGroups() {
		if first < start+rg.NumRows() {
			leaf, ok := rg.Schema().Lookup(vecPath...)
			if !ok {
				return fmt.Errorf("%w: no column vec", ErrDamaged)
			}
			c.pages = rg.ColumnChunks()[leaf.ColumnIndex].Pages()
			c.next, c.end = first, start+rg.NumRows()
			return c.pages.SeekToRow(first - start)
		}
		start += rg.NumRows()
	}
	return fmt.Errorf("%w: no row %d", ErrDamaged, first)
}

// drop gives the current page back.
func (c *vecCursor) drop() {
	if c.page != nil {
		c.next += c.page.NumRows()
		parquet.Release(c.page)
	}
	c.page, c.vals = nil, nil
}

func (c *vecCursor) close() error {
	c.drop()
	if c.pages == nil {
		return nil
	}
	pages := c.pages
	c.pages = nil
	return pages.Close()
}
