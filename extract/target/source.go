package target

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/extract/tokenizer"
	"github.com/draftscope/draftscope/schemas"
)

// SourceConfig says what to capture. Model, Inputs and Run are needed.
type SourceConfig struct {
	Model *Model
	// Tokenizer renders conversations and reads roles and text. It may be nil
	// when every input gives its ids.
	Tokenizer *tokenizer.Tokenizer
	Inputs    []Input
	// Run is the run's name in the records.
	Run string
	// States are the recorded states, ascending, each in 0..n; none is
	// allowed. [Source.Choose] may change them.
	States []int
	// DType is how states are recorded; "" means F32.
	DType schemas.DType

	Batch     int // sequences run at once; 0 means 8
	BatchRows int // rows of a capture record; 0 means 64
	// MaxNewTokens bounds a generated reply, its stop token included; 0 means
	// 144.
	MaxNewTokens int
	Temperature  float32 // 0 chooses the likeliest token
	TopP         float32 // of the sampled mass; 0 means all
	Seed         uint64
	// Redact leaves the text out of the table sequences.
	Redact bool
	// LastTurn keeps of the supervision of what is given the last reply.
	LastTurn bool
	// Now gives created_at; nil means time.Now.
	Now       func() time.Time
	Allocator memory.Allocator // nil means Go's
}

const (
	defaultBatch     = 8
	defaultBatchRows = 64
	defaultNewTokens = 144
	// stepRows bounds the rows of one step, and so the scratch memory of long
	// prompts, but for prefillRows of each sequence.
	stepRows    = 8192
	prefillRows = 256
)

// Validate reports what is missing or out of range, apart from the inputs,
// which NewSource checks.
func (c SourceConfig) Validate() error {
	var errs []error
	fail := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s", ErrInput, fmt.Sprintf(format, args...)))
	}
	if c.Model == nil {
		fail("no target model")
		return errors.Join(errs...)
	}
	if c.Run == "" {
		fail("the run has no name")
	}
	if c.DType != "" && c.DType.Size() == 0 {
		fail("dtype %q; use %s or %s", c.DType, schemas.F32, schemas.BF16)
	}
	errs = append(errs, c.checkStates())
	if c.Batch < 0 || c.BatchRows < 0 || c.MaxNewTokens < 0 {
		fail("batch %d, batch rows %d, new tokens %d: none may be negative", c.Batch, c.BatchRows, c.MaxNewTokens)
	}
	if !(c.Temperature >= 0) || !(c.TopP >= 0 && c.TopP <= 1) {
		fail("temperature %v must not be negative and top-p %v must lie in 0..1", c.Temperature, c.TopP)
	}
	if c.Tokenizer != nil && c.Tokenizer.Size() > c.Model.cfg.Vocab {
		fail("the tokenizer has %d tokens and the target's vocabulary %d; use the tokenizer.json that came with the target", c.Tokenizer.Size(), c.Model.cfg.Vocab)
	}
	return errors.Join(errs...)
}

func (c SourceConfig) checkStates() error {
	var errs []error
	for i, s := range c.States {
		if s < 0 || s > c.Model.cfg.Layers {
			errs = append(errs, fmt.Errorf("%w: state %d; the target has states 0..%d", ErrInput, s, c.Model.cfg.Layers))
		} else if i > 0 && s <= c.States[i-1] {
			errs = append(errs, fmt.Errorf("%w: states %v are not ascending", ErrInput, c.States))
		}
	}
	return errors.Join(errs...)
}

// Source runs its inputs through the target and yields what was computed, as
// the pipeline takes it. Sequences come in the order in which they are done,
// so that no long one holds back the memory of those behind it.
//
// Of a sequence come capture records of consecutive rows and at last its row
// of the table sequences; or, when a state is not finite, one record of the
// table faults and nothing else.
type Source struct {
	cfg     SourceConfig
	taps    []tap // the recorded states, then n where it is not among them
	final   int   // the tap that is read to score: n in the device's dtype
	waiting []*job
	active  []*job
	under   *pass // whose states may still be on their way
	done    []*finished
}

// tap is one state that leaves the device.
type tap struct {
	state int
	as    cuda.DType
	width int // bytes of a row
}

// pass is one run of the model, over pieces of some jobs.
type pass struct {
	jobs    []*job
	pieces  []piece // whose rows are those of the pass
	flights []cuda.Flight
}

// NewSource checks the inputs against the model and tokenizes them, once. What
// is recorded of which of them may be chosen afterwards. Errors wrap
// [ErrInput] and name the input.
func NewSource(cfg SourceConfig) (*Source, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	for _, d := range []struct {
		value *int
		or    int
	}{{&cfg.Batch, defaultBatch}, {&cfg.BatchRows, defaultBatchRows}, {&cfg.MaxNewTokens, defaultNewTokens}} {
		if *d.value == 0 {
			*d.value = d.or
		}
	}
	if cfg.DType == "" {
		cfg.DType = schemas.F32
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Allocator == nil {
		cfg.Allocator = memory.NewGoAllocator()
	}
	s := &Source{cfg: cfg}
	s.compute()
	seen := map[string]bool{}
	for i, in := range cfg.Inputs {
		if seen[in.ID] {
			return nil, fmt.Errorf("%w: the id %q is given twice", ErrInput, in.ID)
		}
		seen[in.ID] = true
		if in.where == "" {
			in.where = fmt.Sprintf("input %d (%s)", i, in.ID)
		}
		j, err := s.prepare(in)
		if err != nil {
			return nil, err
		}
		s.waiting = append(s.waiting, j)
	}
	return s, nil
}

// Choose says which states are recorded, as in [SourceConfig.States], and which
// inputs are left out, because they are stored already; skip may be nil. It is
// called before the first Next, if at all.
func (s *Source) Choose(states []int, skip func(id string) bool) error {
	cfg := s.cfg
	cfg.States = states
	if err := cfg.checkStates(); err != nil {
		return err
	}
	s.cfg = cfg
	s.compute()
	if skip != nil {
		s.waiting = slices.DeleteFunc(s.waiting, func(j *job) bool { return skip(j.ID) })
	}
	return nil
}

// compute sets what is computed: what is recorded, and n as the device has it,
// so that scoring reads what the model would have.
func (s *Source) compute() {
	m := s.cfg.Model
	s.taps, s.final = nil, -1
	add := func(state int, as cuda.DType) {
		if state == m.cfg.Layers && as == m.dev.DType() {
			s.final = len(s.taps)
		}
		s.taps = append(s.taps, tap{state, as, m.cfg.Hidden * as.Size()})
	}
	for _, state := range s.cfg.States {
		add(state, asCuda(s.cfg.DType))
	}
	if s.final < 0 {
		add(m.cfg.Layers, m.dev.DType())
	}
}

// Idle are the ids of inputs without a supervised label, of those that are
// left to run.
func (s *Source) Idle() (ids []string) {
	for _, j := range s.waiting {
		if j.finish == finishGiven && !slices.Contains(j.mask[1:], true) { // token 0 is no label
			ids = append(ids, j.ID)
		}
	}
	return ids
}

// LastTurn takes all but the last run of ones off a loss mask.
func LastTurn(mask []bool) {
	t := len(mask) - 1
	for t >= 0 && !mask[t] {
		t--
	}
	for t >= 0 && mask[t] {
		t--
	}
	clear(mask[:t+1])
}

// Beginning is what is known of a sequence before it is run.
type Beginning struct {
	ID    string
	IDs   []int32 // its first tokens: the prompt, or all of it
	Whole bool    // it was given whole: nothing is generated
}

// Beginnings are those of the inputs that are left to run. The caller must not
// change their tokens.
func (s *Source) Beginnings() []Beginning {
	list := make([]Beginning, len(s.waiting))
	for i, j := range s.waiting {
		list[i] = Beginning{j.ID, j.ids, j.finish == finishGiven}
	}
	return list
}

// Spec describes the capture records.
func (s *Source) Spec() schemas.CaptureSpec {
	return schemas.CaptureSpec{
		Run: s.cfg.Run, Hidden: s.cfg.Model.cfg.Hidden, Layers: s.cfg.Model.cfg.Layers,
		States: s.cfg.States, DType: s.cfg.DType,
	}
}

// Remaining is the number of sequences that Next has not finished yet.
func (s *Source) Remaining() int { return len(s.waiting) + len(s.active) + len(s.done) }

// Next returns the next record, the sequence it belongs to, and whether it is
// that sequence's last. The caller releases the record. After the last
// sequence it returns [io.EOF]. One goroutine may call it. After any other
// error the source can only be closed.
func (s *Source) Next(ctx context.Context) (seq string, rec arrow.Record, last bool, err error) {
	for len(s.done) == 0 {
		if err := ctx.Err(); err != nil {
			return "", nil, false, err
		}
		if err := s.admit(); err != nil {
			return "", nil, false, err
		}
		if len(s.active) == 0 {
			return "", nil, false, io.EOF
		}
		if err := s.step(); err != nil {
			return "", nil, false, fmt.Errorf("running the target: %w", err)
		}
	}
	f := s.done[0]
	rec, last, err = f.record(s)
	if err != nil {
		return "", nil, false, fmt.Errorf("recording sequence %s: %w", f.id, err)
	}
	if last {
		release(f.states)
		s.done = s.done[1:]
	}
	return f.id, rec, last, nil
}

// Close gives back what unfinished sequences hold. The model stays open.
func (s *Source) Close() error {
	err := s.settle()
	for _, j := range s.active {
		j.end()
	}
	for _, f := range s.done {
		release(f.states)
	}
	s.waiting, s.active, s.done = nil, nil, nil
	return err
}

// admit fills the batch.
func (s *Source) admit() error {
	for len(s.active) < s.cfg.Batch && len(s.waiting) > 0 {
		j := s.waiting[0]
		s.waiting, s.active = s.waiting[1:], append(s.active, j)
		if err := j.begin(s); err != nil {
			return fmt.Errorf("beginning sequence %s: %w", j.ID, err)
		}
	}
	return nil
}

// step runs the next tokens of every active sequence: a piece of its prompt,
// or the one it generated last. While they are computed, what the step before
// computed may still be on its way to the host.
func (s *Source) step() error {
	most := max(prefillRows, stepRows/len(s.active)/prefillRows*prefillRows)
	p := &pass{}
	var seqs []*Sequence
	var pieces [][]int32
	at := 0
	for _, j := range s.active {
		fed := j.seq.Len()
		ids := j.ids[fed:min(fed+most, len(j.ids))]
		seqs, pieces = append(seqs, j.seq), append(pieces, ids)
		p.jobs, p.pieces = append(p.jobs, j), append(p.pieces, piece{at, at + len(ids), fed})
		at += len(ids)
	}
	taps := make([]Tap, len(s.taps))
	for i, t := range s.taps {
		taps[i] = Tap{State: t.state, As: t.as}
		for k, j := range p.jobs {
			taps[i].To = append(taps[i].To, j.rows(s, i, p.pieces[k].pos, p.pieces[k].pos+len(pieces[k])))
		}
	}
	final, flights, err := s.cfg.Model.Capture(seqs, pieces, taps)
	if err != nil {
		return err
	}
	p.flights = flights
	if err := s.settle(); err != nil {
		return err
	}
	s.under = p
	var ask []*job
	var rows []int32
	ends := false // some sequence may leave the batch
	for i, j := range p.jobs {
		switch {
		case j.fault != "":
			ends = true
		case j.seq.Len() < len(j.ids):
		case j.finish == "":
			ask, rows = append(ask, j), append(rows, int32(p.pieces[i].hi-1))
		default:
			ends = true
		}
	}
	if len(ask) > 0 {
		if err := s.extend(final, ask, rows); err != nil {
			return err
		}
	}
	if ends {
		if err := s.settle(); err != nil {
			return err
		}
	}
	return s.retire()
}

// settle waits for the states of the pass under way, and notes faults.
func (s *Source) settle() error {
	p := s.under
	s.under = nil
	if p == nil {
		return nil
	}
	var errs []error
	for i, f := range p.flights {
		odd, err := f.Wait()
		if err != nil {
			errs = append(errs, err)
			continue
		}
		t := s.taps[i]
		for k, j := range p.jobs {
			if at := p.pieces[k]; j.fault == "" {
				n := at.hi - at.lo
				j.fault = findFault(odd[at.lo:at.hi], j.rows(s, i, at.pos, at.pos+n), t.width, at.pos, t.state, recorded(t.as))
			}
		}
	}
	return errors.Join(errs...)
}

// extend appends a token to each of the jobs, whose last rows are rows.
func (s *Source) extend(final cuda.Tensor, jobs []*job, rows []int32) error {
	samplers := make([]*sampler, len(jobs))
	for i, j := range jobs {
		samplers[i] = j.sampler
	}
	m := s.cfg.Model
	ids, err := m.next(final, rows, samplers, s.cfg.Temperature, s.cfg.TopP)
	if err != nil {
		return fmt.Errorf("choosing tokens: %w", err)
	}
	// The device has passed all that the tokens came from: waiting costs little.
	if err := s.settle(); err != nil {
		return err
	}
	for i, j := range jobs {
		if j.fault != "" {
			continue // the token means nothing
		}
		j.ids, j.mask = append(j.ids, ids[i]), append(j.mask, true)
		switch {
		case slices.Contains(m.cfg.EOS, ids[i]):
			j.finish = finishStop
		case len(j.ids)-j.promptLen >= s.cfg.MaxNewTokens, len(j.ids) >= m.cfg.MaxPositions:
			j.finish = finishLength
		}
	}
	return nil
}

// retire moves what is done, or has failed, out of the batch. The last token
// of a reply goes through the model too, so every token has its states.
func (s *Source) retire() error {
	var still []*job
	for k, j := range s.active {
		if j.fault == "" && (j.finish == "" || j.seq.Len() < len(j.ids)) {
			still = append(still, j)
			continue
		}
		f, err := j.complete(s)
		if err != nil {
			s.active = append(still, s.active[k:]...)
			return fmt.Errorf("scoring sequence %s: %w", j.ID, err)
		}
		j.end()
		s.done = append(s.done, f)
	}
	s.active = still
	return nil
}
