// Package tap receives hidden states from a running engine, and yields them
// as the pipeline takes them. The protocol is in docs/tap.md; the engine's
// half is in the folder python.
//
// Requests interleave in the engine's ring, and sequences do not in a stream.
// So a request's rows are copied out of the ring as they come, and are held
// until the request has finished; [Config.Memory] bounds what is held.
package tap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/extract/probe"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/extract/tokenizer"
	"github.com/draftscope/draftscope/schemas"
)

// Config says what to capture. Run and States are needed.
type Config struct {
	Run    string // the run's name in the records
	States []int  // ascending, each in 0..n
	// DType is how states are recorded; "" means as the engine gives them.
	DType  schemas.DType
	Policy Policy

	// Target, where given, is the engine's model: claims are tested with it,
	// and it says its likeliest next tokens. The source uses it in Next only.
	Target *target.Model
	// Tokenizer, where given, reads roles and text.
	Tokenizer *tokenizer.Tokenizer
	// ProbeEvery says which sequences the target runs again: the first of
	// every engine, and one in so many behind it. 0 means 1000.
	ProbeEvery int

	// Memory bounds the bytes of states that are held; 0 means 1 GiB.
	Memory int64
	// PrefixMemory bounds the bytes of the latest sequences' states that are
	// kept to complete those whose first rows an engine's prefix cache has; 0
	// means that these are faults.
	PrefixMemory int64
	// Stored, where given, has rows for those of which none are kept.
	Stored Stored
	// Once ends the source when the engines that were there have gone.
	Once bool

	Now       func() time.Time // nil means time.Now
	Allocator memory.Allocator // nil means Go's
	Log       *slog.Logger     // nil is quiet
}

const (
	defaultMemory     = 1 << 30
	defaultProbeEvery = 1000
)

// Source is the daemon's half of a tap. Its Next is called from one
// goroutine; its other methods may be called from any.
type Source struct {
	cfg    Config
	hello  Hello
	format probe.Format
	width  int64 // bytes of a state in a record
	prober probe.Prober

	ctx    context.Context
	cancel context.CancelCauseFunc
	taking context.Context // of ctx, until Drain
	drain  context.CancelFunc
	wait   sync.WaitGroup

	cur *finished // whose records Next is giving out

	mu      sync.Mutex
	changed *sync.Cond
	open    map[*sequence]struct{}
	done    []*sequence
	used    int64 // bytes of blocks, of open, done and current sequences
	giving  bool  // Next holds a sequence whose memory comes back
	age     uint64
	engines int
	gone    bool // an engine has been here and left
	err     error
	counts  Counts
	rings   map[*ring]struct{} // that are mapped
	bytes   int64              // that came through them
	lag     time.Duration      // of the last step
	worst   time.Duration      // of any
	norms   []Norm

	prefixes prefixes
	authors  authors
	absent   *block // stands for rows that Stored may have
}

// NewSource welcomes first, and every engine of the same model that comes to
// l after it. The source owns both until Close; l is not closed.
func NewSource(l *Listener, first *Engine, cfg Config) (*Source, error) {
	s, err := newSource(first.Hello, cfg)
	if err != nil {
		first.Refuse(err)
		return nil, err
	}
	s.engines = 1
	s.wait.Go(func() { s.serve(first) })
	s.wait.Go(func() { s.accept(l) })
	return s, nil
}

func newSource(hello Hello, cfg Config) (*Source, error) {
	f, err := formatOf(hello.DType)
	if err != nil {
		return nil, err
	}
	if cfg.DType == "" {
		cfg.DType = f.Kept
	}
	if cfg.Memory == 0 {
		cfg.Memory = defaultMemory
	}
	if cfg.ProbeEvery == 0 {
		cfg.ProbeEvery = defaultProbeEvery
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Allocator == nil {
		cfg.Allocator = memory.NewGoAllocator()
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Source{
		cfg: cfg, hello: hello, format: f, width: int64(hello.Model.Hidden * cfg.DType.Size()),
		open: map[*sequence]struct{}{}, rings: map[*ring]struct{}{},
	}
	s.changed = sync.NewCond(&s.mu)
	if err := errors.Join(s.validate(), s.checkModel(hello)); err != nil {
		return nil, err
	}
	s.prefixes = prefixes{bound: cfg.PrefixMemory, unit: s.blockBytes(), refs: map[*block]int{}}
	if cfg.Stored != nil {
		s.absent = s.absentBlock()
	}
	s.prober = probe.Prober{Model: cfg.Target, States: cfg.States, DType: f.Name}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.taking, s.drain = context.WithCancel(s.ctx)
	return s, nil
}

func (s *Source) validate() error {
	c, n := s.cfg, s.hello.Model.Layers
	var errs []error
	fail := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s", ErrConfig, fmt.Sprintf(format, args...)))
	}
	if c.Run == "" {
		fail("the run has no name")
	}
	if len(c.States) == 0 {
		fail("no states")
	}
	for i, state := range c.States {
		if state < 0 || state > n {
			fail("state %d; the engine's model has states 0..%d", state, n)
		} else if i > 0 && state <= c.States[i-1] {
			fail("states %v are not ascending", c.States)
		}
	}
	if c.DType.Size() == 0 {
		fail("dtype %q; use %s or %s", c.DType, schemas.F32, schemas.BF16)
	}
	if c.Memory < 0 || c.PrefixMemory < 0 || c.ProbeEvery < 0 {
		fail("memory %d, prefix memory %d, probe every %d: none may be negative", c.Memory, c.PrefixMemory, c.ProbeEvery)
	} else if least := s.blockBytes(); c.Memory < least {
		fail("memory of %d bytes; %d rows of %d states take %d", c.Memory, blockRows, len(c.States), least)
	}
	return errors.Join(append(errs, c.Policy.Validate())...)
}

func (s *Source) blockBytes() int64 { return blockRows * s.width * int64(len(s.cfg.States)) }

// checkModel refuses an engine whose model is not the source's.
func (s *Source) checkModel(h Hello) error {
	if h.Model.Layers != s.hello.Model.Layers || h.Model.Hidden != s.hello.Model.Hidden || h.Model.Vocab != s.hello.Model.Vocab ||
		h.DType != s.hello.DType || h.FinalNorm.SHA256 != s.hello.FinalNorm.SHA256 {
		return fmt.Errorf("%w: the engine runs another model or in another dtype (%s) than the one before it (%s)", ErrClaim, modelOf(h), modelOf(s.hello))
	}
	if s.cfg.Target == nil {
		if p := s.hello.Model.Fingerprint; p != "" && p != h.Model.Fingerprint {
			return fmt.Errorf("%w: the engine's model has the fingerprint %.12q, and the run is of %.12s", ErrClaim, h.Model.Fingerprint, p)
		}
		return nil
	}
	return sameModel(h, s.cfg.Target)
}

func modelOf(h Hello) string {
	return fmt.Sprintf("%s: %d layers, hidden %d, vocabulary %d, %s, final norm %.8s", h.Model.Label, h.Model.Layers, h.Model.Hidden, h.Model.Vocab, h.DType, h.FinalNorm.SHA256)
}

// Spec describes the capture records.
func (s *Source) Spec() schemas.CaptureSpec {
	return schemas.CaptureSpec{
		Run: s.cfg.Run, Hidden: s.hello.Model.Hidden, Layers: s.hello.Model.Layers, States: s.cfg.States, DType: s.cfg.DType,
	}
}

// Next returns the next record, the sequence it belongs to, and whether it is
// that sequence's last. The caller releases the record. With [Config.Once], or
// after [Source.Drain], it returns [io.EOF] when the last engine has gone; else it
// waits for the next. An error that wraps [ErrClaim] says that the engine's states are not
// what it calls them. After any other error than that of ctx the source can
// only be closed.
func (s *Source) Next(ctx context.Context) (seq string, rec arrow.Record, last bool, err error) {
	for s.cur == nil {
		q, err := s.take(ctx)
		if err != nil {
			return "", nil, false, err
		}
		if s.cur, err = s.complete(q); err != nil {
			s.fail(err)
			return "", nil, false, err
		}
	}
	f := s.cur
	rec, freed, last, err := f.record(s)
	if err != nil {
		return "", nil, false, fmt.Errorf("recording sequence %s: %w", f.id, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if freed {
		s.used -= s.blockBytes()
	}
	if last {
		s.cur, s.giving = nil, false
		s.tally(f)
	}
	s.changed.Broadcast()
	return f.id, rec, last, nil
}

// take waits for a sequence that is done.
func (s *Source) take(ctx context.Context) (*sequence, error) {
	defer context.AfterFunc(ctx, func() { s.mu.Lock(); defer s.mu.Unlock(); s.changed.Broadcast() })()
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		i := s.ready()
		switch {
		case s.err != nil:
			return nil, s.err
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case i >= 0:
			q := s.done[i]
			s.done = slices.Delete(s.done, i, i+1)
			s.giving = true
			return q, nil
		case (s.cfg.Once && s.gone || s.taking.Err() != nil) && s.engines == 0 && len(s.done) == 0:
			return nil, io.EOF
		}
		s.changed.Wait()
	}
}

// tally counts a sequence that was given out. The mutex is held.
func (s *Source) tally(f *finished) {
	var c Counts
	switch {
	case f.stone:
		c.Tombstones = 1
	case f.check != "":
		c.Faults = 1
	default:
		c.Stored, c.StoredRows = 1, int64(len(f.tokens))
		if s.cfg.Stored != nil && !s.knowsWeights() {
			s.authors.add(f.id, f.link.weights())
		}
		if f.lent > 0 {
			c.Completed, c.CompletedRows = 1, int64(f.lent)
		}
	}
	s.count(f.link, c)
	f.link.pending--
}

// fail ends the source: every engine is told why.
func (s *Source) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
	s.cancel(err)
	s.changed.Broadcast()
}

// Status is what a source is doing.
type Status struct {
	Counts
	Engines, Open, Waiting int
	Memory, Bound          int64 // bytes of states held, and what they may be
	Prefixes, PrefixBytes  int64 // finished sequences whose rows are kept to complete others, and their bytes
	Slots, Filled          int64 // rows that the mapped rings hold, and rows in them that were not read yet
	Bytes                  int64 // of rows that came through the rings
	// Lag is the time from the engine's sending of the last step until its
	// rows were read; Worst is the longest there was.
	Lag, Worst time.Duration
	Norms      []Norm
}

// Norm is how long the vectors of a state are: the band of the L2 norms of
// one row of each stored sequence, its last.
type Norm struct {
	State             int
	Least, Mean, Most float64
	rows              int
}

// measure adds a sequence's last row to the bands.
func (s *Source) measure(q *sequence) {
	last := len(q.ids) - 1
	norms := make([]float64, len(s.cfg.States))
	for i := range norms {
		for _, v := range q.rowsOf(i, last, last+1, s.cfg.DType) {
			norms[i] += float64(v) * float64(v)
		}
		norms[i] = math.Sqrt(norms[i])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.norms == nil {
		s.norms = make([]Norm, len(norms))
	}
	for i, x := range norms {
		n := &s.norms[i]
		if n.rows == 0 {
			n.State, n.Least = s.cfg.States[i], x
		}
		n.rows++
		n.Least, n.Most = min(n.Least, x), max(n.Most, x)
		n.Mean += (x - n.Mean) / float64(n.rows)
	}
}

// Status says what the source is doing.
func (s *Source) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Status{
		Counts: s.counts, Engines: s.engines, Open: len(s.open), Waiting: len(s.done), Memory: s.used, Bound: s.cfg.Memory,
		Prefixes: int64(len(s.prefixes.list)), PrefixBytes: s.prefixes.used,
		Bytes: s.bytes, Lag: s.lag, Worst: s.worst, Norms: slices.Clone(s.norms),
	}
	for r := range s.rings {
		st.Slots += r.ad.Slots
		st.Filled += r.waiting()
	}
	return st
}

// Drain ends the connections and takes no more. What engines have finished is
// given out, what they have not becomes tombstones; then Next returns [io.EOF].
// The engines may connect to the next daemon.
func (s *Source) Drain() {
	s.drain()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed.Broadcast()
}

// Close ends the connections and gives everything back. The target stays
// open.
func (s *Source) Close() error {
	s.cancel(errClosed)
	s.wait.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done, s.cur, s.used = nil, nil, 0
	return nil
}

var errClosed = errors.New("the daemon is closing")
