package diagnose

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/gonum/mat"

	"github.com/draftscope/draftscope/drafter"
)

// A logged loss is given by an objective when it agrees at every step: to
// finely, which is what single precision keeps over a batch, or, where nothing
// does, to roughly, which is what a log of four digits keeps. A sum whose
// factors are fitted must agree to the last digits of single precision: the
// losses of a run fall together, so that a wrong sum comes near.
const (
	finely  = 2e-5
	fitting = 2e-6
	roughly = 1e-3
)

// spareSteps is how many steps a fit must explain beyond its own numbers.
const spareSteps = 3

// mostTerms bounds the losses of a sum that is looked for.
const mostTerms = 3

// detailed are the steps that log a loss and what it is made of.
func detailed(steps []Step) []Step {
	var out []Step
	for _, st := range steps {
		if st.Loss != 0 && len(st.Slots) > 0 {
			out = append(out, st)
		}
	}
	return out
}

// names are the losses that every one of these steps logs by slot.
func names(steps []Step) []drafter.Objective {
	seen := map[string]int{}
	for _, st := range steps {
		for name := range st.Slots {
			seen[name]++
		}
	}
	var out []drafter.Objective
	for name, n := range seen {
		if n == len(steps) {
			out = append(out, drafter.Objective(name))
		}
	}
	slices.Sort(out)
	return out
}

// loss is one term of a logged step, weighted and divided by norm; NaN where
// the step does not log what that takes. Only D-PACE needs the blocks: their
// means and counts by slot give every fixed weight.
func (st Step) loss(name drafter.Objective, gamma float64, norm drafter.Normaliser) float64 {
	if gamma < 0 {
		return dpaceLoss(st.Blocks[string(name)], st.Blocks[string(drafter.CE)], norm)
	}
	losses := st.Slots[string(name)]
	if losses == nil {
		return math.NaN()
	}
	return weightedMean(losses, drafter.DecayWeights(len(losses)+1, gamma)[1:], st.Counts, norm)
}

// dpaceLoss is [drafter.Loss] of rows without slot 0, NaN where a slot does
// not count. A batch is of one sequence.
func dpaceLoss(rows, ce [][]float64, norm drafter.Normaliser) float64 {
	whole := func(rows [][]float64) [][]float64 {
		var out [][]float64
		for _, row := range rows {
			out = append(out, append([]float64{0}, row...))
		}
		return out
	}
	mask := make([][]bool, len(rows))
	for b, row := range rows {
		mask[b] = make([]bool, len(row)+1)
		for k, l := range row {
			mask[b][k+1] = !math.IsNaN(l)
		}
	}
	v, err := drafter.Loss(whole(rows), whole(ce), mask, drafter.LossOptions{Weighting: drafter.DPace, Normaliser: norm})
	if err != nil {
		return math.NaN()
	}
	return v
}

// of is the objective's loss of a logged step; NaN where the log has not what
// it takes.
func (o objective) of(st Step) float64 {
	var sum float64
	for _, t := range o.terms {
		sum += t.factor() * st.loss(t.loss, o.gamma, o.norm)
	}
	return sum
}

// miss is the largest relative difference of the objective to the logged
// losses; infinite where they cannot be compared.
func (o objective) miss(steps []Step) float64 {
	if o.norm == drafter.ByBatch {
		return o.missByBatch(steps)
	}
	worst := 0.0
	for _, st := range steps {
		d := math.Abs(o.of(st)/st.Loss - 1)
		if math.IsNaN(d) {
			return math.Inf(1)
		}
		worst = math.Max(worst, d)
	}
	return worst
}

// missByBatch is [objective.miss] up to one number of sequences, which the log
// does not say.
func (o objective) missByBatch(steps []Step) float64 {
	size := math.Round(o.of(steps[0]) / steps[0].Loss)
	if !(size >= 1 && size <= float64(len(steps[0].Blocks[string(o.terms[0].loss)]))) {
		return math.Inf(1)
	}
	worst := 0.0
	for _, st := range steps {
		d := math.Abs(o.of(st)/(size*st.Loss) - 1)
		if math.IsNaN(d) {
			return math.Inf(1)
		}
		worst = math.Max(worst, d)
	}
	return worst
}

// exactObjective replays logged losses from the losses by slot or by block
// that are logged beside them. The published objectives are tried first, then
// any sum of the logged losses under any decay, then the weight of each slot
// alone.
func exactObjective(f *Finding, steps []Step) bool {
	steps = detailed(steps)
	if len(steps) == 0 {
		return false
	}
	f.Control = "each published objective is planted in a log and found, and a decay that is off by a tenth is not taken for it"
	published := func(limit float64) []objective {
		var fits []objective
		for _, o := range slices.Concat(objectives(), batchDPace()) {
			if o.miss(steps) < limit {
				fits = append(fits, o)
			}
		}
		return fits
	}
	if fits := published(finely); len(fits) > 0 {
		f.named(fits, finely, len(steps))
		return true
	}
	if free := freeFits(steps); len(free) > 0 {
		f.fitted(free, steps)
		return true
	}
	if fits := published(roughly); len(fits) > 0 {
		f.named(fits, roughly, len(steps))
		return true
	}
	return slotWeights(f, steps)
}

// batchDPace are the objectives that are divided by the number of sequences.
func batchDPace() []objective {
	return []objective{{[]term{{loss: drafter.CE, share: 1}}, dpaceGamma, drafter.ByBatch}}
}

// named fills in a finding from published objectives that give every step.
func (f *Finding) named(fits []objective, limit float64, steps int) {
	f.Measure = fmt.Sprintf("logged losses by slot give the logged loss of %d steps to %g by: %s", steps, limit, objectiveList(fits))
	if len(fits) == 1 {
		f.Verdict, f.Sentence = Confirmed, fmt.Sprintf("The objective is %s: it gives every logged loss.", fits[0])
		return
	}
	f.Needs, f.Sentence = "steps at which these differ", fmt.Sprintf("More than one objective fits: %s.", objectiveList(fits))
}

// freeFit is a sum of losses under one decay, with factors as fitted.
type freeFit struct {
	losses  []drafter.Objective
	factors []float64
	gamma   float64
	norm    drafter.Normaliser
	miss    float64
}

// freeFits looks for the smallest sums of logged losses that give every step,
// under any decay. Equal counts for every slot leave the normaliser
// in the factors; it is then tried by weight alone.
func freeFits(steps []Step) []freeFit {
	norms := []drafter.Normaliser{drafter.ByWeight}
	if slices.ContainsFunc(steps, func(st Step) bool { return uneven(st.Counts) }) {
		norms = append(norms, drafter.ByCount)
	}
	var out []freeFit
	have := names(steps)
	for size := 1; size <= mostTerms && len(out) == 0 && len(steps) >= size+1+spareSteps; size++ {
		for _, pick := range subsets(have, size) {
			for _, norm := range norms {
				if fit := fitDecay(steps, pick, norm); fit.miss < fitting && slices.Min(fit.factors) > 0 {
					out = append(out, fit)
				}
			}
		}
	}
	return out
}

func uneven(counts []float64) bool {
	return slices.ContainsFunc(counts, func(n float64) bool { return n != counts[0] })
}

// subsets are all choices of size names.
func subsets(of []drafter.Objective, size int) [][]drafter.Objective {
	if size == 0 {
		return [][]drafter.Objective{nil}
	}
	var out [][]drafter.Objective
	for i := range of {
		for _, rest := range subsets(of[i+1:], size-1) {
			out = append(out, append([]drafter.Objective{of[i]}, rest...))
		}
	}
	return out
}

// The decays that are tried are between these; beyond, a block of any size
// has one slot that counts, or all alike.
const leastGamma, mostGamma = 0.3, 1000

// fitDecay is the best γ and factors of a sum.
func fitDecay(steps []Step, losses []drafter.Objective, norm drafter.Normaliser) freeFit {
	at := func(gamma float64) freeFit { return fitFactors(steps, losses, gamma, norm, nil) }
	const grid = 48
	ratio := math.Pow(mostGamma/leastGamma, 1.0/(grid-1))
	fits := make([]freeFit, grid)
	for i := range fits {
		fits[i] = at(leastGamma * math.Pow(ratio, float64(i)))
	}
	best := at(0) // no decay
	for i := 1; i < grid-1; i++ {
		if fits[i].miss > min(fits[i-1].miss, fits[i+1].miss) {
			continue
		}
		if fit := refined(at, fits[i].gamma/ratio, fits[i].gamma*ratio); fit.miss < best.miss {
			best = fit
		}
	}
	return best
}

// refined is the least miss between two decays, by the golden section of
// their logarithms.
func refined(at func(gamma float64) freeFit, low, high float64) freeFit {
	const golden = 0.6180339887498949
	lo, hi := math.Log(low), math.Log(high)
	best := at(low)
	for range 50 {
		a, b := at(math.Exp(hi-golden*(hi-lo))), at(math.Exp(lo+golden*(hi-lo)))
		if a.miss < b.miss {
			hi = math.Log(b.gamma)
		} else {
			lo, a = math.Log(a.gamma), b
		}
		if a.miss < best.miss {
			best = a
		}
	}
	return best
}

// fitFactors are the best factors under one decay, by least squares of the
// relative errors. often weighs the steps; nil is once each. miss is infinite
// where a step does not log a loss; it is the largest relative error else.
func fitFactors(steps []Step, losses []drafter.Objective, gamma float64, norm drafter.Normaliser, often []float64) freeFit {
	fit := freeFit{losses: losses, gamma: gamma, norm: norm, miss: math.Inf(1)}
	a := mat.NewDense(len(steps), len(losses), nil)
	x := mat.NewDense(len(steps), len(losses), nil)
	y := mat.NewVecDense(len(steps), nil)
	for i, st := range steps {
		w := 1.0
		if often != nil {
			w = math.Sqrt(often[i])
		}
		for j, name := range losses {
			v := st.loss(name, gamma, norm) / st.Loss
			if math.IsNaN(v) {
				return fit
			}
			a.Set(i, j, v)
			x.Set(i, j, w*v)
		}
		y.SetVec(i, w)
	}
	var c mat.VecDense
	if err := c.SolveVec(x, y); err != nil && !errors.As(err, new(mat.Condition)) {
		return fit
	}
	for j := range losses {
		fit.factors = append(fit.factors, c.AtVec(j))
	}
	fit.miss = 0
	for i := range steps {
		var v float64
		for j, factor := range fit.factors {
			v += factor * a.At(i, j)
		}
		if often == nil || often[i] > 0 {
			fit.miss = math.Max(fit.miss, math.Abs(v-1))
		}
	}
	return fit
}

// readings are the objectives that a fit may be: with either normaliser, and
// with T² or without, those whose shares sum to one.
func (fit freeFit) readings(slots int) (whole, all []objective) {
	scales := map[drafter.Normaliser]float64{fit.norm: 1}
	if fit.norm == drafter.ByWeight {
		var sum float64
		for _, w := range drafter.DecayWeights(slots+1, fit.gamma) {
			sum += w
		}
		scales[drafter.ByCount] = float64(slots) / sum
		if fit.gamma == 0 {
			delete(scales, drafter.ByCount)
		}
	}
	warm := slices.ContainsFunc(fit.losses, func(l drafter.Objective) bool { return temperature(l) != 1 })
	for _, norm := range []drafter.Normaliser{drafter.ByWeight, drafter.ByCount} {
		scale, ok := scales[norm]
		if !ok {
			continue
		}
		for _, rescaled := range []bool{false, true} {
			if rescaled && !warm {
				continue
			}
			o := objective{gamma: fit.gamma, norm: norm}
			var sum float64
			for j, loss := range fit.losses {
				t := term{loss: loss, share: 1, rescaled: rescaled && temperature(loss) != 1}
				t.share = scale * fit.factors[j] / t.factor()
				sum += t.share
				o.terms = append(o.terms, t)
			}
			all = append(all, o)
			if math.Abs(sum-1) < 5*roughly {
				whole = append(whole, o)
			}
		}
	}
	return whole, all
}

// fitted fills in a finding from sums of losses that give every step.
func (f *Finding) fitted(fits []freeFit, steps []Step) {
	var whole, all []objective
	for _, fit := range fits {
		w, a := fit.readings(len(steps[0].Slots[string(fit.losses[0])]))
		whole, all = append(whole, w...), append(all, a...)
	}
	best := fits[0]
	if best.gamma > 0 {
		gamma := bootstrap(len(steps), func(often []float64) float64 {
			return fitDecayNear(steps, best, often)
		})
		f.Effect = &gamma
	}
	f.Measure = fmt.Sprintf("logged losses by slot give the logged loss of %d steps to %.1g by a sum whose factors and decay are regressed: log of a slot's weight against the slot has the slope %s", len(steps), best.miss, best.slope(f.Effect))
	double := best.double(steps)
	switch {
	case double != "":
		f.Needs = "losses by slot of more steps: in these " + double + " is a sum of the others"
		f.Sentence = fmt.Sprintf("The logged loss is %s, or another sum that fits as well.", objectiveList(all))
	case len(whole) == 1:
		f.Verdict, f.Sentence = Confirmed, fmt.Sprintf("The objective is %s: it gives every logged loss.", whole[0])
	case len(whole) > 1:
		f.Needs, f.Sentence = "steps at which these differ, or counts by slot (slot_count)", fmt.Sprintf("More than one objective fits: %s.", objectiveList(whole))
	default:
		f.Needs = "counts by slot in the log (slot_count), which tell the normaliser, or the training code"
		f.Sentence = fmt.Sprintf("The decay and the losses are known, the normaliser is not: the shares sum to one by none. The objective is one of: %s.", objectiveList(all))
	}
}

// double is a logged loss that the fitted ones give nearly as well as the sum:
// then it may stand in their place. Empty where there is none.
func (fit freeFit) double(steps []Step) string {
	const near = 100 * fitting
	for _, name := range names(steps) {
		if slices.Contains(fit.losses, name) {
			continue
		}
		other := slices.Clone(steps)
		for i, st := range steps {
			other[i].Loss = st.loss(name, fit.gamma, fit.norm)
		}
		if fitFactors(other, fit.losses, fit.gamma, fit.norm, nil).miss < near {
			return string(name)
		}
	}
	return ""
}

// slope says −1/γ, with the interval of γ.
func (fit freeFit) slope(gamma *Interval) string {
	if gamma == nil {
		return "0: no decay"
	}
	return fmt.Sprintf("%.4g, γ = %.4g (95 %% %.4g to %.4g over steps)", -1/fit.gamma, fit.gamma, gamma.Low, gamma.High)
}

// fitDecayNear is the best γ near a fit's, for steps that are drawn again: a
// parabola through three values of the squared error.
func fitDecayNear(steps []Step, fit freeFit, often []float64) float64 {
	const width = 0.001
	square := func(gamma float64) float64 {
		one := fitFactors(steps, fit.losses, gamma, fit.norm, often)
		var sum float64
		for i, st := range steps {
			var v float64
			for j, factor := range one.factors {
				v += factor * st.loss(fit.losses[j], gamma, fit.norm) / st.Loss
			}
			sum += often[i] * (v - 1) * (v - 1)
		}
		return sum
	}
	below, at, above := square(fit.gamma*(1-width)), square(fit.gamma), square(fit.gamma*(1+width))
	curve := below - 2*at + above
	if !(curve > 0) {
		return math.NaN()
	}
	return fit.gamma * (1 + width*min(max((below-above)/(2*curve), -1), 1))
}

// slotWeights regresses the logged loss on the losses of the slots of one
// objective: the weights, whatever law they follow. They must be positive, and
// those of two thirds of the steps must give the other third.
func slotWeights(f *Finding, steps []Step) bool {
	var fitted, held []Step
	for i, st := range steps {
		if i%3 == 2 {
			held = append(held, st)
		} else {
			fitted = append(fitted, st)
		}
	}
	for _, name := range names(steps) {
		n := len(steps[0].Slots[string(name)])
		if len(fitted) < 2*n {
			continue
		}
		x, y := mat.NewDense(len(fitted), n, nil), mat.NewVecDense(len(fitted), nil)
		for i, st := range fitted {
			for k, l := range st.Slots[string(name)] {
				x.Set(i, k, l/st.Loss)
			}
			y.SetVec(i, 1)
		}
		var w mat.VecDense
		if err := w.SolveVec(x, y); err != nil || mat.Min(&w) < 0 {
			continue // the slots' losses move together, or other than the loss
		}
		worst := 0.0
		for _, st := range held {
			var v float64
			for k, l := range st.Slots[string(name)] {
				v += w.AtVec(k) * l
			}
			worst = math.Max(worst, math.Abs(v/st.Loss-1))
		}
		if !(worst < roughly) {
			continue
		}
		weights := make([]string, n)
		for k := range n {
			weights[k] = fmt.Sprintf("%.3f", w.AtVec(k))
		}
		f.Verdict = Supported
		f.Measure = fmt.Sprintf("the loss of %d steps regressed on %s by slot gives that of %d others to %.1g", len(fitted), name, len(held), worst)
		f.Sentence = fmt.Sprintf("The objective is %s with weights that follow no exponential decay: %s for slots 1 to %d.", name, strings.Join(weights, " "), n)
		return true
	}
	return false
}
