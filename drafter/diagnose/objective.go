package diagnose

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/draftscope/draftscope/drafter"
)

// warmKL is KL(p‖q) where both are taken at temperature 2, without a factor.
const warmKL drafter.Objective = "kl_div@2"

// temperature is what follows the @ of a loss's name, 1 without one.
func temperature(name drafter.Objective) float64 {
	if _, at, ok := strings.Cut(string(name), "@"); ok {
		if t, err := strconv.ParseFloat(at, 64); err == nil && t > 0 {
			return t
		}
	}
	return 1
}

// term is one loss of a sum.
type term struct {
	loss  drafter.Objective
	share float64
	// rescaled says that T² multiplies it too, as distillation has it.
	rescaled bool
}

// factor is what the loss is multiplied by.
func (t term) factor() float64 {
	if t.rescaled {
		return t.share * temperature(t.loss) * temperature(t.loss)
	}
	return t.share
}

func (t term) String() string {
	words := string(t.loss)
	if t.rescaled {
		words = "T²·" + words
	}
	if math.Abs(t.share-1) > 5e-4 { // of a share that was fitted
		words = fmt.Sprintf("%.3g·%s", t.share, words)
	}
	return words
}

// objective is one way to turn slots into a loss.
type objective struct {
	terms []term
	gamma float64 // 0 is plain; negative is D-PACE
	norm  drafter.Normaliser
}

// dpaceGamma marks D-PACE among the decays.
const dpaceGamma = -1

var normWords = map[drafter.Normaliser]string{drafter.ByWeight: "weights", drafter.ByCount: "count", drafter.ByBatch: "batch"}

func (o objective) String() string {
	return fmt.Sprintf("%s, %s, divided by the %s", o.losses(), o.weighting(), normWords[o.norm])
}

// losses are the terms in words.
func (o objective) losses() string {
	words := make([]string, len(o.terms))
	for i, t := range o.terms {
		words[i] = t.String()
	}
	return strings.Join(words, " + ")
}

func (o objective) weighting() string {
	switch {
	case o.gamma == 0:
		return "no decay"
	case o.gamma < 0:
		return "D-PACE"
	}
	return fmt.Sprintf("γ = %.3g", o.gamma)
}

// objectives are those of the published trainers, and the mixture of the
// public case with T² and without.
func objectives() []objective {
	sums := [][]term{}
	for _, loss := range []drafter.Objective{drafter.CE, drafter.KLDiv, drafter.RKLDiv, drafter.JSDiv, drafter.TVDist, drafter.NLA} {
		sums = append(sums, []term{{loss: loss, share: 1}})
	}
	for _, rescaled := range []bool{false, true} {
		sums = append(sums, []term{{warmKL, 0.7, rescaled}, {drafter.CE, 0.3, false}})
	}
	var out []objective
	for _, terms := range sums {
		for _, gamma := range []float64{0, 4, 5, 7, 10, dpaceGamma} {
			for _, norm := range []drafter.Normaliser{drafter.ByWeight, drafter.ByCount} {
				if gamma == 0 && norm == drafter.ByCount {
					continue // the same number as by weight
				}
				out = append(out, objective{terms, gamma, norm})
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

// value is the loss of given per-slot means of each term's loss.
func (o objective) value(losses map[drafter.Objective][]float64, dpace []float64) float64 {
	var sum float64
	for _, t := range o.terms {
		sum += t.factor() * weightedMean(losses[t.loss], o.weights(len(losses[t.loss]), dpace), nil, o.norm)
	}
	return sum
}

// weightedMean is Σ n·w·l divided by Σ n·w or Σ n. Nil counts are as many for
// every slot.
func weightedMean(losses, weights, counts []float64, norm drafter.Normaliser) float64 {
	var sum, by float64
	for k, l := range losses {
		n := 1.0
		if counts != nil {
			n = counts[k]
		}
		sum += n * weights[k] * l
		if norm == drafter.ByCount {
			by += n
		} else {
			by += n * weights[k]
		}
	}
	return sum / by
}

// probeLog says which objective made a logged run, and what its metrics are.
func probeLog(ctx context.Context, s *study, r *Report) error {
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
			if err := s.likelyObjective(ctx, &f, name, steps); err != nil {
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

func objectiveList(os []objective) string {
	var words []string
	for _, o := range os {
		words = append(words, o.String())
	}
	return strings.Join(words, "; ")
}
