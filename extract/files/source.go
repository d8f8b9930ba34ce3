package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/extract/probe"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/extract/tokenizer"
	"github.com/draftscope/draftscope/schemas"
)

// Config says what to make of the files. Run is needed, and States or Target.
type Config struct {
	Run string
	// States says what the slots are, in their order; nil takes what the
	// format says, or else what the target finds.
	States []int
	// Layers is the depth of the model that the states are of, where there is
	// no target.
	Layers int
	// Target is that model. It tests what the slots are said to be.
	Target *target.Model
	// Tokenizer, where given, reads roles and text.
	Tokenizer *tokenizer.Tokenizer
	// ProbeEvery: the first sample is tested, and one in so many behind it; 0
	// means 100.
	ProbeEvery int
	// AllowMissingLast takes samples whose last token has no row, without it.
	AllowMissingLast bool
	Redact           bool
	// LastTurn keeps of a sample's supervision the last reply.
	LastTurn bool

	Skip      func(id string) bool // which are stored already; may be nil
	Now       func() time.Time     // nil means time.Now
	Allocator memory.Allocator     // nil means Go's
	Log       *slog.Logger         // nil is quiet
}

// Source yields the samples of a reader as the pipeline takes them. A sample
// that fails a check becomes a row of the table faults.
type Source struct {
	// Done counts what became of the samples so far. It is read between calls
	// of Next.
	Done   Done
	cfg    Config
	spec   schemas.CaptureSpec
	slots  []int // of the recorded states, in their order
	total  int   // slots of a sample
	format probe.Format
	prober probe.Prober
	first  []int32
	left   []lazy
	seen   int
	cur    *work
}

// Done counts samples of a [Source].
type Done struct {
	Sound     int      // that were given out
	Shortened int      // of those, by a last token without a row
	Idle      []string // of those, ids of which no label is supervised
	Error     float32  // the largest of [Sample.Error]
}

// recordRows is the rows of a capture record.
const recordRows = 64

// NewSource settles what the slots are by the first sample. Errors wrap
// [ErrConfig], [ErrFormat], or [probe.ErrClaim].
func NewSource(r *Reader, cfg Config) (*Source, error) {
	if cfg.ProbeEvery == 0 {
		cfg.ProbeEvery = 100
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
	if cfg.Target != nil {
		cfg.Layers = cfg.Target.Config().Layers
	}
	s := &Source{cfg: cfg}
	for _, l := range r.samples {
		if cfg.Skip == nil || !cfg.Skip(l.id) {
			s.left = append(s.left, l)
		}
	}
	if len(r.samples) == 0 {
		return nil, fmt.Errorf("%w: no sample", ErrFormat)
	}
	first, err := r.first()
	if err != nil {
		return nil, err
	}
	s.first = slices.Clone(first.IDs)
	return s, errors.Join(s.settle(first, r.States), first.Close())
}

// first reads the first sample that can be read, and says what is wrong with
// the first of all when there is none.
func (r *Reader) first() (*Sample, error) {
	var wrong error
	for _, l := range r.samples {
		s, err := l.open()
		if err == nil {
			if err = s.unpad(); err == nil {
				return s, nil
			}
			err = errors.Join(fmt.Errorf("reading %s: %w", s.File, err), s.Close())
		}
		if wrong == nil {
			wrong = err
		}
	}
	return nil, wrong
}

// First are the tokens of the first sample that can be read.
func (s *Source) First() []int32 { return s.first }

// settle finds out what the slots are, and what is recorded of them.
func (s *Source) settle(first *Sample, says []int) error {
	claimed := s.cfg.States
	if claimed == nil {
		claimed = says
	}
	if m := s.cfg.Target; m != nil {
		if err := first.split(m.Config().Hidden); err != nil {
			return err
		}
	} else if claimed != nil {
		if err := first.split(first.Hidden * first.Slots / max(1, len(claimed))); err != nil {
			return err
		}
	}
	s.total, s.format = first.Slots, first.Format
	if claimed == nil {
		if s.cfg.Target == nil {
			return fmt.Errorf("%w: nothing says which states the %d slots are; state it, or give the target, which finds out", ErrConfig, first.Slots)
		}
		found, err := probe.Prober{Model: s.cfg.Target, DType: first.Format.Name}.Find(first.IDs, first.Slots, first.rows)
		if err != nil {
			return fmt.Errorf("finding the states of %s: %w", first.File, err)
		}
		for i, f := range found {
			if f.Normed {
				return fmt.Errorf("%w: slot %d of %s is the last state after the final norm, which is none of the states that are stored; name the states with -1 for this slot to leave it out", probe.ErrClaim, i, first.File)
			}
			claimed = append(claimed, f.State)
		}
	}
	if len(claimed) != first.Slots {
		return fmt.Errorf("%w: %d states are named, and %s has %d slots", ErrConfig, len(claimed), first.File, first.Slots)
	}
	order := make([]int, 0, len(claimed))
	for i, c := range claimed {
		switch {
		case c == -1:
			continue
		case c < -1 || c > s.cfg.Layers:
			return fmt.Errorf("%w: state %d of a model with states 0..%d", ErrConfig, c, s.cfg.Layers)
		case slices.ContainsFunc(order, func(j int) bool { return claimed[j] == c }):
			return fmt.Errorf("%w: state %d is named twice", ErrConfig, c)
		}
		order = append(order, i)
	}
	if len(order) == 0 {
		return fmt.Errorf("%w: no state is left", ErrConfig)
	}
	slices.SortFunc(order, func(a, b int) int { return claimed[a] - claimed[b] })
	s.slots = order
	s.spec = schemas.CaptureSpec{Run: s.cfg.Run, Hidden: first.Hidden, Layers: s.cfg.Layers, DType: first.Format.Kept}
	for _, i := range order {
		s.spec.States = append(s.spec.States, claimed[i])
	}
	s.prober = probe.Prober{Model: s.cfg.Target, States: s.spec.States, DType: first.Format.Name}
	return nil
}

// split cuts rows of unknown division into states of so many values.
func (s *Sample) split(hidden int) error {
	width := s.Slots * s.Hidden
	if hidden < 1 || width%hidden != 0 {
		return fmt.Errorf("reading %s: %w: rows of %d values do not divide into states of %d", s.File, ErrFormat, width, hidden)
	}
	s.Slots, s.Hidden = width/hidden, hidden
	return nil
}

// rows is the sample for a prober.
func (s *Sample) rows(slot, r int) []float32 { return s.Format.Floats(nil, s.row(slot, r)) }

// Spec describes the capture records.
func (s *Source) Spec() schemas.CaptureSpec { return s.spec }

// Remaining is the number of samples that Next has not given out.
func (s *Source) Remaining() int {
	n := len(s.left)
	if s.cur != nil {
		n++
	}
	return n
}

// work is a sample on its way out.
type work struct {
	id     string
	sample *Sample
	fault  *schemas.Fault
	tokens []schemas.Token
	row    schemas.Sequence
	given  int
}

// Next returns the next record, the sequence it belongs to, and whether it is
// that sequence's last. The caller releases the record. After the last sample
// it returns [io.EOF]. One goroutine may call it.
func (s *Source) Next(ctx context.Context) (seq string, rec arrow.Record, last bool, err error) {
	if err := ctx.Err(); err != nil {
		return "", nil, false, err
	}
	if s.cur == nil {
		if len(s.left) == 0 {
			return "", nil, false, io.EOF
		}
		if s.cur, err = s.take(s.left[0]); err != nil {
			return "", nil, false, err
		}
		s.left = s.left[1:]
	}
	w := s.cur
	rec, last, err = s.record(w)
	if err == nil && last {
		s.cur = nil
		if w.sample != nil {
			err = w.sample.Close()
		}
	}
	if err != nil {
		if rec != nil {
			rec.Release()
		}
		return "", nil, false, fmt.Errorf("recording sample %s: %w", w.id, err)
	}
	return w.id, rec, last, nil
}

// Close gives back what is open. The reader stays open.
func (s *Source) Close() error {
	s.left = nil
	if s.cur == nil || s.cur.sample == nil {
		return nil
	}
	w := s.cur
	s.cur = nil
	return w.sample.Close()
}

// take reads a sample and checks it. Only a claim that the target refutes is
// an error; what else is wrong is the sample's fault.
func (s *Source) take(l lazy) (*work, error) {
	w := &work{id: l.id}
	sample, err := l.open()
	if err != nil {
		s.fault(w, "K21", err.Error())
		return w, nil
	}
	w.sample = sample
	if check, detail := s.check(sample); check != "" {
		s.fault(w, check, fmt.Sprintf("%s: %s", l.file, detail))
		w.sample = nil
		return w, sample.Close()
	}
	probed := s.cfg.Target != nil && s.seen%s.cfg.ProbeEvery == 0
	s.seen++
	if probed {
		err := s.prober.Test(sample.IDs, 0, func(i, r int) []float32 { return sample.rows(s.slots[i], r) })
		if err != nil {
			return nil, errors.Join(fmt.Errorf("testing the states of %s: %w", l.file, err), sample.Close())
		}
	}
	if err := s.tables(w); err != nil {
		return nil, errors.Join(fmt.Errorf("scoring %s: %w", l.file, err), sample.Close())
	}
	return w, nil
}

func (s *Source) fault(w *work, check, detail string) {
	w.fault = &schemas.Fault{SeqID: w.id, Chunk: -1, Check: check, Detail: detail, At: s.cfg.Now().UTC()}
}

// check tests a sample before anything of it is used, and cuts the token that
// has no row where that is allowed.
func (s *Source) check(m *Sample) (check, detail string) {
	if err := m.split(s.spec.Hidden); err != nil {
		return "K3", err.Error()
	}
	if err := m.unpad(); err != nil {
		return "K3", err.Error()
	}
	n := len(m.IDs)
	switch {
	case m.Slots != s.total || m.Format.Name != s.format.Name:
		return "K6", fmt.Sprintf("%d slots of %s, the first sample has %d of %s", m.Slots, m.Format.Name, s.total, s.format.Name)
	case n == 0:
		return "K3", "it has no token"
	case m.Mask != nil && len(m.Mask) != n:
		return "K3", fmt.Sprintf("%d tokens and a loss mask of %d", n, len(m.Mask))
	case m.Rows == n-1 && s.cfg.AllowMissingLast:
		s.Done.Shortened++
		m.IDs = m.IDs[:n-1]
		if m.Mask != nil {
			m.Mask = m.Mask[:n-1]
		}
	case m.Rows == n-1:
		return "K3", fmt.Sprintf("%d rows for %d tokens: last row missing", m.Rows, n)
	case m.Rows < n:
		return "K3", fmt.Sprintf("%d rows for %d tokens: first %d rows missing (prefix cache?)", m.Rows, n, n-m.Rows)
	case m.Rows > n:
		return "K3", fmt.Sprintf("%d rows for %d tokens", m.Rows, n)
	}
	if m.Rows == 0 {
		return "K3", "it has no row"
	}
	for i, id := range m.IDs {
		if id < 0 || s.cfg.Target != nil && int(id) >= s.cfg.Target.Config().Vocab {
			return "K11", fmt.Sprintf("token %d at %d is outside the vocabulary", id, i)
		}
	}
	for r := range m.Rows {
		for i, slot := range s.slots {
			if bad := m.Format.CheckFinite(m.row(slot, r), r, s.spec.States[i:i+1]); bad != "" {
				return "K1", bad
			}
		}
	}
	return "", ""
}

// tables makes the sample's rows of the tables.
func (s *Source) tables(w *work) error {
	m := w.sample
	turn, role := make([]int32, len(m.IDs)), slices.Repeat([]string{"unknown"}, len(m.IDs))
	if s.cfg.Tokenizer != nil {
		turn, role = s.cfg.Tokenizer.Turns(m.IDs)
	}
	prompt := 0
	if m.Mask != nil && s.cfg.LastTurn {
		target.LastTurn(m.Mask)
	}
	if m.Mask != nil {
		if prompt = slices.Index(m.Mask, true); prompt < 0 {
			prompt = len(m.IDs)
		}
	}
	w.tokens = make([]schemas.Token, len(m.IDs))
	for i, id := range m.IDs {
		w.tokens[i] = schemas.Token{SeqID: w.id, Pos: int32(i), TokenID: id, LossMask: m.Mask == nil || m.Mask[i], Turn: turn[i], Role: role[i]}
	}
	if err := s.score(w); err != nil || w.fault != nil {
		return err
	}
	s.Done.Sound++
	s.Done.Error = max(s.Done.Error, m.Error)
	if m.Mask != nil && !slices.Contains(m.Mask[1:], true) { // token 0 is no label
		s.Done.Idle = append(s.Done.Idle, w.id)
	}
	w.row = schemas.Sequence{
		SeqID: w.id, PromptLen: int32(prompt), Length: int32(len(m.IDs)), FinishReason: schemas.FinishGiven,
		Tags: map[string]string{"file": m.File}, CreatedAt: s.cfg.Now().UTC(),
	}
	if s.cfg.Tokenizer != nil && !s.cfg.Redact {
		text := s.cfg.Tokenizer.Decode(m.IDs)
		w.row.Text = &text
	}
	return nil
}

// score asks the target what it would have said, where the last state is
// there, before its norm or after.
func (s *Source) score(w *work) error {
	m, h := w.sample, s.spec.Hidden
	i := slices.Index(s.spec.States, s.spec.Layers)
	if s.cfg.Target == nil || i < 0 && m.Normed == nil {
		return nil
	}
	final := func(lo, hi int) []float32 {
		return m.Format.Floats(nil, m.Normed[lo*h*m.Format.Size:hi*h*m.Format.Size])
	}
	if i >= 0 {
		final = func(lo, hi int) (out []float32) {
			for r := lo; r < hi; r++ {
				out = append(out, m.rows(s.slots[i], r)...)
			}
			return out
		}
	}
	bad, err := s.cfg.Target.Score(w.tokens, final, i < 0)
	if bad != "" {
		s.fault(w, "K1", bad)
	}
	return err
}

func (s *Source) record(w *work) (rec arrow.Record, last bool, err error) {
	mem, run := s.cfg.Allocator, s.cfg.Run
	switch {
	case w.fault != nil:
		return schemas.Record(mem, schemas.Envelope{Table: schemas.TableFaults, Run: run}, []schemas.Fault{*w.fault}), true, nil
	case w.given == len(w.tokens):
		return schemas.Record(mem, schemas.Envelope{Table: schemas.TableSequences, Run: run}, []schemas.Sequence{w.row}), true, nil
	}
	lo, hi := w.given, min(w.given+recordRows, len(w.tokens))
	c := schemas.Capture{Spec: s.spec, Tokens: w.tokens[lo:hi], States: make([][]byte, len(s.slots))}
	for i, slot := range s.slots {
		for r := lo; r < hi; r++ {
			c.States[i] = w.sample.Format.Append(c.States[i], w.sample.row(slot, r), s.spec.DType)
		}
	}
	w.given = hi
	rec, err = schemas.CaptureRecord(mem, c)
	return rec, false, err
}
