package diagnose

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
)

// Sequence is one captured sequence as it is stored.
type Sequence struct {
	ID        string
	PromptLen int
	Tokens    []schemas.Token
	// States holds the stored states by their number, [length*H] each.
	States map[int][]float32
	// Drafts are the stored drafts of the examined drafter by anchor: B-1
	// tokens each. Nil where none are stored.
	Drafts map[int32][]int32
	// Rounds are the stored rounds of its chain.
	Rounds []schemas.Round
	// Greedy says that the target wrote the text, at temperature 0.
	Greedy bool
}

// Checkpoint is a drafter's files.
type Checkpoint struct {
	Name    string
	Config  []byte
	Weights drafter.Weights
}

// Case is what is known of a drafter that is to be examined. Device, Host,
// Sequences and Drafter are needed; everything else makes more probes
// possible.
type Case struct {
	Device    cuda.Device
	Host      drafter.Host
	Sequences []Sequence
	// Again are recordings of some of the same texts, made with the same
	// settings. They need tokens and states.
	Again     []Sequence
	Drafter   Checkpoint
	Reference *Checkpoint
	// Recompute runs the target on token ids and gives its states 0..n,
	// [length*H] each.
	Recompute func(ctx context.Context, ids []int32) ([][]float32, error)
	// Text is the text of a token, where there is a tokenizer.
	Text func(id int32) string
	// Encode gives the tokens of a text, where there is a tokenizer.
	Encode func(text string) []int32
	// Log is a training log, a JSON object a line.
	Log *Log
	// LogRun is the run of the log that made the drafter; "" is the drafter's
	// name, or what fits.
	LogRun string
	// Capture says how the states were recorded.
	Capture Capture
	// Anchors bounds the anchors that variants draft at; 0 is 400.
	Anchors int
	// Families are the keys of the families of variants to try; nil is all.
	Families []string
	// Progress, if given, is told before each sequence of each pass over them.
	Progress func(pass string, done, total int)
}

// tell reports progress.
func (c Case) tell(pass string, done, total int) {
	if c.Progress != nil {
		c.Progress(pass, done, total)
	}
}

// Capture says how states were recorded.
type Capture struct {
	DType schemas.DType
	// Exact says that the target is run again in the arithmetic in which they
	// were computed, so that nothing but their storage may round them.
	Exact bool
	// Rounded says that they were stored in 8-bit codes.
	Rounded bool
}

// ErrCase marks a case that cannot be examined.
var ErrCase = errors.New("diagnosing")

// Validate reports what is missing.
func (c Case) Validate() error {
	var errs []error
	failf := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrCase}, args...)...))
	}
	if c.Device == nil {
		failf("no device")
	}
	if err := c.Host.Validate(); err != nil {
		errs = append(errs, err)
	}
	if len(c.Sequences) == 0 {
		failf("no sequence")
	}
	if c.Drafter.Weights == nil {
		failf("no drafter")
	}
	return errors.Join(errs...)
}

// variantSlots is how many slots a variant drafts. The first slots hold nearly
// all hits, and the rest cost as much again.
const variantSlots = 6

const defaultAnchors = 400

// study is a case at work: what the probes share.
type study struct {
	Case
	spec     drafter.Spec
	seqs     []*subject
	look     int          // at how many times Case.Anchors the best variants were tried
	shift    int          // the offset at which the drafter's slots hit most
	lag      int          // the same before 0, of one that does not repeat the anchor nearly always
	lagHits  float64      // how often it hits there, of one that repeats it often
	declared []measured   // the declared graph's drafts; nil when states are missing
	hit      []slotCounts // of the engine, at the labels that count
	trained  []engineRun  // of the engine, at the labels it was trained for
}

// subject is one sequence under study.
type subject struct {
	Sequence
	ids    []int32
	mask   []bool
	labels []int32     // labels[t] is the target's answer for position t; -1 unknown
	clean  [][]float32 // recomputed states 0..n, nil without a target
	// sample are the anchors at which variants draft.
	sample []int32
}

// newStudy recomputes the states and picks the anchors.
func newStudy(ctx context.Context, c Case) (*study, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if c.Anchors == 0 {
		c.Anchors = defaultAnchors
	}
	s := &study{Case: c}
	var err error
	if s.spec, err = drafter.ParseDFlash(c.Drafter.Config, c.Host.Layers); err != nil {
		return nil, fmt.Errorf("reading drafter %s: %w", c.Drafter.Name, err)
	}
	for i, q := range c.Sequences {
		c.tell("running the target again", i, len(c.Sequences))
		sub := &subject{Sequence: q, labels: slices.Repeat([]int32{-1}, len(q.Tokens))}
		for _, t := range q.Tokens {
			sub.ids, sub.mask = append(sub.ids, t.TokenID), append(sub.mask, t.LossMask)
		}
		if c.Recompute != nil {
			if sub.clean, err = c.Recompute(ctx, sub.ids); err != nil {
				return nil, fmt.Errorf("recomputing sequence %s: %w", q.ID, err)
			}
		}
		if err := s.label(sub); err != nil {
			return nil, fmt.Errorf("labelling sequence %s: %w", q.ID, err)
		}
		s.seqs = append(s.seqs, sub)
	}
	s.pickAnchors(s.Anchors)
	return s, nil
}

// label finds the target's answers: from the recomputed final states, else
// from the capture.
func (s *study) label(q *subject) error {
	if q.clean != nil {
		answers, _, err := s.answers(q.clean[s.Host.Layers], nil)
		if err != nil {
			return err
		}
		copy(q.labels[1:], answers)
		return nil
	}
	for t := 1; t < len(q.labels); t++ {
		if a := q.Tokens[t-1].TargetArgmax; a != nil {
			q.labels[t] = *a
		}
	}
	return nil
}

// answers is the argmax of the target's head on final states, pre-norm, and
// the log-probability of next where that is given.
func (s *study) answers(final []float32, next []int32) (argmax []int32, logprob []float32, err error) {
	h := s.Host
	n := len(final) / h.Hidden
	buf, err := s.Device.New(max(len(final), 1))
	if err != nil {
		return nil, nil, err
	}
	defer buf.Close()
	x := cuda.Matrix(buf, n, h.Hidden)
	if err := errors.Join(s.Device.Upload(x, final), s.Device.RMSNorm(x, x, h.FinalNorm, h.Eps, h.Gain)); err != nil {
		return nil, nil, err
	}
	return s.headOn(x, next)
}

// headOn is the argmax of the target's head on normed states, and the
// log-probability of next where that is given.
func (s *study) headOn(x cuda.Tensor, next []int32) (argmax []int32, logprob []float32, err error) {
	res, err := s.Device.Head(cuda.HeadArgs{Hidden: x, Weight: s.Host.Head, K: 1, Labels: next})
	if err != nil {
		return nil, nil, err
	}
	for i := range next {
		logprob = append(logprob, res.LabelLogit[i]-res.LSE[i])
	}
	return res.TopIDs, logprob, nil
}

// pickAnchors spreads the variants' anchors, at most that many, evenly over
// all that there are.
func (s *study) pickAnchors(most int) {
	n := 0
	for _, q := range s.seqs {
		n += len(drafter.Anchors(q.mask))
	}
	step := max(1, float64(n)/float64(most))
	next, at := 0.0, 0
	for _, q := range s.seqs {
		q.sample = nil
		for _, a := range drafter.Anchors(q.mask) {
			if float64(at) >= next {
				q.sample = append(q.sample, a)
				next += step
			}
			at++
		}
	}
}

// scored says whether the token at position t counts.
func (q *subject) scored(t int) bool {
	return t >= 0 && t < len(q.labels) && q.mask[t] && q.labels[t] >= 0
}
