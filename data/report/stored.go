package report

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/draftscope/draftscope/data"
)

// Stored says what rounding did to the states of a run: the bytes that it
// saves beside what it costs.
type Stored struct {
	Encoding string        `json:"encoding"`
	Bytes    int64         `json:"bytes"`          // that vec takes
	Lossless int64         `json:"lossless_bytes"` // that it would take without loss
	Captured int64         `json:"captured_bytes"` // of the values as captured
	States   []StoredState `json:"states"`
	// Effects compare each drafter that read the rounded states (A) with the
	// same one that read them as captured (B), over shared sequences.
	Effects []Pair `json:"effects"`
	// Alone are drafters that only ever read the one or the other.
	Alone []string `json:"alone,omitempty"`
}

// StoredState compares stored with captured vectors of one state.
type StoredState struct {
	State      int     `json:"state"`
	Rows       int64   `json:"rows"`
	MeanCosine float64 `json:"mean_cosine"`
	MinCosine  float64 `json:"min_cosine"`
	RelL2      float64 `json:"rel_l2"`
}

// stored reads what is known of a run's rounding; nil for a lossless one.
func (rec recorded) stored(run string) (*Stored, error) {
	if rec.ds == nil || !slices.ContainsFunc(rec.list, func(r data.Run) bool { return r.Name == run }) {
		return nil, nil
	}
	s, err := rec.ds.RoundedStates(run)
	if s == nil || err != nil {
		return nil, err
	}
	out := &Stored{Encoding: string(s.Encoding), Bytes: s.Bytes, Lossless: s.Lossless, Captured: s.Captured, States: []StoredState{}, Effects: []Pair{}}
	for _, e := range s.States {
		out.States = append(out.States, StoredState{e.State, e.Rows, e.MeanCosine(), e.MinCosine, e.RelL2()})
	}
	return out, nil
}

// twins finds, for every drafter of a run that read rounded states, the same
// one that read them as they were captured; names both.
func (rec recorded) twins(run string) (twin map[string]string, alone []string) {
	twin = map[string]string{}
	for _, r := range rec.list {
		if r.Name != run || r.Rounding == data.Lossless {
			continue
		}
		met := map[string]bool{}
		for _, d := range r.Drafters {
			if o, ok := r.Twin(d); ok {
				twin[d.Name] = o.Name
				met[d.Name], met[o.Name] = true, true
			}
		}
		for _, d := range r.Drafters {
			if !met[d.Name] {
				alone = append(alone, d.Name)
			}
		}
	}
	return twin, alone
}

// effects compares twins.
func (s *Stored) effects(ctx context.Context, twin map[string]string, all []*sums, opt Options) error {
	find := func(name string) *sums {
		for _, s := range all {
			if s.drafter == name {
				return s
			}
		}
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(twin)) {
		a, b := find(name), find(twin[name])
		if a == nil || b == nil {
			continue
		}
		p, err := compare(ctx, a, b, opt)
		if err != nil {
			return err
		}
		s.Effects = append(s.Effects, p)
	}
	return nil
}

// without leaves out the drafters that are in twin: what rounding did to them
// is no rank among drafters.
func without(twin map[string]string, all []*sums, drafters []Drafter) (left []*sums, named []Drafter) {
	for i, s := range all {
		if twin[s.drafter] == "" {
			left, named = append(left, s), append(named, drafters[i])
		}
	}
	return left, named
}

// facts are the lines about rounding above a run's tables.
func (s *Stored) facts(run string) []string {
	if s == nil {
		return nil
	}
	saved := "nothing is stored yet"
	if s.Lossless > 0 {
		saved = fmt.Sprintf("vec takes %s, and %s without loss (%.2f of it)", bytesWords(s.Bytes), bytesWords(s.Lossless), float64(s.Bytes)/float64(s.Lossless))
	}
	lines := []string{fmt.Sprintf("states are stored with a loss, as %s: %s", s.Encoding, saved)}
	if len(s.Effects) == 0 {
		lines = append(lines, "what that costs a drafter is not known until it has read the stored states: draftscope replay --dataset DIR --run "+run)
	} else if len(s.Alone) > 0 {
		lines = append(lines, "what it costs is not known of "+list(s.Alone)+": no same drafter has read the states the other way")
	}
	return lines
}

func bytesWords(n int64) string {
	if n < 1e6 {
		return fmt.Sprintf("%.1f kB", float64(n)/1e3)
	}
	return fmt.Sprintf("%.1f MB", float64(n)/1e6)
}

func (run Run) storedTable() table {
	t := table{
		title: "Stored states",
		note:  "cosine of each stored vector with the captured one, by state; relative error is the length of all differences over that of all values",
		head:  []string{"state", "mean cosine", "least cosine", "relative error", "rows"},
	}
	if run.Stored == nil {
		return t
	}
	for _, s := range run.Stored.States {
		t.rows = append(t.rows, []string{strconv.Itoa(s.State), fmt.Sprintf("%.6f", s.MeanCosine), fmt.Sprintf("%.6f", s.MinCosine), fmt.Sprintf("%.2e", s.RelL2), count(s.Rows)})
	}
	return t
}

func (run Run) effectTable() table {
	t := table{
		title: "What rounding costs each drafter",
		note:  "A read the states as they are stored, B as they were captured: accept_len_macro, and slot_accuracy at slot 1, over shared sequences, paired bootstrap",
		head:  pairHead, left: 3,
	}
	if run.Stored == nil {
		return t
	}
	for _, p := range run.Stored.Effects {
		for _, d := range p.Acceptance {
			t.rows = append(t.rows, pairRow(p, d, settingName(d.Method, d.Budget)))
		}
		if len(p.Slots) > 0 {
			t.rows = append(t.rows, pairRow(p, p.Slots[0], "slot 1"))
		}
	}
	return t
}
