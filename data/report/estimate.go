package report

import (
	"cmp"
	"context"
	"maps"
	"math"
	"slices"

	"github.com/draftscope/draftscope/schemas"
)

// objectives in the order in which they are reported.
var objectives = []string{"ce", "kl", "rkl", "jsd", "tv", "nla"}

func (c counted) stat() statistic { return ratioOf(c.num, c.den) }

func (c counted) ask(e *Estimate) question {
	return question{stat: c.stat(), support: support(c.den), answer: e}
}

func total(v []float64) int64 { return int64(math.Round(sum(v))) }

// compareSettings puts the chain first, then trees by budget.
func compareSettings(a, b setting) int {
	return cmp.Or(cmp.Compare(b2i(a.method != schemas.MethodChain), b2i(b.method != schemas.MethodChain)),
		cmp.Compare(a.method, b.method), cmp.Compare(a.budget, b.budget))
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// estimate computes every number of a drafter that has an interval.
func (s *sums) estimate(ctx context.Context, opt Options) (Drafter, error) {
	d := Drafter{
		Drafter: s.drafter, Sequences: len(s.seqs),
		Slots: make([]Slot, len(s.slots)), LossMeans: []LossMean{}, Losses: []Loss{}, Acceptance: []Acceptance{},
	}
	var ask []question
	var accs, prefixes []statistic
	for k := range s.slots {
		in, out := &s.slots[k], &d.Slots[k]
		*out = Slot{
			Slot: k + 1, Hits: total(in.acc.num), Scored: total(in.acc.den),
			Anchors: total(in.prefix.den), PrefixHits: total(in.prefix.num), Reached: total(in.cond.den),
		}
		ask = append(ask, in.acc.ask(&out.Accuracy), in.prefix.ask(&out.PrefixRate), in.cond.ask(&out.ConditionalRate))
		accs, prefixes = append(accs, in.acc.stat()), append(prefixes, in.prefix.stat())
	}
	if len(s.slots) > 0 {
		first := support(s.slots[0].acc.den)
		ask = append(ask, question{stat: sumOfProducts(accs), support: first, answer: &d.EAL},
			question{stat: sumOf(prefixes), support: first, answer: &d.ExpectedAccepted},
			s.streak.ask(&d.Top8Streak))
	}
	for _, o := range objectives {
		if c := s.losses[o]; c != nil {
			d.LossMeans = append(d.LossMeans, LossMean{Objective: o, Count: total(c.den), Sum: number(sum(c.num))})
		}
	}
	for i := range d.LossMeans {
		ask = append(ask, s.losses[d.LossMeans[i].Objective].ask(&d.LossMeans[i].Mean))
	}
	for _, key := range slices.SortedFunc(maps.Keys(s.accept), compareSettings) {
		a := s.accept[key]
		rounds := total(a.micro.den)
		d.Acceptance = append(d.Acceptance, Acceptance{
			Method: key.method, Budget: key.budget, Sequences: total(a.macro.den), Rounds: rounds,
			Truncated: a.truncated, SumAccepted: total(a.micro.num) - rounds, Distribution: []Bin{},
		})
	}
	for i := range d.Acceptance {
		out := &d.Acceptance[i]
		a := s.accept[setting{out.Method, out.Budget}]
		ask = append(ask, a.macro.ask(&out.AcceptLenMacro), a.micro.ask(&out.AcceptLenMicro))
	}
	if err := bootstrap(ctx, len(s.seqs), opt, ask); err != nil {
		return d, err
	}
	for i := range d.Acceptance {
		a := &d.Acceptance[i]
		a.AcceptedMacro, a.AcceptedMicro = withoutBonus(a.AcceptLenMacro), withoutBonus(a.AcceptLenMicro)
	}
	return d, nil
}

func sum(v []float64) float64 {
	var s float64
	for _, x := range v {
		s += x
	}
	return s
}

// withoutBonus takes the bonus token off: one a round.
func withoutBonus(e Estimate) Estimate {
	less := func(v *float64) *float64 {
		if v == nil {
			return nil
		}
		return number(*v - 1)
	}
	return Estimate{less(e.Value), less(e.Low), less(e.High)}
}
