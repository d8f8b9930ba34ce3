package cpu

import (
	"math"

	"github.com/draftscope/draftscope/cuda"
)

// headLimits bound the scratch memory of one Head call. One row of each kind
// is always allowed, however large the vocabulary.
type headLimits struct {
	rows   int // rows at hand
	logits int // their logits, in values; as much again where RKL or JSD need exponentials beside them
	kept   int // target distributions, in values, for each form in which the losses need them
}

// defaultLimits allow 32 MiB of logits and 64 MiB of each distribution.
var defaultLimits = headLimits{rows: 256, logits: 8 << 20, kept: 16 << 20}

// heading is one call of Head.
type heading struct {
	cuda.HeadArgs
	hidden, weight, target matrix
	cuda.HeadResult
	kept  *distributions
	exped matrix // exponentials of the rows at hand, where logits must stay
}

// Head implements [cuda.Device]. It goes through the rows in chunks, so that
// its memory does not grow with them; a target row that serves several rows
// is multiplied with the head once, as long as it can be kept.
func (d *Device) Head(args cuda.HeadArgs) (cuda.HeadResult, error) {
	h := &heading{HeadArgs: args}
	if err := h.check(); err != nil {
		return cuda.HeadResult{}, err
	}
	h.allocate()
	m, vocab := h.hidden.rows, h.weight.rows
	if m == 0 {
		return h.HeadResult, nil
	}
	chunk := min(m, d.limits.rows, max(1, d.limits.logits/vocab))
	logits := dense(chunk, vocab)
	if h.Losses != 0 {
		h.kept = newDistributions(h.Losses, max(chunk, min(h.target.rows, d.limits.kept/vocab)), vocab)
	}
	if h.Losses&(cuda.RKL|cuda.JSD) != 0 {
		h.exped = dense(chunk, vocab)
	}
	for lo := 0; lo < m; lo += chunk {
		hi := min(lo+chunk, m)
		if h.kept != nil {
			d.keep(h, h.TargetRow[lo:hi], logits)
		}
		part := logits.block(0, hi-lo, 0, vocab)
		d.product(part, h.hidden.block(lo, hi, 0, h.hidden.cols), h.weight, false)
		d.each(hi-lo, vocab*16, func(i int) {
			exped := part.row(i)
			if h.exped.rows > 0 {
				exped = h.exped.row(i)
			}
			h.reduce(lo+i, part.row(i), exped)
		})
	}
	return h.HeadResult, nil
}

// check turns the operands into matrices that fit together.
func (h *heading) check() error {
	if err := h.Check(); err != nil {
		return err
	}
	operands := []operand{{h.Hidden, &h.hidden}, {h.Weight, &h.weight}}
	if h.Losses != 0 {
		operands = append(operands, operand{h.Target, &h.target})
	}
	return views("head", operands...)
}

// allocate makes room for what was asked for.
func (h *heading) allocate() {
	m := h.hidden.rows
	h.LSE = make([]float32, m)
	if h.K > 0 {
		h.TopIDs, h.TopLogits = make([]int32, m*h.K), make([]float32, m*h.K)
	}
	if h.Labels != nil {
		h.LabelLogit, h.LabelRank = make([]float32, m), make([]int32, m)
	}
	for _, loss := range []struct {
		bit cuda.Losses
		dst *[]float32
	}{{cuda.KL, &h.KL}, {cuda.RKL, &h.RKL}, {cuda.JSD, &h.JSD}, {cuda.TV, &h.TV}} {
		if h.Losses&loss.bit != 0 {
			*loss.dst = make([]float32, m)
		}
	}
}

// reduce turns the logits of row i into its results. It leaves their
// exponentials in exped, which may be logits itself.
func (h *heading) reduce(i int, logits, exped []float32) {
	var largest float32
	if h.K > 0 {
		ids := h.TopIDs[i*h.K : (i+1)*h.K]
		topK(ids, h.TopLogits[i*h.K:(i+1)*h.K], logits)
		largest = ordered(logits[ids[0]])
	} else {
		largest = kernels.largest(logits)
	}
	if h.Labels != nil {
		h.LabelLogit[i], h.LabelRank[i] = float32(math.NaN()), -1
		if label := h.Labels[i]; label >= 0 {
			h.LabelLogit[i] = logits[label]
			h.LabelRank[i] = h.rank(i, logits, label)
		}
	}
	var target *distribution
	if h.kept != nil {
		if target = h.kept.of(h.TargetRow[i]); target == nil {
			h.lack(i)
		}
	}
	cross := 0.0
	if target != nil && h.KL != nil {
		// Needs the logits themselves, which the next pass may overwrite.
		cross = kernels.cross(target.p, logits, largest)
	}
	sum := kernels.exps(exped, logits, largest)
	logSum := math.Log(sum)
	h.LSE[i] = float32(float64(largest) + logSum)
	if target == nil {
		return
	}
	// Divergences are not below 0, whatever the rounding.
	if h.KL != nil {
		h.KL[i] = float32(max(target.negEntropy-cross+logSum, 0))
	}
	if h.TV != nil {
		h.TV[i] = float32(kernels.apart(target.p, exped, float32(1/sum)) / 2)
	}
	if h.RKL == nil && h.JSD == nil {
		return
	}
	negEntropy := kernels.cross(exped, logits, largest)/sum - logSum // Σ q log q
	if h.RKL != nil {
		h.RKL[i] = float32(max(negEntropy-kernels.cross(exped, target.logP, 0)/sum, 0))
	}
	if h.JSD != nil {
		// Two entropies of the parts against that of the mixture.
		mixture := kernels.mixture(target.p, exped, float32(1/sum))
		h.JSD[i] = float32(max((target.negEntropy+negEntropy)/2-mixture, 0))
	}
}

// rank counts the ids that come before label.
func (h *heading) rank(i int, logits []float32, label int32) int32 {
	for j, id := range h.TopIDs[i*h.K : (i+1)*h.K] {
		if id == label {
			return int32(j)
		}
	}
	own := ordered(logits[label])
	// At least own is the same as more than the float32 below it.
	below := math.Nextafter32(own, float32(math.Inf(-1)))
	if math.IsInf(float64(own), -1) {
		// Nothing lies below; NaN, which ranks the same, must be looked for.
		var n int32
		for id, v := range logits {
			if v = ordered(v); v > own || v == own && int32(id) < label {
				n++
			}
		}
		return n
	}
	return int32(kernels.count(logits[:label], below) + kernels.count(logits[label:], own))
}

// lack marks row i as one without a target.
func (h *heading) lack(i int) {
	for _, loss := range [][]float32{h.KL, h.RKL, h.JSD, h.TV} {
		if loss != nil {
			loss[i] = float32(math.NaN())
		}
	}
}
