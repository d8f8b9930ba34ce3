package diagnose

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
)

// objective is one way to turn slots into a loss.
type objective struct {
	loss  drafter.Objective
	gamma float64 // 0 is plain; negative is D-PACE
	norm  drafter.Normaliser
}

func (o objective) String() string {
	weighting := fmt.Sprintf("γ = %g", o.gamma)
	switch {
	case o.gamma == 0:
		weighting = "no decay"
	case o.gamma < 0:
		weighting = "D-PACE"
	}
	return fmt.Sprintf("%s, %s, divided by the %s", o.loss, weighting, map[drafter.Normaliser]string{drafter.ByWeight: "weights", drafter.ByCount: "count"}[o.norm])
}

// dpaceGamma marks D-PACE among the decays.
const dpaceGamma = -1

// objectives are those of the published trainers.
func objectives() []objective {
	var out []objective
	for _, loss := range []drafter.Objective{drafter.CE, drafter.KLDiv, drafter.RKLDiv, drafter.JSDiv, drafter.TVDist, drafter.NLA} {
		for _, gamma := range []float64{0, 4, 5, 7, 10, dpaceGamma} {
			for _, norm := range []drafter.Normaliser{drafter.ByWeight, drafter.ByCount} {
				if gamma == 0 && norm == drafter.ByCount {
					continue // the same number as by weight
				}
				out = append(out, objective{loss, gamma, norm})
			}
		}
	}
	return out
}

// weights are the slots' weights, slot 1 first. dpace are the mean weights of
// D-PACE on these blocks.
func (o objective) weights(slots int, dpace []float64) []float64 {
	if o.gamma < 0 {
		return dpace
	}
	return drafter.DecayWeights(slots+1, o.gamma)[1:]
}

// value is the loss of given per-slot means.
func (o objective) value(losses, dpace []float64) float64 {
	var sum, weights float64
	for k, w := range o.weights(len(losses), dpace) {
		sum += w * losses[k]
		weights += w
	}
	if o.norm == drafter.ByCount {
		return sum / float64(len(losses))
	}
	return sum / weights
}

// probeLog says which objective made a logged run, and what its metrics are.
func probeLog(_ context.Context, s *study, r *Report) error {
	f := Finding{Key: keyObjective, Subject: OfTraining, Hypothesis: "which objective the run was trained with", Note: true, Verdict: CannotTell, weight: 1}
	name, steps := s.logged()
	switch {
	case s.Log == nil:
		f.Needs, f.Sentence = "--train-log", "No training log was given."
	case steps == nil:
		f.Needs = "--log-run, one of " + strings.Join(slices.Sorted(maps.Keys(s.Log.Runs)), ", ")
		f.Sentence = fmt.Sprintf("The log has no run of the name %s.", s.Drafter.Name)
	default:
		r.Findings = append(r.Findings, logMetric(name, steps))
		if !exactObjective(&f, steps) {
			if err := s.likelyObjective(&f, name, steps); err != nil {
				return err
			}
		}
	}
	r.Findings = append(r.Findings, f)
	return nil
}

// logMetric recognises what the log calls eal.
func logMetric(name string, steps []Step) Finding {
	f := Finding{Key: "log-metric", Subject: OfTraining, Hypothesis: "which acceptance the log shows", Note: true, Verdict: CannotTell, Needs: "acc and eal in the log", Sentence: "The log shows no acceptance."}
	var off, offBonus float64
	n := 0
	for _, st := range steps {
		if st.EAL == nil || len(st.Acc) == 0 {
			continue
		}
		n++
		off = math.Max(off, math.Abs(drafter.EAL(st.Acc)-*st.EAL))
		offBonus = math.Max(offBonus, math.Abs(drafter.EAL(st.Acc)+1-*st.EAL))
	}
	if n == 0 {
		return f
	}
	// Accuracies may be logged to four digits.
	const digits = 5e-3
	f.Needs = ""
	f.Measure = fmt.Sprintf("largest difference of the logged value over %d steps: %.2g to Σ_k Π acc, %.2g to the same with a bonus token", n, off, offBonus)
	switch {
	case off < digits:
		f.Verdict = Confirmed
		f.Sentence = fmt.Sprintf("The log's eal of run %s is Σ_k Π_{i≤k} acc_i: slots taken for independent, no bonus. A served acceptance length counts the bonus: add 1 before comparing, and expect more, since hits cluster.", label(name))
	case offBonus < digits:
		f.Verdict = Confirmed
		f.Sentence = fmt.Sprintf("The log's eal of run %s counts the bonus token: it is 1 + Σ_k Π acc_i.", label(name))
	default:
		f.Needs = "the formula of the logged value"
		f.Sentence = "The logged eal is neither Σ_k Π acc nor that with a bonus token."
	}
	return f
}

// exactObjective replays logged losses from logged losses by slot, to 1e-3.
func exactObjective(f *Finding, steps []Step) bool {
	const relative = 1e-3
	var fits []objective
	n := 0
	for _, o := range objectives() {
		worst, used := 0.0, 0
		for _, st := range steps {
			losses := st.Slots[string(o.loss)]
			if o.gamma < 0 || len(losses) == 0 || st.Loss == 0 {
				continue
			}
			used++
			worst = math.Max(worst, math.Abs(o.value(losses, nil)/st.Loss-1))
		}
		if used > 0 && worst < relative {
			fits, n = append(fits, o), used
		}
	}
	if n == 0 {
		return false
	}
	f.Measure = fmt.Sprintf("logged losses by slot give the logged loss of %d steps to %g by: %s", n, relative, objectiveList(fits))
	if len(fits) == 1 {
		f.Verdict, f.Sentence = Confirmed, fmt.Sprintf("The objective is %s: it gives every logged loss.", fits[0])
	} else {
		f.Needs, f.Sentence = "steps at which these differ", fmt.Sprintf("More than one objective fits: %s.", objectiveList(fits))
	}
	return true
}

func objectiveList(os []objective) string {
	var words []string
	for _, o := range os {
		words = append(words, o.String())
	}
	return strings.Join(words, "; ")
}

// profile are a drafter's mean losses by slot, over some sequences.
type profile struct {
	acc    []float64
	losses map[drafter.Objective][]float64
	dpace  []float64
}

// profileOf averages the engine's slots with weights on the sequences.
func profileOf(runs []engineRun, block int, weight []float64) profile {
	p := profile{acc: make([]float64, block-1), losses: map[drafter.Objective][]float64{}, dpace: make([]float64, block-1)}
	n := make([]float64, block-1)
	add := func(o drafter.Objective, k int, v float64) {
		if p.losses[o] == nil {
			p.losses[o] = make([]float64, block-1)
		}
		p.losses[o][k] += v
	}
	for i, e := range runs {
		w := weight[i]
		for at := 0; w > 0 && at+block-1 <= len(e.slots); at += block - 1 {
			blk := e.slots[at : at+block-1]
			ce, mask := make([]float64, block), make([]bool, block)
			for k, sl := range blk {
				if sl.Hit == nil || sl.KL == nil {
					continue
				}
				n[k] += w
				if *sl.Hit {
					p.acc[k] += w
				}
				ce[k+1], mask[k+1] = float64(*sl.CE), true
				add(drafter.CE, k, w*float64(*sl.CE))
				add(drafter.KLDiv, k, w*float64(*sl.KL))
				add(drafter.RKLDiv, k, w*float64(*sl.RKL))
				add(drafter.JSDiv, k, w*float64(*sl.JSD))
				add(drafter.TVDist, k, w*float64(*sl.TV))
				add(drafter.NLA, k, -w*math.Log(math.Max(1-float64(*sl.TV), 1e-5)))
			}
			for k, d := range drafter.DPaceWeights(ce, mask)[1:] {
				p.dpace[k] += w * d
			}
		}
	}
	for k, c := range n {
		if c == 0 {
			continue
		}
		p.acc[k] /= c
		p.dpace[k] /= c
		for _, l := range p.losses {
			l[k] /= c
		}
	}
	return p
}

// at reads a loss off the relation of accuracy and loss that this drafter's
// slots have, for given accuracies: linear between slots, and beyond them as
// between the last two.
func (p profile) at(o drafter.Objective, acc []float64) []float64 {
	type point struct{ acc, loss float64 }
	var ps []point
	for k := range p.acc {
		ps = append(ps, point{p.acc[k], p.losses[o][k]})
	}
	slices.SortFunc(ps, func(a, b point) int { return cmp.Compare(a.acc, b.acc) })
	out := make([]float64, len(acc))
	for k, a := range acc {
		i := 1
		for i < len(ps)-1 && ps[i].acc < a {
			i++
		}
		lo, hi := ps[i-1], ps[i]
		if hi.acc-lo.acc < 1e-3 {
			out[k] = (lo.loss + hi.loss) / 2
			continue
		}
		x := min(max((a-lo.acc)/(hi.acc-lo.acc), -1), 2)
		out[k] = lo.loss + x*(hi.loss-lo.loss)
	}
	return out
}

// lastSteps is the tail of a run that its drafter stands for: a twentieth, at
// least three steps.
func lastSteps(steps []Step) []Step {
	return steps[max(0, len(steps)-max(3, len(steps)/20)):]
}

// likelyObjective predicts the logged loss at the run's end under every
// objective, from the logged accuracies and the relation of accuracy and loss
// that the drafter's slots show here. What predictions within the relation's
// own uncertainty leave is what the log fits.
func (s *study) likelyObjective(f *Finding, name string, steps []Step) error {
	tail := lastSteps(steps)
	slots := s.spec.BlockSize - 1
	acc := make([]float64, slots)
	logged := 0.0
	for _, st := range tail {
		if len(st.Acc) != slots {
			f.Needs, f.Sentence = "accuracies by slot in the log", "The log has no accuracies by slot."
			return nil
		}
		for k, v := range st.Acc {
			acc[k] += v / float64(len(tail))
		}
		logged += st.Loss / float64(len(tail))
	}
	ones := slices.Repeat([]float64{1}, len(s.trained))
	p := profileOf(s.trained, s.spec.BlockSize, ones)
	if p.losses[drafter.CE] == nil {
		f.Needs, f.Sentence = "the target's final state", "Losses cannot be computed without the target's distribution."
		return nil
	}
	spread := s.transfer()
	type fit struct {
		objective
		predicted float64
	}
	var fits []fit
	for _, o := range objectives() {
		c := fit{o, o.value(p.at(o.loss, acc), p.dpace)}
		if math.Abs(math.Log(c.predicted/logged)) <= spread {
			fits = append(fits, c)
		}
	}
	kind, words, err := s.calibration()
	if err != nil {
		return err
	}
	f.Measure = fmt.Sprintf("mean logged loss of the last %d steps %.3f; from the logged accuracies, each within %.0f %%: ", len(tail), logged, 100*spread)
	if kind != "" {
		fits = slices.DeleteFunc(fits, func(c fit) bool {
			return c.loss != kind
		})
	}
	slices.SortStableFunc(fits, func(a, b fit) int {
		return cmp.Compare(math.Abs(math.Log(a.predicted/logged)), math.Abs(math.Log(b.predicted/logged)))
	})
	var list []string
	for _, c := range fits {
		list = append(list, fmt.Sprintf("%s %.3f", c.objective, c.predicted))
	}
	f.Measure += strings.Join(list, "; ") + ". " + words
	switch len(fits) {
	case 0:
		f.Sentence = fmt.Sprintf("No published objective gives the loss that run %s logged at its accuracies.", label(name))
		f.Needs = "the training code, or losses by slot in the log (slot_loss)"
	case 1:
		f.Verdict = Supported
		f.Sentence = fmt.Sprintf("Run %s was trained with %s.", label(name), fits[0].objective)
	default:
		f.Needs = "losses by slot in the log (slot_loss), or a batch of the training to replay"
		f.Sentence = fmt.Sprintf("Of run %s: %s; cannot tell which of %d objectives that fit.", label(name), common(len(fits), func(i int) objective { return fits[i].objective }), len(fits))
	}
	return nil
}

// common says what some objectives share.
func common(n int, at func(int) objective) string {
	losses, norms, gammas := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for i := range n {
		o := at(i)
		losses[string(o.loss)] = true
		norms[map[drafter.Normaliser]string{drafter.ByWeight: "the weights", drafter.ByCount: "the count"}[o.norm]] = true
		switch {
		case o.gamma == 0:
			gammas["no decay"] = true
		case o.gamma < 0:
			gammas["D-PACE"] = true
		default:
			gammas[fmt.Sprintf("γ = %g", o.gamma)] = true
		}
	}
	join := func(m map[string]bool) string { return strings.Join(slices.Sorted(maps.Keys(m)), " or ") }
	return fmt.Sprintf("the loss is %s, weighted with %s, divided by %s", join(losses), join(gammas), join(norms))
}

// transfer is how far the relation of accuracy and loss moves between texts:
// read off one half of the sequences, it predicts the losses of the other.
// Three times the mean square of the error bounds what another text may do.
func (s *study) transfer() float64 {
	rng := rand.New(rand.NewPCG(3, uint64(len(s.trained))))
	var sum float64
	const splits = 20
	for range splits {
		a, b := make([]float64, len(s.trained)), make([]float64, len(s.trained))
		for i, at := range rng.Perm(len(s.trained)) {
			if i%2 == 0 {
				a[at] = 1
			} else {
				b[at] = 1
			}
		}
		pa, pb := profileOf(s.trained, s.spec.BlockSize, a), profileOf(s.trained, s.spec.BlockSize, b)
		if pa.losses[drafter.CE] == nil || pb.losses[drafter.CE] == nil {
			return math.Inf(1)
		}
		o := objective{drafter.CE, 4, drafter.ByWeight}
		e := math.Log(o.value(pa.at(drafter.CE, pb.acc), nil) / o.value(pb.losses[drafter.CE], nil))
		sum += e * e
	}
	return 3 * math.Sqrt(sum/splits)
}

// calibration tells cross-entropy on the target's argmax from divergences of
// its whole distribution by what the drafter is sure of: trained on argmaxes
// it gives a token the probability that it is the argmax, trained on
// distributions the mass that the target itself gives it.
func (s *study) calibration() (drafter.Objective, string, error) {
	hit, mass := make([]count, len(s.seqs)), make([]count, len(s.seqs))
	final := s.Host.Layers
	for i, q := range s.seqs {
		states := s.states(q, false)[final]
		if states == nil {
			return "", "The final state is not known: cross-entropy and divergences cannot be told apart.", nil
		}
		var rows []float32
		var next []int32
		var slots []schemas.Slot
		for _, sl := range s.trained[i].slots {
			at := int(sl.Anchor+sl.Slot) - 1 + s.shift
			if sl.Hit == nil || sl.Slot > 3 || at < 0 || at >= len(q.ids) || !slices.Contains(q.sample, sl.Anchor) {
				continue
			}
			rows = append(rows, states[at*s.Host.Hidden:(at+1)*s.Host.Hidden]...)
			next = append(next, sl.DraftToken)
			slots = append(slots, sl)
		}
		if len(next) == 0 {
			continue
		}
		_, logprob, err := s.answers(rows, next)
		if err != nil {
			return "", "", err
		}
		for j, sl := range slots {
			sure := math.Exp(float64(sl.DraftLogprob))
			was := 0.0
			if *sl.Hit {
				was = 1
			}
			hit[i].hits += sure - was
			hit[i].scored++
			mass[i].hits += sure - math.Exp(float64(logprob[j]))
			mass[i].scored++
		}
	}
	h, m := rateOf(hit), rateOf(mass)
	words := fmt.Sprintf("In slots 1–3 the drafter's confidence less its hits is %s; less the target's mass of its drafts %s.", h.signed(), m.signed())
	within := func(i Interval) bool { return i.Low <= 0 && i.High >= 0 }
	switch {
	case within(h) && !within(m):
		return drafter.CE, words + " That is a cross-entropy on argmaxes.", nil
	case within(m) && !within(h):
		return drafter.KLDiv, words + " That is a divergence of distributions.", nil
	}
	return "", words + " That fits both a cross-entropy and a divergence, or neither.", nil
}
