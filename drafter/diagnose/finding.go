package diagnose

import (
	"cmp"
	"slices"
)

// Verdict is what the data say of one hypothesis.
type Verdict string

// The verdicts, strongest first. Only the first two are alarms.
const (
	Confirmed  Verdict = "confirmed"   // the data show it, and no other probe explains them
	Supported  Verdict = "supported"   // the data speak for it
	CannotTell Verdict = "cannot tell" // the data fit both; Needs says what would decide
	RuledOut   Verdict = "ruled out"   // the data speak against it
)

func (v Verdict) order() int {
	return slices.Index([]Verdict{Confirmed, Supported, CannotTell, RuledOut}, v)
}

// Subject is what a hypothesis is about.
type Subject string

// The subjects.
const (
	OfCapture  Subject = "capture"
	OfDrafter  Subject = "drafter"
	OfEngine   Subject = "engine" // what made the stored drafts
	OfTraining Subject = "training"
)

// Finding is the verdict on one hypothesis, with what it rests on.
type Finding struct {
	Key        string  `json:"key"`
	Subject    Subject `json:"subject"`
	Hypothesis string  `json:"hypothesis"`
	Verdict    Verdict `json:"verdict"`
	// Measure says what was measured, with its numbers.
	Measure string `json:"measure,omitempty"`
	// Effect is the size of what was measured, with its 95 % interval.
	Effect *Interval `json:"effect,omitempty"`
	// Control says how the measure moves when the fault is planted, or absent.
	Control string `json:"control,omitempty"`
	// Needs says what would decide, when it cannot be told.
	Needs string `json:"needs,omitempty"`
	// Sentence says it to a person.
	Sentence string `json:"sentence"`
	// Note marks a finding that is no fault even when it is confirmed.
	Note bool `json:"note,omitempty"`

	weight float64 // ranks findings of one verdict
}

// alarm says that the finding is a fault that the data show.
func (f Finding) alarm() bool {
	return !f.Note && (f.Verdict == Confirmed || f.Verdict == Supported)
}

// Number is a published number of the drafter.
type Number struct {
	Name  string   `json:"name"`
	Is    Interval `json:"is"`
	Words string   `json:"definition"`
}

// Offsets are the accuracies of a drafter's slots against labels that stand
// some tokens further on.
type Offsets struct {
	Shift    int       `json:"shift"`
	Accuracy []float64 `json:"accuracy"` // slot 1 first
	Pooled   Interval  `json:"pooled"`
}

// Report is all that was found.
type Report struct {
	Drafter   string    `json:"drafter"`
	Reference string    `json:"reference,omitempty"`
	Sequences int       `json:"sequences"`
	Anchors   int       `json:"anchors"`
	Healthy   bool      `json:"healthy"` // no finding is an alarm
	Sentence  string    `json:"sentence"`
	Findings  []Finding `json:"findings"`
	Offsets   []Offsets `json:"offsets"`
	Numbers   []Number  `json:"numbers"`
	Seconds   float64   `json:"seconds"`
}

// rank sorts findings: alarms first, by verdict, then by weight.
func (r *Report) rank() {
	slices.SortStableFunc(r.Findings, func(a, b Finding) int {
		return cmp.Or(
			cmp.Compare(first(b), first(a)),
			cmp.Compare(a.Verdict.order(), b.Verdict.order()),
			cmp.Compare(b.weight, a.weight),
		)
	})
	r.Healthy = !r.alarmed()
}

// alarmed says that a fault was found so far.
func (r *Report) alarmed() bool { return slices.ContainsFunc(r.Findings, Finding.alarm) }

func first(f Finding) int {
	if f.alarm() {
		return 1
	}
	return 0
}
