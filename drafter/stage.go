package drafter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/schemas"
	"github.com/draftscope/draftscope/schemas/sound"
)

// DefaultK is how many candidates of a slot the table drafts keep.
const DefaultK = 16

// uploadRows bounds the rows of states that are uploaded at once.
const uploadRows = 1024

// Bounds of a stage's settings; more would be a mistake.
const (
	maxBudget = 1 << 14
	maxK      = 1 << 12
)

// Config is what a [Stage] needs. Drafters, Host and Device must be given;
// the rest has useful zero values.
type Config struct {
	Drafters []*Drafter
	Host     Host
	Device   cuda.Device // which holds Host and Drafters
	Anchors  Mode        // "" is [Every]
	Budgets  []int       // of DDTree; the chain is always simulated
	K        int         // candidates kept of a slot; 0 is [DefaultK]
	// Losses are the divergences to compute beside the cross-entropy. They
	// need the target's final state and stay NULL without it.
	Losses    cuda.Losses
	Allocator memory.Allocator // nil is memory.DefaultAllocator
	Log       *slog.Logger     // nil is silent
	// Profile is how large the target's states are; without it their sizes are
	// not checked.
	Profile sound.Profile
	// Progress, if given, is told after each pass how many anchors it drafted.
	Progress func(drafter string, anchors int)
	// Spent, if given, is told after each part of a drafter's work how long it
	// took, and what it could not do without. On a GPU, new context is computed
	// behind, and the wait for it falls into the next pass. With no drafter's
	// name it is told how long a record kept the stage, all of it.
	Spent func(drafter string, busy time.Duration, work ...cuda.Work)
	Now   func() time.Time // nil is time.Now; stamps faults
}

// Validate reports everything that a stage cannot work with.
func (c Config) Validate() error {
	var errs []error
	failf := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrStage}, args...)...))
	}
	if len(c.Drafters) == 0 {
		failf("no drafter")
	}
	seen := map[string]bool{}
	for _, d := range c.Drafters {
		if d.Name == "" || seen[d.Name] {
			failf("a drafter's name is %q, want unique names", d.Name)
		}
		seen[d.Name] = true
	}
	if c.Device == nil {
		failf("no device")
	}
	if err := c.Host.Validate(); err != nil {
		errs = append(errs, err)
	}
	if c.Anchors != "" && c.Anchors != Every && c.Anchors != Rounds {
		failf("anchors %q, want %s or %s", c.Anchors, Every, Rounds)
	}
	for _, n := range c.Budgets {
		if n < 1 || n > maxBudget {
			failf("a tree of %d nodes, want 1 to %d", n, maxBudget)
		}
	}
	if c.K < 0 || c.K > maxK {
		failf("%d candidates a slot, want 1 to %d", c.K, maxK)
	}
	return errors.Join(errs...)
}

// Stage drafts and scores captured sequences. For each sequence it takes
// records of the table capture, then one of sequences, and gives for each
// drafter records of the tables drafts, slots and rounds, in this order and
// sorted by anchor and slot; or one of faults if the sequence cannot be
// drafted on. A record of rounds always comes, even without rows: it marks a
// sequence that was scored. A sequence that an earlier stage put into faults
// yields nothing.
//
// A Stage serves one goroutine. Nothing that it computes depends on how a
// sequence was cut into records.
type Stage struct {
	cfg    Config
	scorer *scorer
	seqs   map[string]*sequence
	upload scratch
}

// NewStage returns a stage; the caller closes it before its drafters.
func NewStage(cfg Config) (*Stage, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Anchors = cmp.Or(cfg.Anchors, Every)
	cfg.K = cmp.Or(cfg.K, DefaultK)
	if cfg.Allocator == nil {
		cfg.Allocator = memory.DefaultAllocator
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Spent == nil {
		cfg.Spent = func(string, time.Duration, ...cuda.Work) {}
	}
	k := min(cfg.K, cfg.Host.Vocab)
	topK := k
	for _, n := range cfg.Budgets {
		topK = max(topK, min(n, cfg.Host.Vocab))
	}
	for _, d := range cfg.Drafters {
		if cfg.Losses != 0 && d.OwnHead() {
			cfg.Log.Warn("divergences from the target are left out: the drafter has a head of its own", "drafter", d.Name)
		}
	}
	return &Stage{
		cfg:    cfg,
		scorer: &scorer{dev: cfg.Device, k: k, topK: topK, losses: cfg.Losses, compact: scratch{dev: cfg.Device}},
		seqs:   map[string]*sequence{},
		upload: scratch{dev: cfg.Device},
	}, nil
}

// Close forgets every open sequence and gives device memory back.
func (s *Stage) Close() {
	for id := range s.seqs {
		s.Drop(id)
	}
	s.upload.close()
	s.scorer.compact.close()
}

// Drop forgets a sequence.
func (s *Stage) Drop(seq string) {
	if q := s.seqs[seq]; q != nil {
		q.close()
		delete(s.seqs, seq)
	}
}

// Process takes the next record of a sequence. Anchors are drafted as soon as
// their slots' tokens are there; rows are emitted by [Stage.End].
func (s *Stage) Process(ctx context.Context, seq string, rec arrow.Record, _ func(arrow.Record) error) error {
	env, err := schemas.EnvelopeOf(rec)
	if err != nil {
		return fmt.Errorf("drafting on %s: %w", seq, err)
	}
	q, err := s.sequence(seq)
	if err != nil {
		return fmt.Errorf("drafting on %s: %w", seq, err)
	}
	q.run = env.Run
	defer s.busySince(time.Now())
	switch env.Table {
	case schemas.TableCapture:
		err = s.capture(ctx, q, rec)
	case schemas.TableSequences:
		err = q.describe(rec)
	case schemas.TableFaults:
		q.setAside = true
	default:
		err = fmt.Errorf("%w: a record of table %s", ErrStage, env.Table)
	}
	if err != nil {
		return fmt.Errorf("drafting on %s: %w", seq, err)
	}
	return nil
}

// busySince tells how long the stage has been at work.
func (s *Stage) busySince(start time.Time) { s.cfg.Spent("", time.Since(start)) }

// describe reads the sequence's own record.
func (q *sequence) describe(rec arrow.Record) error {
	rows, err := schemas.Rows[schemas.Sequence](rec)
	if err != nil {
		return err
	}
	if len(rows) != 1 || rows[0].SeqID != q.id {
		q.failAll(checkRows, "the sequence's record does not describe it alone")
		return nil
	}
	q.row = &rows[0]
	return nil
}

func (s *Stage) sequence(id string) (*sequence, error) {
	if q := s.seqs[id]; q != nil {
		return q, nil
	}
	q := &sequence{id: id, sound: sound.NewChecker(s.cfg.Profile), recorded: true}
	for _, d := range s.cfg.Drafters {
		context, err := d.NewContext()
		if err != nil {
			q.close()
			return nil, err
		}
		q.lanes = append(q.lanes, &lane{
			drafter: d, context: context,
			methods:  Methods(d.BlockSize(), s.cfg.Budgets),
			outcomes: map[int32][]cuda.Outcome{},
		})
	}
	s.seqs[id] = q
	return q, nil
}

// capture appends a batch of tokens and states.
func (s *Stage) capture(ctx context.Context, q *sequence, rec arrow.Record) error {
	if !q.live() {
		return nil
	}
	c, err := schemas.ReadCapture(rec)
	if err != nil {
		return err
	}
	if q.check(c, s.cfg.Host); !q.live() {
		return nil
	}
	if q.spec == nil {
		q.spec = &c.Spec
	}
	for lo := 0; lo < len(c.Tokens); lo += uploadRows {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.extend(q, c, lo, min(lo+uploadRows, len(c.Tokens))); err != nil {
			return err
		}
	}
	if s.cfg.Anchors == Every {
		return s.draft(ctx, q, false)
	}
	return nil
}

// extend appends rows lo..hi-1 of a batch: tokens, labels, and every
// drafter's context.
func (s *Stage) extend(q *sequence, c schemas.Capture, lo, hi int) error {
	o := ops{dev: s.cfg.Device}
	rows := s.place(&o, q, c, lo, hi)
	for _, l := range q.lanes {
		if l.fault != nil {
			continue
		}
		var taps []cuda.Tensor
		for _, tap := range l.drafter.Taps() {
			taps = append(taps, rows[tap])
		}
		start := time.Now()
		o.do(func() error { return l.context.Extend(taps) })
		s.cfg.Spent(l.drafter.Name, time.Since(start), l.drafter.ContextWork(hi-lo))
	}
	if o.err != nil {
		return o.err
	}
	labels, err := s.labels(q, c.Tokens[lo:hi], rows[s.final()])
	if err != nil {
		return err
	}
	q.labels = append(q.labels, labels...)
	for _, t := range c.Tokens[lo:hi] {
		q.tokens = append(q.tokens, t.TokenID)
		q.mask = append(q.mask, t.LossMask)
	}
	return nil
}

// final is the state that the target's own head reads.
func (s *Stage) final() Tap { return Tap{State: s.cfg.Host.Layers, Normed: true} }

// place uploads rows lo..hi-1 of the states that are recorded and read: those
// of each drafter side by side, as its context takes them best, where no other
// has them already.
func (s *Stage) place(o *ops, q *sequence, c schemas.Capture, lo, hi int) map[Tap]cuda.Tensor {
	host := s.cfg.Host
	var order []Tap
	want := func(taps ...Tap) {
		for _, tap := range taps {
			if slices.Contains(c.Spec.States, tap.State) && !slices.Contains(order, tap) {
				order = append(order, tap)
			}
		}
	}
	for _, l := range q.lanes {
		if l.fault == nil {
			want(l.drafter.Taps()...)
		}
	}
	want(s.final())
	all := s.upload.tensor(o, "states", hi-lo, len(order)*host.Hidden)
	rows := map[Tap]cuda.Tensor{}
	for p, tap := range order {
		width := c.Spec.Hidden * c.Spec.DType.Size()
		states := c.States[slices.Index(c.Spec.States, tap.State)][lo*width : hi*width]
		vals := c.Spec.DType.AppendFloats(make([]float32, 0, (hi-lo)*host.Hidden), states)
		t := all.ColRange(p*host.Hidden, (p+1)*host.Hidden)
		o.do(func() error { return s.cfg.Device.Upload(t, vals) })
		if tap.Normed {
			o.do(func() error { return s.cfg.Device.RMSNorm(t, t, host.FinalNorm, host.Eps, host.Gain) })
		}
		rows[tap] = t
	}
	return rows
}

// labels gives the target's argmax after each token: as the capture says,
// whose target computed it from states that were not yet rounded for storage;
// where it does not say, from the normed final states if they are recorded.
func (s *Stage) labels(q *sequence, tokens []schemas.Token, final cuda.Tensor) ([]int32, error) {
	if final.Buf != nil {
		if err := q.keepFinal(s.cfg.Device, len(q.tokens), final); err != nil {
			return nil, err
		}
	}
	labels := make([]int32, len(tokens))
	complete := true
	for i, t := range tokens {
		labels[i] = -1
		if t.TargetArgmax != nil {
			labels[i] = *t.TargetArgmax
		} else {
			complete = false
		}
	}
	q.recorded = q.recorded && complete
	if complete || final.Buf == nil {
		return labels, nil
	}
	head, err := s.cfg.Device.Head(cuda.HeadArgs{Hidden: final, Weight: s.cfg.Host.Head, K: 1})
	if err != nil {
		return nil, fmt.Errorf("computing labels: %w", err)
	}
	for i, id := range head.TopIDs {
		if labels[i] < 0 {
			labels[i] = id
		}
	}
	return labels, nil
}

// draft drafts at the anchors whose slots' tokens are all there, in full
// tiles; at the end of the sequence at all that are left.
func (s *Stage) draft(ctx context.Context, q *sequence, end bool) error {
	for _, l := range q.lanes {
		ahead := l.drafter.BlockSize()
		if end {
			ahead = 2 // the anchor and one token after it
		}
		for l.fault == nil && l.next+ahead <= len(q.tokens) {
			if q.mask[l.next] && q.mask[l.next+1] {
				l.pending = append(l.pending, int32(l.next))
			}
			l.next++
			if len(l.pending) == tileAnchors {
				if err := s.pass(ctx, q, l, l.pending); err != nil {
					return err
				}
				l.pending = l.pending[:0]
			}
		}
		if end && l.fault == nil && len(l.pending) > 0 {
			if err := s.pass(ctx, q, l, l.pending); err != nil {
				return err
			}
			l.pending = nil
		}
	}
	return nil
}

// pass drafts and scores one tile.
func (s *Stage) pass(ctx context.Context, q *sequence, l *lane, anchors []int32) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	start := time.Now()
	head, err := s.scorer.score(q, l, anchors)
	if err != nil {
		return fmt.Errorf("%s: %w", l.drafter.Name, err)
	}
	s.cfg.Spent(l.drafter.Name, time.Since(start), l.drafter.DraftWork(anchors), head)
	if s.cfg.Progress != nil {
		s.cfg.Progress(l.drafter.Name, len(anchors))
	}
	return nil
}

// End drafts what is left of a sequence and emits its rows.
func (s *Stage) End(ctx context.Context, seq string, emit func(arrow.Record) error) error {
	q, err := s.sequence(seq)
	if err != nil {
		return fmt.Errorf("drafting on %s: %w", seq, err)
	}
	defer s.Drop(seq)
	defer s.busySince(time.Now())
	if q.setAside {
		return nil
	}
	if err := s.judge(q); err != nil {
		return fmt.Errorf("checking %s: %w", seq, err)
	}
	if s.cfg.Anchors == Every {
		if err := s.draft(ctx, q, true); err != nil {
			return fmt.Errorf("drafting on %s: %w", seq, err)
		}
	}
	for _, l := range q.lanes {
		rounds, err := s.rounds(ctx, q, l)
		if err == nil {
			err = s.emit(q, l, rounds, emit)
		}
		if err != nil {
			return fmt.Errorf("drafting on %s: %w", seq, err)
		}
	}
	return nil
}

// judge sets a sequence aside for what only shows when all of it is there.
func (s *Stage) judge(q *sequence) error {
	if !q.live() {
		return nil
	}
	if q.row != nil && int(q.row.Length) != len(q.tokens) {
		q.failAll(checkRows, "%d rows of a sequence of %d tokens", len(q.tokens), q.row.Length)
		return nil
	}
	if q.unsound(q.sound.End()); !q.live() {
		return nil
	}
	if q.row != nil {
		if why := sound.Greedy(q.tokens, q.labels, *q.row); why != "" {
			q.failAll(checkHead, "%s", why)
			return nil
		}
	}
	return s.probe(q)
}

// probedRows is how many rows of a sequence, at most and at least, go through the target's head to see
// that the answers that came with them are its own.
const (
	probedRows   = 32
	probedFewest = 4
)

// probe is K5: the head on the recorded final states gives the recorded
// answers. It asks for supervised rows, evenly over the sequence.
func (s *Stage) probe(q *sequence) error {
	if q.final == nil || !q.recorded {
		return nil // without answers, the labels are the head's already
	}
	var at []int32
	for p, on := range q.mask {
		if on {
			at = append(at, int32(p))
		}
	}
	n := min(len(at), probedRows)
	if n < probedFewest {
		return nil
	}
	rows := make([]int32, n)
	for i := range rows {
		rows[i] = at[i*len(at)/n]
	}
	o := ops{dev: s.cfg.Device}
	x := s.upload.tensor(&o, "probed", n, q.finalWidth)
	o.gather(x, q.finalRows(), rows)
	if o.err != nil {
		return o.err
	}
	head, err := s.cfg.Device.Head(cuda.HeadArgs{Hidden: x, Weight: s.cfg.Host.Head, K: 1})
	if err != nil {
		return fmt.Errorf("asking the target's head: %w", err)
	}
	kept := 0
	for i, p := range rows {
		if head.TopIDs[i] == q.labels[p] {
			kept++
		}
	}
	if float64(kept) < sound.Kept*float64(n) {
		q.failAll(checkHead, "the head on state %d gives %d of %d recorded answers: they are another target's, or the state is damaged", s.cfg.Host.Layers, kept, n)
	}
	return nil
}

// rounds simulates decoding, drafting wave by wave at anchors that are not
// drafted yet.
func (s *Stage) rounds(ctx context.Context, q *sequence, l *lane) ([]schemas.Round, error) {
	sim := newSimulation(q.id, l.methods, Turns(q.mask))
	for l.fault == nil {
		wave := sim.advance(l.outcomes)
		if len(wave) == 0 {
			break
		}
		for part := range slices.Chunk(wave, tileAnchors) {
			if err := s.pass(ctx, q, l, part); err != nil {
				return nil, err
			}
			if l.fault != nil {
				return nil, nil
			}
		}
	}
	return sim.rounds(), nil
}
