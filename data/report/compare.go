package report

import (
	"context"
	"maps"
	"slices"

	"github.com/draftscope/draftscope/schemas"
)

// allPairs is how many drafters are compared each with each. Of more, every
// one is compared with the best alone.
const allPairs = 6

// comparePairs compares drafters over shared sequences, the better one (by
// [primary]) first.
func comparePairs(ctx context.Context, all []*sums, drafters []Drafter, opt Options) ([]Pair, error) {
	order := ranking(drafters)
	pairs := []Pair{}
	for i, a := range order {
		if i > 0 && len(order) > allPairs {
			break
		}
		for _, b := range order[i+1:] {
			p, err := compare(ctx, all[a], all[b], opt)
			if err != nil {
				return nil, err
			}
			if p.Sequences > 0 {
				pairs = append(pairs, p)
			}
		}
	}
	return pairs, nil
}

// primary is the number that ranks drafters: tokens a round by the first
// setting that a drafter has (the chain, or the smallest tree), else its
// accuracy at slot 1.
func primary(d Drafter) *float64 {
	for _, a := range d.Acceptance {
		if a.AcceptLenMacro.Value != nil {
			return a.AcceptLenMacro.Value
		}
	}
	if len(d.Slots) > 0 {
		return d.Slots[0].Accuracy.Value
	}
	return nil
}

// ranking gives indexes of drafters, the best first; those without any number
// come last, equals by name.
func ranking(drafters []Drafter) []int {
	order := make([]int, len(drafters))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int {
		a, b := primary(drafters[i]), primary(drafters[j])
		switch {
		case a == nil || b == nil:
			return b2i(a == nil) - b2i(b == nil)
		case *a > *b:
			return -1
		case *a < *b:
			return 1
		}
		return 0
	})
	return order
}

// pick takes the elements of v at the places in at.
func (c counted) pick(at []int) counted {
	out := newCounted(len(at))
	for i, j := range at {
		out.num[i], out.den[i] = c.num[j], c.den[j]
	}
	return out
}

func compare(ctx context.Context, a, b *sums, opt Options) (Pair, error) {
	p := Pair{A: a.drafter, B: b.drafter, Acceptance: []Difference{}, Slots: []Difference{}}
	var inA, inB []int
	for i, seq := range a.seqs {
		if j, ok := b.index[seq]; ok {
			inA, inB = append(inA, i), append(inB, j)
		}
	}
	if p.Sequences = len(inA); p.Sequences == 0 {
		return p, nil
	}
	type both struct{ a, b counted }
	var sides []both
	for _, m := range matching(a, b) {
		sides = append(sides, both{a.accept[m.a].macro.pick(inA), b.accept[m.b].macro.pick(inB)})
		d := Difference{Metric: "accept_len_macro", Method: m.a.method, Budget: m.a.budget}
		if m.a != m.b {
			d.Budget = 0
		}
		p.Acceptance = append(p.Acceptance, d)
	}
	for k := range min(len(a.slots), len(b.slots)) {
		sides = append(sides, both{a.slots[k].acc.pick(inA), b.slots[k].acc.pick(inB)})
		p.Slots = append(p.Slots, Difference{Metric: "slot_accuracy", Slot: k + 1})
	}
	var ask []question
	values := make([][2]Estimate, len(sides))
	for i, s := range sides {
		d := p.difference(i)
		// A sequence that only one side can count would bias the pairing.
		for j := range s.a.den {
			if s.a.den[j] <= 0 || s.b.den[j] <= 0 {
				s.a.num[j], s.a.den[j], s.b.num[j], s.b.den[j] = 0, 0, 0, 0
				continue
			}
			d.score(s.a.num[j]/s.a.den[j], s.b.num[j]/s.b.den[j])
		}
		ask = append(ask,
			question{stat: minus(s.a.stat(), s.b.stat()), support: support(s.a.den, s.b.den), answer: &d.Difference, paired: true},
			question{stat: s.a.stat(), answer: &values[i][0]}, question{stat: s.b.stat(), answer: &values[i][1]})
	}
	if err := bootstrap(ctx, len(inA), opt, ask); err != nil {
		return p, err
	}
	for i := range sides {
		d := p.difference(i)
		d.A, d.B = values[i][0].Value, values[i][1].Value
	}
	return p, nil
}

type match struct{ a, b setting }

// matching gives the settings that a and b share. The chains of two block
// sizes differ in budget, and are compared all the same when each drafter has
// but one.
func matching(a, b *sums) []match {
	var out []match
	chains := func(s *sums) (keys []setting) {
		for key := range s.accept {
			if key.method == schemas.MethodChain {
				keys = append(keys, key)
			}
		}
		return keys
	}
	if x, y := chains(a), chains(b); len(x) == 1 && len(y) == 1 && x[0] != y[0] {
		out = append(out, match{x[0], y[0]})
	}
	for _, key := range slices.SortedFunc(maps.Keys(a.accept), compareSettings) {
		if b.accept[key] != nil {
			out = append(out, match{key, key})
		}
	}
	return out
}

// difference is the i-th of both lists, acceptance first.
func (p *Pair) difference(i int) *Difference {
	if i < len(p.Acceptance) {
		return &p.Acceptance[i]
	}
	return &p.Slots[i-len(p.Acceptance)]
}
