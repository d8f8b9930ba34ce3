package data

import (
	"cmp"
	"errors"
	"maps"
	"path/filepath"
	"slices"

	"github.com/draftscope/draftscope/schemas"
)

// Twin finds the drafter of the run that is the same as d but for having read
// the states as they were captured. It looks for drafters that read them as
// they are stored.
func (r Run) Twin(d Drafter) (twin Drafter, ok bool) {
	if d.Options[OptionStates] == "" {
		return twin, false
	}
	options := maps.Clone(d.Options)
	delete(options, OptionStates)
	i := slices.IndexFunc(r.Drafters, func(o Drafter) bool { return o.Fingerprint == d.Fingerprint && maps.Equal(o.Options, options) })
	if i < 0 {
		return twin, false
	}
	return r.Drafters[i], true
}

// Effect compares what was accepted of a drafter that read the states as they
// are stored with the same one that read them as they were captured: the mean
// over sequences, which both have, of each one's mean accept_len, truncated
// rounds left out.
type Effect struct {
	Stored    string  `json:"stored"`   // the drafters' names
	Captured  string  `json:"captured"` //
	Method    string  `json:"method"`
	Budget    int32   `json:"budget"`
	Sequences int     `json:"sequences"`
	OnStored  float64 `json:"accept_len_on_stored"`
	OnCapture float64 `json:"accept_len_on_captured"`
}

// way is one way to run rounds.
type way struct {
	method string
	budget int32
}

// mean is a sum of accepted lengths and how many there are.
type mean struct{ sum, n int64 }

// effects compares the twins of a run. Files are those that count.
func (d *Dataset) effects(r Run, rounds []string) ([]Effect, error) {
	var list []Effect
	for _, dr := range r.Drafters {
		twin, ok := r.Twin(dr)
		if !ok {
			continue
		}
		a, err := d.acceptance(r.Name, dr.Name, rounds)
		if err != nil {
			return nil, err
		}
		b, err := d.acceptance(r.Name, twin.Name, rounds)
		if err != nil {
			return nil, err
		}
		for _, w := range slices.SortedFunc(maps.Keys(a), func(x, y way) int {
			return cmp.Or(cmp.Compare(x.method, y.method), cmp.Compare(x.budget, y.budget))
		}) {
			e := Effect{Stored: dr.Name, Captured: twin.Name, Method: w.method, Budget: w.budget}
			for seq, x := range a[w] {
				if y := b[w][seq]; x.n > 0 && y.n > 0 {
					e.Sequences++
					e.OnStored += float64(x.sum) / float64(x.n)
					e.OnCapture += float64(y.sum) / float64(y.n)
				}
			}
			if e.Sequences > 0 {
				e.OnStored /= float64(e.Sequences)
				e.OnCapture /= float64(e.Sequences)
				list = append(list, e)
			}
		}
	}
	return list, nil
}

// acceptance sums up a drafter's rounds by way and sequence.
func (d *Dataset) acceptance(run, drafter string, rounds []string) (map[way]map[string]mean, error) {
	dir := drafterDir(d.dir, schemas.TableRounds, run, drafter)
	by := map[way]map[string]mean{}
	var errs []error
	for _, path := range rounds {
		if filepath.Dir(path) != dir {
			continue
		}
		rows, err := readRows[schemas.Round](path)
		errs = append(errs, err)
		for _, r := range rows {
			if r.Truncated {
				continue
			}
			w := way{r.Method, r.Budget}
			if by[w] == nil {
				by[w] = map[string]mean{}
			}
			m := by[w][r.SeqID]
			by[w][r.SeqID] = mean{m.sum + int64(r.AcceptLen), m.n + 1}
		}
	}
	return by, errors.Join(errs...)
}
