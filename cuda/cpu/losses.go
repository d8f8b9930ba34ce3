package cpu

import (
	"math"

	"github.com/draftscope/draftscope/cuda"
)

// distribution is what the losses need of one target row.
type distribution struct {
	p, logP    []float32 // nil where no loss needs it
	negEntropy float64   // Σ p log p
}

// distributions keeps the distributions of as many target rows as fit.
type distributions struct {
	losses  cuda.Losses
	entries []distribution
	owner   []int32       // target row of an entry, -1 for none
	entry   map[int32]int // entry of a target row
	next    int           // entry that is given up next
}

func newDistributions(losses cuda.Losses, n, vocab int) *distributions {
	k := &distributions{losses: losses, entries: make([]distribution, n), owner: make([]int32, n), entry: make(map[int32]int, n)}
	for i := range k.owner {
		k.owner[i] = -1
	}
	var p, logP matrix
	if losses&(cuda.KL|cuda.JSD|cuda.TV) != 0 {
		p = dense(n, vocab)
	}
	if losses&cuda.RKL != 0 {
		logP = dense(n, vocab)
	}
	for i := range k.entries {
		if p.rows > 0 {
			k.entries[i].p = p.row(i)
		}
		if logP.rows > 0 {
			k.entries[i].logP = logP.row(i)
		}
	}
	return k
}

// of is the distribution of a target row that keep was given, nil for -1.
func (k *distributions) of(row int32) *distribution {
	if e, ok := k.entry[row]; ok {
		return &k.entries[e]
	}
	return nil
}

// keep computes the distributions of the target rows that are not kept yet,
// in the place of others that these rows do not need. rows are no more than
// there are entries, and no more than logits has rows.
func (d *Device) keep(h *heading, rows []int32, logits matrix) {
	k := h.kept
	needed := make(map[int32]bool, len(rows))
	var missing []int32
	for _, r := range rows {
		if r < 0 || needed[r] {
			continue
		}
		needed[r] = true
		if _, ok := k.entry[r]; !ok {
			missing = append(missing, r)
		}
	}
	if len(missing) == 0 {
		return
	}
	states := dense(len(missing), h.target.cols)
	at := make([]int, len(missing))
	for i, r := range missing {
		copy(states.row(i), h.target.row(int(r)))
		for needed[k.owner[k.next]] {
			k.next = (k.next + 1) % len(k.owner)
		}
		delete(k.entry, k.owner[k.next])
		at[i], k.owner[k.next], k.entry[r] = k.next, r, k.next
		k.next = (k.next + 1) % len(k.owner)
	}
	part := logits.block(0, len(missing), 0, logits.cols)
	d.product(part, states, h.weight, false)
	d.each(len(missing), logits.cols*16, func(i int) { k.entries[at[i]].set(part.row(i)) })
}

// set fills the distribution in from a row of logits, which it uses up.
func (t *distribution) set(logits []float32) {
	top := kernels.largest(logits)
	if t.p == nil {
		// Only log p is needed: log p = logit - top - log Σ.
		copy(t.logP, logits)
		shift := float32(math.Log(kernels.exps(logits, logits, top)))
		for j := range t.logP {
			t.logP[j] = t.logP[j] - top - shift
		}
		return
	}
	sum := kernels.exps(t.p, logits, top)
	logSum := math.Log(sum)
	t.negEntropy = kernels.cross(t.p, logits, top)/sum - logSum
	inv := float32(1 / sum)
	for j := range t.p {
		t.p[j] *= inv
	}
	if t.logP != nil {
		shift := float32(logSum)
		for j, v := range logits {
			t.logP[j] = v - top - shift
		}
	}
}
