// Package report turns a dataset into an answer to "which drafter is better,
// and where". [Build] asks data/query for sums per sequence, and estimates
// from them every published number with a bootstrap interval over sequences.
// The same [Report] is written for a terminal ([WriteText]), for programs
// ([WriteJSON]) and as one self-contained page with plots ([WriteHTML]).
//
// A number that nothing was counted for is nil, null in JSON and "n/a" for
// people: never 0, never NaN.
package report

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/draftscope/draftscope/data/query"
)

// Version is the version of the JSON form. Fields may be added within one.
const Version = 1

// ErrNoRun marks a run that the dataset does not have.
var ErrNoRun = errors.New("no such run")

// Options choose what is reported. The zero value reports every run.
type Options struct {
	Run       string // empty: every run
	Seed      uint64 // of the bootstrap; equal seeds give equal intervals
	Resamples int    // 0: 2000
	// Texts is how many sequences of each run are read token by token.
	Texts int
	// Decode gives the text of one token of a run, "" where it is not known.
	// Without it tokens are shown by their numbers.
	Decode func(run string, id int32) string
}

// Validate reports a value that is out of range.
func (o Options) Validate() error {
	if o.Resamples < 0 || o.Resamples > 1_000_000 {
		return fmt.Errorf("resamples is %d, want 0 to 1000000", o.Resamples)
	}
	return nil
}

// Report is everything that is known of a dataset's runs. Its JSON field
// names are stable within one [Version].
type Report struct {
	Version    int             `json:"report_version"`
	Dataset    string          `json:"dataset"`
	Confidence float64         `json:"confidence"` // of every interval
	Resamples  int             `json:"resamples"`
	Seed       uint64          `json:"seed"`
	LeftOut    []query.Warning `json:"left_out"` // unreadable files; no number counts them
	Runs       []Run           `json:"runs"`
	// Similarities are the pairs of captures that were compared.
	Similarities []Similarity `json:"similarities"`
}

// Run is one capture and the drafters replayed over it.
type Run struct {
	Run       string    `json:"run"`
	Sequences int64     `json:"sequences"`
	Tokens    int64     `json:"tokens"`
	Generated int64     `json:"generated"` // tokens with loss mask 1
	States    []int64   `json:"states"`    // which c were recorded
	Agreement Rate      `json:"agreement"` // data token = target's argmax
	Looped    []string  `json:"looped"`    // sequences whose text fell into a loop
	Faults    []Fault   `json:"faults"`
	Drafters  []Drafter `json:"drafters"`
	Pairs     []Pair    `json:"pairs"`
	Verdict   string    `json:"verdict"` // one sentence
	Stored    *Stored   `json:"stored_states,omitempty"`
	Readings  []Reading `json:"readings,omitempty"`
}

// Rate is a share with the counts behind it.
type Rate struct {
	Hits  int64    `json:"hits"`
	Of    int64    `json:"of"`
	Value *float64 `json:"value"`
}

// Fault counts the sequences that one check set aside.
type Fault struct {
	Check     string `json:"check"`
	Faults    int64  `json:"faults"`
	Sequences int64  `json:"sequences"`
}

// Estimate is a number with its bootstrap interval over sequences. The
// interval is nil when fewer than two sequences have something to count.
type Estimate struct {
	Value *float64 `json:"value"`
	Low   *float64 `json:"low"`
	High  *float64 `json:"high"`
}

// Drafter is one drafter's numbers over one run. See docs/metrics.md for each.
type Drafter struct {
	Drafter   string `json:"drafter"`
	Note      string `json:"note,omitempty"` // why there is nothing to show
	Faulty    int64  `json:"faulty"`         // sequences that a fault of this drafter set aside
	Sequences int    `json:"sequences"`
	Anchors   int64  `json:"anchors"`
	Scored    int64  `json:"scored"` // slots
	Capped    int64  `json:"capped"` // anchors whose run of hits ended with the scoring
	// Outside are scored slots whose label the draft vocabulary lacks: misses
	// that no drafting can avoid.
	Outside          int64        `json:"outside_vocabulary"`
	Slots            []Slot       `json:"slots"`
	EAL              Estimate     `json:"eal"`
	ExpectedAccepted Estimate     `json:"expected_accepted"`
	Top8Streak       Estimate     `json:"top8_streak"`
	LossMeans        []LossMean   `json:"loss_means"`
	Losses           []Loss       `json:"losses"`
	Acceptance       []Acceptance `json:"acceptance"`
	ByTag            []Part       `json:"by_tag"`
	OverTime         []Part       `json:"over_time"`
}

// Slot is one position of the block. Reached counts the anchors whose slots
// before all hit, which is what ConditionalRate divides by.
type Slot struct {
	Slot            int      `json:"slot"`
	Hits            int64    `json:"hits"`
	Scored          int64    `json:"scored"`
	Accuracy        Estimate `json:"slot_accuracy"`
	DataHits        int64    `json:"data_hits"`
	Anchors         int64    `json:"anchors"`
	PrefixHits      int64    `json:"prefix_hits"`
	PrefixRate      Estimate `json:"prefix_rate"`
	Reached         int64    `json:"reached"`
	ConditionalRate Estimate `json:"conditional_rate"`
}

// LossMean is the plain mean of one loss over scored slots.
type LossMean struct {
	Objective string   `json:"objective"`
	Count     int64    `json:"count"`
	Sum       *float64 `json:"sum"`
	Mean      Estimate `json:"mean"`
}

// Loss is one training loss of a published recipe.
type Loss struct {
	Objective  string   `json:"objective"`
	Weighting  string   `json:"weighting"`
	Gamma      *float64 `json:"gamma"`
	Normaliser string   `json:"normaliser"`
	Slots      int64    `json:"slots"`
	Weight     *float64 `json:"weight"`
	Weighted   *float64 `json:"weighted"`
	Loss       *float64 `json:"loss"`
}

// Acceptance is what rounds of one method and budget accepted. Truncated
// rounds are in no mean and no bin.
type Acceptance struct {
	Method      string `json:"method"`
	Budget      int64  `json:"budget"`
	Sequences   int64  `json:"sequences"`
	Rounds      int64  `json:"rounds"`
	Truncated   int64  `json:"truncated"`
	SumAccepted int64  `json:"sum_accepted"`
	Proposed    int64  `json:"proposed"` // drafts put before the target, in whole rounds
	// VerifiedPerToken is Σ (proposed + 1) / Σ accept_len.
	VerifiedPerToken *float64 `json:"verified_per_token"`
	AcceptLenMacro   Estimate `json:"accept_len_macro"`
	AcceptLenMicro   Estimate `json:"accept_len_micro"`
	AcceptedMacro    Estimate `json:"accepted_macro"`
	AcceptedMicro    Estimate `json:"accepted_micro"`
	Distribution     []Bin    `json:"distribution"`
}

// Bin counts the rounds of one acceptance length.
type Bin struct {
	AcceptLen int64   `json:"accept_len"`
	Rounds    int64   `json:"rounds"`
	Share     float64 `json:"share"`
}

// Pair compares two drafters over the sequences that both have.
type Pair struct {
	A          string       `json:"a"`
	B          string       `json:"b"`
	Sequences  int          `json:"sequences"` // shared
	Acceptance []Difference `json:"acceptance"`
	Slots      []Difference `json:"slots"`
}

// Difference is A's value minus B's, with a paired interval: both drafters
// are resampled by the same sequences. Wins, ties and losses count sequences
// from A's side.
type Difference struct {
	Metric     string   `json:"metric"` // accept_len_macro or slot_accuracy
	Method     string   `json:"method,omitempty"`
	Budget     int64    `json:"budget,omitempty"` // absent for chains of two block sizes
	Slot       int      `json:"slot,omitempty"`
	A          *float64 `json:"a"`
	B          *float64 `json:"b"`
	Difference Estimate `json:"difference"`
	Wins       int      `json:"wins"`
	Ties       int      `json:"ties"`
	Losses     int      `json:"losses"`
}

// enough is how many sequences a lead must rest on. With fewer, all of them
// would point the same way by chance alone more often than one time in 20.
const enough = 6

// Ahead is +1 when A is better beyond the interval, -1 when B is, and 0 when
// the interval includes 0, is not known, or rests on fewer than 6 sequences.
func (d Difference) Ahead() int {
	switch e := d.Difference; {
	case d.Wins+d.Ties+d.Losses < enough:
		return 0
	case e.Low != nil && *e.Low > 0:
		return 1
	case e.High != nil && *e.High < 0:
		return -1
	}
	return 0
}

// Build computes the report of db.
func Build(ctx context.Context, db *query.DB, opt Options) (*Report, error) {
	if err := opt.Validate(); err != nil {
		return nil, fmt.Errorf("reporting: %w", err)
	}
	if opt.Resamples == 0 {
		opt.Resamples = 2000
	}
	l := &loader{ctx: ctx, db: db}
	rec, err := readRecorded(db.Dir())
	if err != nil {
		return nil, fmt.Errorf("reporting on %s: %w", db.Dir(), err)
	}
	runs := rec.runs(l.runs())
	if l.err == nil && opt.Run != "" && !slices.Contains(runs, opt.Run) {
		l.err = fmt.Errorf("%w: %s; the dataset has %q", ErrNoRun, opt.Run, runs)
	}
	if opt.Run != "" {
		runs = []string{opt.Run}
	}
	r := &Report{
		Version: Version, Dataset: db.Dir(), Confidence: confidence, Resamples: opt.Resamples, Seed: opt.Seed,
		LeftOut: append([]query.Warning{}, db.Warnings()...), Runs: []Run{},
	}
	for _, name := range runs {
		if l.err != nil {
			break
		}
		run := l.run(name)
		sums := rec.drafters(name, l.drafters(name))
		if l.err != nil {
			break
		}
		tags, moments := l.groupings(name)
		for _, s := range sums {
			d, err := s.estimate(ctx, opt)
			if err == nil {
				d.ByTag, err = s.parts(ctx, tags, opt)
			}
			if err == nil {
				d.OverTime, err = s.parts(ctx, moments, opt)
			}
			if err != nil {
				return nil, fmt.Errorf("reporting on %s: %w", name, err)
			}
			run.Drafters = append(run.Drafters, d)
		}
		l.details(name, run.Drafters)
		l.faulty(name, run.Drafters)
		rec.notes(name, run.Drafters)
		run.Readings = l.readings(name, sums, run.Drafters, opt)
		if run.Stored, err = rec.stored(name); err != nil {
			return nil, fmt.Errorf("reporting on %s: %w", name, err)
		}
		ranked := run
		if run.Stored != nil {
			twin, alone := rec.twins(name)
			run.Stored.Alone = alone
			if err := run.Stored.effects(ctx, twin, sums, opt); err != nil {
				return nil, fmt.Errorf("reporting on %s: %w", name, err)
			}
			sums, ranked.Drafters = without(twin, sums, run.Drafters)
		}
		if run.Pairs, err = comparePairs(ctx, sums, ranked.Drafters, opt); err != nil {
			return nil, fmt.Errorf("reporting on %s: %w", name, err)
		}
		ranked.Pairs = run.Pairs
		run.Verdict = verdict(ranked)
		r.Runs = append(r.Runs, run)
	}
	r.Similarities = l.similarities(opt.Run)
	if l.err != nil {
		return nil, fmt.Errorf("reporting on %s: %w", db.Dir(), l.err)
	}
	return r, nil
}
