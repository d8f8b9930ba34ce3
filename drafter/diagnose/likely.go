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

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
)

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
				if e.warm != nil {
					add(warmKL, k, w*e.warm[at+k])
				}
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

// read is [profile.at] of every loss.
func (p profile) read(acc []float64) map[drafter.Objective][]float64 {
	out := map[drafter.Objective][]float64{}
	for o := range p.losses {
		out[o] = p.at(o, acc)
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
func (s *study) likelyObjective(ctx context.Context, f *Finding, name string, steps []Step) error {
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
	if err := s.warm(ctx); err != nil {
		return err
	}
	p = profileOf(s.trained, s.spec.BlockSize, ones)
	spread := s.transfer()
	type fit struct {
		objective
		predicted float64
	}
	var fits []fit
	for _, o := range objectives() {
		c := fit{o, o.value(p.read(acc), p.dpace)}
		if math.Abs(math.Log(c.predicted/logged)) <= spread {
			fits = append(fits, c)
		}
	}
	words, err := s.calibration()
	if err != nil {
		return err
	}
	f.Measure = fmt.Sprintf("mean logged loss of the last %d steps %.3f; from the logged accuracies, each within %.0f %%: ", len(tail), logged, 100*spread)
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
		f.Needs = "losses by slot in the log (slot_loss), or a batch of the training to replay"
		f.Sentence = fmt.Sprintf("Of the objectives that were tried, run %s fits %s alone; its totals do not exclude one that was not.", label(name), fits[0].objective)
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
		losses[o.losses()], norms["the "+normWords[o.norm]], gammas[o.weighting()] = true, true, true
	}
	join := func(m map[string]bool) string { return strings.Join(slices.Sorted(maps.Keys(m)), " or ") }
	return fmt.Sprintf("the loss is %s, weighted with %s, divided by %s", join(losses), join(gammas), join(norms))
}

// warm adds to the engine's slots their KL at temperature 2: half the head
// makes half the logits, of target and drafter.
func (s *study) warm(ctx context.Context) error {
	if s.trained[0].warm != nil {
		return nil
	}
	h := s.Host
	buf, err := s.Device.New(h.Vocab * h.Hidden)
	if err != nil {
		return err
	}
	defer buf.Close()
	half := *s
	half.Host.Head = cuda.Matrix(buf, h.Vocab, h.Hidden)
	vals := make([]float32, h.Vocab*h.Hidden)
	if err := s.Device.Download(vals, h.Head); err != nil {
		return err
	}
	for i := range vals {
		vals[i] /= 2
	}
	if err := s.Device.Upload(half.Host.Head, vals); err != nil {
		return err
	}
	runs, err := half.runEngine(ctx, s.Drafter, cuda.KL, s.shift)
	if err != nil {
		return err
	}
	for i, run := range runs {
		s.trained[i].warm = make([]float64, len(run.slots))
		for j, sl := range run.slots {
			if sl.KL != nil {
				s.trained[i].warm[j] = float64(*sl.KL)
			}
		}
	}
	return nil
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
		o := objective{[]term{{loss: drafter.CE, share: 1}}, 4, drafter.ByWeight}
		e := math.Log(o.value(pa.read(pb.acc), nil) / o.value(pb.losses, nil))
		sum += e * e
	}
	return 3 * math.Sqrt(sum/splits)
}

// calibration says what the drafter's certainty speaks for: trained on argmaxes
// it gives a token the probability that it is the argmax, trained on KL(p‖q)
// the mass that the target itself gives it. It excludes no objective: another
// text moves both, a mixture lies between, and the other divergences reward
// other certainties.
func (s *study) calibration() (string, error) {
	hit, mass := make([]count, len(s.seqs)), make([]count, len(s.seqs))
	final := s.Host.Layers
	for i, q := range s.seqs {
		states := s.states(q, false)[final]
		if states == nil {
			return "The final state is not known: certainty tells nothing.", nil
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
			return "", err
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
		return words + " That speaks against kl_div alone, and proves nothing.", nil
	case within(m) && !within(h):
		return words + " That speaks against ce alone, and proves nothing.", nil
	}
	return words + " That fits both ce and kl_div, or neither.", nil
}
