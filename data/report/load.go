package report

import (
	"context"
	"fmt"

	"github.com/draftscope/draftscope/data/query"
)

// longest is the deepest slot and the longest acceptance that a report shows.
// No block comes near it; a damaged file may claim anything.
const longest = "1024"

// loader reads a dataset's sums. Its first error stops all that follows.
type loader struct {
	ctx context.Context //nolint:containedctx // lives for one Build
	db  *query.DB
	err error
}

// record is one row of an answer.
type record []any

func (r record) text(i int) string { s, _ := r[i].(string); return s }
func (r record) int(i int) int64   { n, _ := r[i].(int64); return n }

// float is 0 for NULL; where that matters the SQL gives counts beside it.
func (r record) float(i int) float64 {
	switch v := r[i].(type) {
	case float64:
		return v
	case float32:
		return float64(v)
	case int64:
		return float64(v)
	}
	return 0
}

// maybe is nil for NULL.
func (r record) maybe(i int) *float64 {
	if r[i] == nil {
		return nil
	}
	return number(r.float(i))
}

func (l *loader) each(sql string, use func(record)) {
	if l.err != nil {
		return
	}
	rows, err := l.db.Query(l.ctx, sql)
	if err != nil {
		l.err = err
		return
	}
	for rows.Next() {
		use(rows.Values())
	}
	l.err = rows.Err()
}

func (l *loader) runs() []string {
	var runs []string
	l.each(`SELECT run FROM sequences UNION SELECT run FROM slots UNION SELECT run FROM rounds UNION SELECT run FROM faults ORDER BY run`,
		func(r record) { runs = append(runs, r.text(0)) })
	return runs
}

// run reads what is known of a run without its drafters.
func (l *loader) run(name string) Run {
	run := Run{Run: name, States: []int64{}, Looped: []string{}, Faults: []Fault{}, Drafters: []Drafter{}, Pairs: []Pair{}}
	in := " WHERE run = " + query.Literal(name)
	l.each("SELECT count(*) FROM sequences"+in, func(r record) { run.Sequences = r.int(0) })
	l.each("SELECT count(*), count(*) FILTER (loss_mask) FROM tokens"+in, func(r record) { run.Tokens, run.Generated = r.int(0), r.int(1) })
	l.each("SELECT DISTINCT state FROM states"+in+" ORDER BY state", func(r record) { run.States = append(run.States, r.int(0)) })
	l.each("SELECT agreed, positions, agreement FROM agreement"+in, func(r record) { run.Agreement = Rate{r.int(0), r.int(1), r.maybe(2)} })
	l.each("SELECT seq_id FROM repetition"+in+" AND looped ORDER BY seq_id", func(r record) { run.Looped = append(run.Looped, r.text(0)) })
	l.each(`SELECT "check", count(*), count(DISTINCT seq_id) FROM faults`+in+` GROUP BY "check" ORDER BY "check"`,
		func(r record) { run.Faults = append(run.Faults, Fault{r.text(0), r.int(1), r.int(2)}) })
	return run
}

// setting is one way to run rounds.
type setting struct {
	method string
	budget int64
}

// sums is one drafter's raw counts per sequence: every slice is indexed as seqs.
type sums struct {
	drafter string
	seqs    []string
	index   map[string]int
	slots   []slotSums // slot k at k-1
	streak  counted
	losses  map[string]*counted // by objective
	accept  map[setting]*acceptSums
}

func newSums(drafter string) *sums {
	return &sums{drafter: drafter, index: map[string]int{}, losses: map[string]*counted{}, accept: map[setting]*acceptSums{}}
}

// counted is a sum and what it is divided by.
type counted struct{ num, den []float64 }

type slotSums struct{ acc, prefix, cond counted }

// acceptSums holds both forms: micro pools rounds, macro has one mean a sequence.
type acceptSums struct {
	micro, macro counted
	truncated    int64
}

func newCounted(n int) counted { return counted{make([]float64, n), make([]float64, n)} }

func (s *sums) slot(k int64) *slotSums {
	for int64(len(s.slots)) < k {
		n := len(s.seqs)
		s.slots = append(s.slots, slotSums{newCounted(n), newCounted(n), newCounted(n)})
	}
	return &s.slots[k-1]
}

// drafters reads the sums of every drafter of a run, by name.
func (l *loader) drafters(run string) []*sums {
	in := " WHERE run = " + query.Literal(run)
	var all []*sums
	by := make(map[string]*sums)
	l.each(`SELECT drafter, seq_id FROM slots`+in+` UNION SELECT drafter, seq_id FROM rounds`+in+` ORDER BY drafter, seq_id`, func(r record) {
		s := by[r.text(0)]
		if s == nil {
			s = newSums(r.text(0))
			by[s.drafter] = s
			all = append(all, s)
		}
		s.index[r.text(1)] = len(s.seqs)
		s.seqs = append(s.seqs, r.text(1))
	})
	for _, s := range all {
		s.streak = newCounted(len(s.seqs))
	}
	// at finds the place of a row whose first columns are drafter and seq_id.
	at := func(r record) (*sums, int) {
		s := by[r.text(0)]
		return s, s.index[r.text(1)]
	}
	l.each(`SELECT drafter, seq_id, slot, hits, scored FROM slot_accuracy_by_sequence`+in+` AND slot BETWEEN 1 AND `+longest, func(r record) {
		s, i := at(r)
		k := s.slot(r.int(2))
		k.acc.num[i], k.acc.den[i] = r.float(3), r.float(4)
	})
	l.each(`SELECT drafter, seq_id, slot, anchors, prefix_hits, reached FROM prefix_rate_by_sequence`+in+` AND slot <= `+longest, func(r record) {
		s, i := at(r)
		k := s.slot(r.int(2))
		k.prefix.num[i], k.prefix.den[i] = r.float(4), r.float(3)
		k.cond.num[i], k.cond.den[i] = r.float(4), r.float(5)
	})
	l.each(`SELECT drafter, seq_id, sum_streak, anchors FROM top8_streak_by_sequence`+in, func(r record) {
		s, i := at(r)
		s.streak.num[i], s.streak.den[i] = r.float(2), r.float(3)
	})
	l.each(`SELECT drafter, seq_id, objective, sum, count FROM loss_means_by_sequence`+in, func(r record) {
		s, i := at(r)
		c := s.losses[r.text(2)]
		if c == nil {
			v := newCounted(len(s.seqs))
			c, s.losses[r.text(2)] = &v, &v
		}
		c.num[i], c.den[i] = r.float(3), r.float(4)
	})
	l.each(`SELECT drafter, seq_id, method, budget, rounds, truncated, sum_accepted, accept_len FROM accept_len_by_sequence`+in, func(r record) {
		s, i := at(r)
		key := setting{r.text(2), r.int(3)}
		a := s.accept[key]
		if a == nil {
			a = &acceptSums{micro: newCounted(len(s.seqs)), macro: newCounted(len(s.seqs))}
			s.accept[key] = a
		}
		a.truncated += r.int(5)
		a.micro.num[i], a.micro.den[i] = r.float(6)+r.float(4), r.float(4)
		if r.int(4) > 0 {
			a.macro.num[i], a.macro.den[i] = r.float(7), 1
		}
	})
	return all
}

// details fills in what needs no interval.
func (l *loader) details(run string, drafters []Drafter) {
	in := " WHERE run = " + query.Literal(run)
	by := make(map[string]*Drafter)
	for i := range drafters {
		by[drafters[i].Drafter] = &drafters[i]
	}
	l.each("SELECT drafter, count(*), sum(scored)::BIGINT, count(*) FILTER (capped) FROM blocks"+in+" GROUP BY drafter", func(r record) {
		d := by[r.text(0)]
		d.Anchors, d.Scored, d.Capped = r.int(1), r.int(2), r.int(3)
	})
	// A label that is not in the draft vocabulary has no cross-entropy.
	l.each("SELECT drafter, count(*) FROM slots"+in+" AND NOT hit AND ce IS NULL GROUP BY drafter", func(r record) {
		by[r.text(0)].Outside = r.int(1)
	})
	l.each("SELECT drafter, slot, data_hits FROM slot_accuracy"+in+" AND slot BETWEEN 1 AND "+longest, func(r record) {
		by[r.text(0)].Slots[r.int(1)-1].DataHits = r.int(2)
	})
	l.each("SELECT drafter, objective, weighting, gamma, normaliser, slots, weight, weighted, loss FROM losses"+in+" ORDER BY drafter, recipe", func(r record) {
		d := by[r.text(0)]
		d.Losses = append(d.Losses, Loss{r.text(1), r.text(2), r.maybe(3), r.text(4), r.int(5), r.maybe(6), r.maybe(7), r.maybe(8)})
	})
	l.cost(in, by)
	l.each("SELECT drafter, method, budget, accept_len, rounds, share FROM accept_len_histogram"+in+" AND accept_len BETWEEN 1 AND "+longest+" ORDER BY ALL", func(r record) {
		d := by[r.text(0)]
		for i := range d.Acceptance {
			if a := &d.Acceptance[i]; a.Method == r.text(1) && a.Budget == r.int(2) {
				a.Distribution = append(a.Distribution, Bin{r.int(3), r.int(4), r.float(5)})
				return
			}
		}
		l.err = fmt.Errorf("rounds of %s appeared while reading", d.Drafter)
	})
}
