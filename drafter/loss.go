package drafter

import (
	"fmt"
	"math"
)

// Objective is a per-slot loss between the target's distribution p and the
// draft's q, natural logarithm, temperature 1.
type Objective string

// The objectives, under the names that the speculators project gives them.
const (
	CE     Objective = "ce"     // −log q(argmax p)
	KLDiv  Objective = "kl_div" // Σ p log(p/q)
	RKLDiv Objective = "rkl"    // Σ q log(q/p)
	JSDiv  Objective = "jsd"    // ½ KL(p‖m) + ½ KL(q‖m), m = (p+q)/2
	TVDist Objective = "tv"     // 1 − Σ min(p, q)
	NLA    Objective = "nla"    // −log max(Σ min(p, q), 1e-5): negative log acceptance
)

// nlaFloor keeps the logarithm of [NLA] finite.
const nlaFloor = 1e-5

// Weighting is how a block's slots weigh against each other.
type Weighting string

// The weightings.
const (
	Plain    Weighting = "plain"           // 1
	ExpDecay Weighting = "fixed-exp-decay" // exp(−(k−1)/γ)
	DPace    Weighting = "dpace"           // see [DPaceWeights]
)

// Normaliser is what the weighted sum is divided by.
type Normaliser string

// The normalisers. With γ = 4 and B = 8 the first two differ by a factor of
// about 0.53, so curves of different projects must be rescaled to compare.
const (
	ByWeight Normaliser = "weight" // Σ mask·weight (SpecForge)
	ByCount  Normaliser = "count"  // Σ mask + 1e-5 (speculators)
	ByBatch  Normaliser = "batch"  // number of sequences (SpecForge with D-PACE)
)

const (
	countEps   = 1e-5
	dpaceAlpha = 0.5
)

// SlotLoss is the objective of one slot, given both rows of logits, in float64.
func SlotLoss(o Objective, draft, target []float32) (float64, error) {
	if len(draft) != len(target) || len(draft) == 0 {
		return 0, fmt.Errorf("computing %s: %d draft logits, %d target logits", o, len(draft), len(target))
	}
	lseQ, lseP := logSumExp(draft), logSumExp(target)
	var sum float64
	for i := range draft {
		lq, lp := float64(draft[i])-lseQ, float64(target[i])-lseP
		q, p := math.Exp(lq), math.Exp(lp)
		switch o {
		case CE:
		case KLDiv:
			sum += relEntropy(p, lp, lq)
		case RKLDiv:
			sum += relEntropy(q, lq, lp)
		case JSDiv:
			lm := math.Log((p + q) / 2)
			sum += (relEntropy(p, lp, lm) + relEntropy(q, lq, lm)) / 2
		case TVDist, NLA:
			sum += min(p, q)
		default:
			return 0, fmt.Errorf("computing loss: no objective %q", o)
		}
	}
	switch o {
	case CE:
		return lseQ - float64(draft[Argmax(target)]), nil
	case TVDist:
		return 1 - sum, nil
	case NLA:
		return -math.Log(max(sum, nlaFloor)), nil
	}
	return sum, nil
}

// relEntropy is p·log(p/q), 0 when p is.
func relEntropy(p, lp, lq float64) float64 {
	if p == 0 {
		return 0
	}
	return p * (lp - lq)
}

func logSumExp(x []float32) float64 {
	top := float64(x[Argmax(x)])
	var sum float64
	for _, v := range x {
		sum += math.Exp(float64(v) - top)
	}
	return top + math.Log(sum)
}

// Argmax is the index of the largest value, the lowest among equals; 0 for an
// empty slice.
func Argmax(x []float32) int {
	best := 0
	for i, v := range x {
		if v > x[best] {
			best = i
		}
	}
	return best
}

// DecayWeights are w_0 = 0 and w_k = exp(−(k−1)/γ) for k = 1..b−1 (DFlash,
// Eq. 4). γ = 0 stands for no decay.
func DecayWeights(b int, gamma float64) []float64 {
	w := make([]float64, b)
	for k := 1; k < b; k++ {
		w[k] = 1
		if gamma > 0 {
			w[k] = math.Exp(-float64(k-1) / gamma)
		}
	}
	return w
}

// DPaceWeights weighs the slots of one block by how much of the expected
// accepted length runs through them: with s_k = (1−α)·exp(−ce_k) + α, or 1
// where masked, and pre_k = Π_{i≤k} s_i, w_k = m_k · Σ_{j≥k} m_j·pre_j, α = ½.
// ce and mask have one entry a slot, slot 0 included and never counted.
func DPaceWeights(ce []float64, mask []bool) []float64 {
	pre := make([]float64, len(ce))
	run := 1.0
	for k := 1; k < len(ce); k++ {
		if mask[k] {
			run *= (1-dpaceAlpha)*math.Exp(-ce[k]) + dpaceAlpha
		}
		pre[k] = run
	}
	w := make([]float64, len(ce))
	var tail float64
	for k := len(ce) - 1; k >= 1; k-- {
		if mask[k] {
			tail += pre[k]
			w[k] = tail
		}
	}
	return w
}

// LossOptions choose how per-slot losses become one number. The zero value is
// SpecForge's default: plain weights, normalised by them.
type LossOptions struct {
	Weighting  Weighting  // "" is Plain
	Gamma      float64    // of ExpDecay
	Normaliser Normaliser // "" is ByWeight
	Batch      int        // sequences, for ByBatch; 0 is 1
}

// Validate reports every unusable option.
func (o LossOptions) Validate() error {
	switch o.Weighting {
	case "", Plain, DPace:
	case ExpDecay:
		if !(o.Gamma > 0) {
			return fmt.Errorf("weighting losses: gamma %v is not above 0", o.Gamma)
		}
	default:
		return fmt.Errorf("weighting losses: no weighting %q", o.Weighting)
	}
	switch o.Normaliser {
	case "", ByWeight, ByCount, ByBatch:
	default:
		return fmt.Errorf("weighting losses: no normaliser %q", o.Normaliser)
	}
	if o.Batch < 0 {
		return fmt.Errorf("weighting losses: a batch of %d sequences", o.Batch)
	}
	return nil
}

// Loss reduces per-slot losses [blocks][B] to one number. Slot 0 never counts,
// nor does a slot whose mask is false; what stands there is not read. ce holds
// the cross-entropies that D-PACE needs and may be nil otherwise. Without a
// single counted slot the loss is NaN: there is nothing to average.
func Loss(loss, ce [][]float64, mask [][]bool, opt LossOptions) (float64, error) {
	if err := opt.Validate(); err != nil {
		return 0, err
	}
	if len(mask) != len(loss) || opt.Weighting == DPace && len(ce) != len(loss) {
		return 0, fmt.Errorf("weighting losses: %d blocks, %d masks, %d cross-entropies", len(loss), len(mask), len(ce))
	}
	var sum, weights, count float64
	for b, l := range loss {
		if len(mask[b]) != len(l) || opt.Weighting == DPace && len(ce[b]) != len(l) {
			return 0, fmt.Errorf("weighting losses: block %d has %d slots and %d masks", b, len(l), len(mask[b]))
		}
		var w []float64
		switch opt.Weighting {
		case ExpDecay:
			w = DecayWeights(len(l), opt.Gamma)
		case DPace:
			w = DPaceWeights(ce[b], mask[b])
		default:
			w = DecayWeights(len(l), 0)
		}
		for k := 1; k < len(l); k++ {
			if mask[b][k] {
				sum += l[k] * w[k]
				weights += w[k]
				count++
			}
		}
	}
	if count == 0 {
		return math.NaN(), nil
	}
	switch opt.Normaliser {
	case ByCount:
		return sum / (count + countEps), nil
	case ByBatch:
		return sum / float64(max(opt.Batch, 1)), nil
	}
	return sum / weights, nil
}
