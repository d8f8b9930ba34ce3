package report

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/data/query"
)

// recorded is what a dataset says of its runs before anything is stored of
// them. It is empty for a folder of tables without a dataset.json.
type recorded struct {
	ds   *data.Dataset
	list []data.Run
}

func readRecorded(dir string) (recorded, error) {
	ds, err := data.Open(dir)
	if errors.Is(err, data.ErrNotDataset) {
		return recorded{}, nil
	}
	if err != nil {
		return recorded{}, err
	}
	return recorded{ds, ds.Runs()}, nil
}

// runs adds the recorded runs to those that have rows.
func (rec recorded) runs(stored []string) []string {
	for _, r := range rec.list {
		if !slices.Contains(stored, r.Name) {
			stored = append(stored, r.Name)
		}
	}
	slices.Sort(stored)
	return stored
}

// drafters adds the recorded drafters of a run to those that have rows.
func (rec recorded) drafters(run string, stored []*sums) []*sums {
	for _, r := range rec.list {
		if r.Name != run {
			continue
		}
		for _, d := range r.Drafters {
			if !slices.ContainsFunc(stored, func(s *sums) bool { return s.drafter == d.Name }) {
				stored = append(stored, newSums(d.Name))
			}
		}
	}
	slices.SortStableFunc(stored, func(a, b *sums) int { return strings.Compare(a.drafter, b.drafter) })
	return stored
}

// notes says of every drafter without rows why it has none.
func (rec recorded) notes(run string, drafters []Drafter) {
	for i := range drafters {
		d := &drafters[i]
		if d.Sequences > 0 {
			continue
		}
		var done map[string]string
		if rec.ds != nil {
			// A damaged file is among those that the report names: nothing
			// more is known of this drafter then.
			done, _ = rec.ds.Scored(run, d.Drafter)
		}
		switch n := int64(len(done)); {
		case n > 0 && d.Faulty > 0:
			d.Note = fmt.Sprintf("no anchor in %s, faults in %s", quantity(n, "sequence"), quantity(d.Faulty, "other"))
		case n > 0:
			d.Note = "no anchor in " + quantity(n, "sequence")
		case d.Faulty > 0:
			d.Note = "set aside by faults in " + quantity(d.Faulty, "sequence")
		default:
			d.Note = "nothing of it is stored"
		}
	}
}

// faulty counts the sequences that each drafter's own faults set aside. Their
// details begin with the drafter's name; a loss that became NULL sets nothing
// aside.
func (l *loader) faulty(run string, drafters []Drafter) {
	for i := range drafters {
		d := &drafters[i]
		l.each("SELECT count(DISTINCT seq_id) FROM faults WHERE run = "+query.Literal(run)+
			" AND starts_with(detail, "+query.Literal("drafter "+d.Drafter+": ")+") AND NOT ends_with(detail, 'stored as NULL')",
			func(r record) { d.Faulty = r.int(0) })
	}
}
