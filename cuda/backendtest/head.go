package backendtest

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// headTolerance is absolute: log-probabilities and divergences are read to
// four decimals, and this leaves room.
const headTolerance = 1e-5

const allLosses = cuda.KL | cuda.RKL | cuda.JSD | cuda.TV

// heading is a call of Head in plain slices.
type heading struct {
	hidden, weight, target []float32
	labels, targetRow      []int32
	losses                 cuda.Losses
	k, width               int
}

// newHeading draws m rows over a vocabulary whose logits spread by about 3.
func newHeading(m, width, vocab, targets, k int) *heading {
	h := &heading{
		hidden: random(1, m, width), weight: random(2, vocab, width), target: random(3, targets, width),
		labels: make([]int32, m), targetRow: make([]int32, m), losses: allLosses, k: k, width: width,
	}
	for i := range h.weight {
		h.weight[i] *= float32(3 / math.Sqrt(float64(width)))
	}
	for i := range m {
		h.labels[i], h.targetRow[i] = int32(i*7%vocab), int32(i*5%targets)
		if i%6 == 4 {
			h.labels[i] = -1
		}
		if i%5 == 3 {
			h.targetRow[i] = -1
		}
	}
	return h
}

// run computes rows lo..hi-1 on the device.
func (h *heading) run(t testing.TB, l *lab, lo, hi int) cuda.HeadResult {
	t.Helper()
	res, err := l.d.Head(cuda.HeadArgs{
		Hidden: l.put(t, slice(h.hidden, h.width, lo, hi), h.width), Weight: l.put(t, h.weight, h.width),
		K: h.k, Labels: h.labels[lo:hi],
		Target: l.put(t, h.target, h.width), TargetRow: h.targetRow[lo:hi], Losses: h.losses,
	})
	must(t, err)
	return res
}

// numbers is everything in a result, row after row.
func numbers(r cuda.HeadResult, k int) []float32 {
	var out []float32
	for i := range r.LSE {
		out = append(out, r.LSE[i], r.LabelLogit[i], float32(r.LabelRank[i]), r.KL[i], r.RKL[i], r.JSD[i], r.TV[i])
		for j := range k {
			out = append(out, float32(r.TopIDs[i*k+j]), r.TopLogits[i*k+j])
		}
	}
	return out
}

// logProbs are float64 logits and their log-softmax.
func logProbs(state, weight []float32) (logits, logP []float64, lse float64) {
	width := len(state)
	top := math.Inf(-1)
	for j := range len(weight) / width {
		var dot float64
		for c, v := range state {
			dot += float64(v) * float64(weight[j*width+c])
		}
		logits = append(logits, dot)
		top = math.Max(top, dot)
	}
	for _, v := range logits {
		lse += math.Exp(v - top)
	}
	lse = top + math.Log(lse)
	for _, v := range logits {
		logP = append(logP, v-lse)
	}
	return logits, logP, lse
}

// check compares every row with the oracle.
func (h *heading) check(t *testing.T, l *lab) {
	t.Helper()
	m := len(h.labels)
	res := h.run(t, l, 0, m)
	if len(res.LSE) != m || len(res.TopIDs) != m*h.k || len(res.TopLogits) != m*h.k {
		t.Fatalf("%d LSE, %d top ids, %d top logits for %d rows", len(res.LSE), len(res.TopIDs), len(res.TopLogits), m)
	}
	targets := make(map[int][]float64) // log p of each target row
	for i := range m {
		logits, logQ, lse := logProbs(slice(h.hidden, h.width, i, i+1), h.weight)
		near(t, res.LSE[i:i+1], []float64{lse}, nil, headTolerance)
		order := make([]int32, len(logits))
		for j := range order {
			order[j] = int32(j)
		}
		slices.SortStableFunc(order, func(a, b int32) int { return cmp.Compare(logits[b], logits[a]) })
		for j := range h.k {
			// A near tie may fall either way: the logit decides, not the id.
			id := res.TopIDs[i*h.k+j]
			near(t, res.TopLogits[i*h.k+j:][:1], []float64{logits[order[j]]}, nil, headTolerance)
			near(t, res.TopLogits[i*h.k+j:][:1], []float64{logits[id]}, nil, headTolerance)
			if slices.Contains(res.TopIDs[i*h.k:i*h.k+j], id) {
				t.Fatalf("row %d lists id %d twice", i, id)
			}
		}
		if label := h.labels[i]; label >= 0 {
			near(t, res.LabelLogit[i:i+1], []float64{logits[label]}, nil, headTolerance)
			var before, ties int
			for _, v := range logits {
				if v > logits[label]+headTolerance {
					before++
				} else if v > logits[label]-headTolerance {
					ties++
				}
			}
			if r := int(res.LabelRank[i]); r < before || r >= before+ties {
				t.Fatalf("row %d: label rank %d, want %d", i, r, before)
			}
		} else if v := res.LabelLogit[i]; v == v || res.LabelRank[i] != -1 {
			t.Fatalf("row %d has no label, but logit %v, rank %d", i, v, res.LabelRank[i])
		}
		kl, rkl, jsd, tv := math.NaN(), math.NaN(), math.NaN(), math.NaN()
		if r := int(h.targetRow[i]); r >= 0 {
			if targets[r] == nil {
				_, targets[r], _ = logProbs(slice(h.target, h.width, r, r+1), h.weight)
			}
			kl, rkl, jsd, tv = divergences(targets[r], logQ)
		}
		near(t, []float32{res.KL[i], res.RKL[i], res.JSD[i], res.TV[i]}, []float64{kl, rkl, jsd, tv}, nil, headTolerance)
	}
}

func divergences(logP, logQ []float64) (kl, rkl, jsd, tv float64) {
	var overlap float64
	for j := range logP {
		p, q := math.Exp(logP[j]), math.Exp(logQ[j])
		logM := math.Log((p + q) / 2)
		kl += p * (logP[j] - logQ[j])
		rkl += q * (logQ[j] - logP[j])
		jsd += (p*(logP[j]-logM) + q*(logQ[j]-logM)) / 2
		overlap += math.Min(p, q)
	}
	return kl, rkl, jsd, 1 - overlap
}

func testHead(t *testing.T, l *lab) {
	for _, lay := range layouts {
		t.Run(lay.name, func(t *testing.T) {
			for _, e := range edges() {
				t.Run(strconv.Itoa(e), func(t *testing.T) {
					newHeading(4, 16, e, 3, min(e, 16)).check(t, l.in(lay))
					newHeading(e, 9, 40, 5, 3).check(t, l.in(lay))
					newHeading(4, e, 50, 4, 50).check(t, l.in(lay))
				})
			}
			newHeading(270, 20, 1000, 40, 16).check(t, l.in(lay))
		})
	}
	t.Run("ties go to the lowest id", func(t *testing.T) {
		h := &heading{
			hidden: []float32{1}, weight: []float32{2, 5, 3, 5, 5, 1, 3, 2}, target: []float32{1},
			labels: []int32{6}, targetRow: []int32{0}, losses: allLosses, k: 6, width: 1,
		}
		res := h.run(t, l, 0, 1)
		if want := []int32{1, 3, 4, 2, 6, 0}; !slices.Equal(res.TopIDs, want) {
			t.Errorf("top ids are %v, want %v", res.TopIDs, want)
		}
		if res.LabelRank[0] != 4 {
			t.Errorf("the label's rank is %d, want 4", res.LabelRank[0])
		}
		h.k, h.labels = 1, []int32{7}
		if res = h.run(t, l, 0, 1); res.LabelRank[0] != 6 {
			t.Errorf("the rank of a label outside the top is %d, want 6", res.LabelRank[0])
		}
	})
	t.Run("a draft equal to its target has no divergence", func(t *testing.T) {
		h := newHeading(5, 32, 200, 5, 1)
		h.target, h.targetRow = h.hidden, []int32{0, 1, 2, 3, 4}
		res := h.run(t, l, 0, 5)
		for i := range 5 {
			near(t, []float32{res.KL[i], res.RKL[i], res.JSD[i], res.TV[i]}, make([]float64, 4), nil, 2e-6)
			if res.KL[i] < 0 || res.RKL[i] < 0 || res.JSD[i] < 0 || res.TV[i] < 0 {
				t.Errorf("row %d has a negative divergence", i)
			}
		}
	})
	t.Run("logits of hundreds do not overflow", func(t *testing.T) {
		h := newHeading(6, 8, 30, 6, 4)
		h.losses = cuda.KL | cuda.TV
		for i := range h.hidden {
			h.hidden[i] *= 60
		}
		for i := range h.target {
			h.target[i] *= 60
		}
		res := h.run(t, l, 0, 6)
		for i, r := range h.targetRow {
			_, logQ, lse := logProbs(slice(h.hidden, 8, i, i+1), h.weight)
			near(t, res.LSE[i:i+1], []float64{lse}, nil, 1e-4)
			if r >= 0 {
				_, logP, _ := logProbs(slice(h.target, 8, int(r), int(r)+1), h.weight)
				kl, _, _, tv := divergences(logP, logQ)
				near(t, []float32{res.KL[i], res.TV[i]}, []float64{kl, tv}, []float64{1 + kl, 1}, 1e-4)
			}
		}
	})
	t.Run("what is not asked for is nil", func(t *testing.T) {
		h := newHeading(3, 8, 20, 3, 0)
		res, err := l.d.Head(cuda.HeadArgs{Hidden: l.put(t, h.hidden, 8), Weight: l.put(t, h.weight, 8)})
		must(t, err)
		if len(res.LSE) != 3 {
			t.Errorf("%d LSE for 3 rows", len(res.LSE))
		}
		if res.TopIDs != nil || res.TopLogits != nil || res.LabelLogit != nil || res.LabelRank != nil ||
			res.KL != nil || res.RKL != nil || res.JSD != nil || res.TV != nil {
			t.Errorf("not nil: %+v", res)
		}
	})
	t.Run("each loss alone is the same as with the others", func(t *testing.T) {
		h := newHeading(20, 16, 100, 8, 2)
		all := h.run(t, l, 0, 20)
		for _, one := range []struct {
			loss cuda.Losses
			get  func(cuda.HeadResult) []float32
		}{
			{cuda.KL, func(r cuda.HeadResult) []float32 { return r.KL }},
			{cuda.RKL, func(r cuda.HeadResult) []float32 { return r.RKL }},
			{cuda.JSD, func(r cuda.HeadResult) []float32 { return r.JSD }},
			{cuda.TV, func(r cuda.HeadResult) []float32 { return r.TV }},
		} {
			h.losses = one.loss
			want := make([]float64, 20)
			for i, v := range one.get(all) {
				want[i] = float64(v)
			}
			near(t, one.get(h.run(t, l, 0, 20)), want, nil, headTolerance)
		}
	})
	t.Run("no rows", func(t *testing.T) {
		h := newHeading(1, 8, 20, 3, 2)
		if res := h.run(t, l, 0, 0); len(res.LSE) != 0 || len(res.TopIDs) != 0 {
			t.Errorf("no rows gave %+v", res)
		}
	})
	t.Run("NaN stays in its row", func(t *testing.T) {
		h := newHeading(7, 8, 40, 7, 4)
		clean := h.run(t, l, 0, 7)
		h.hidden[2*8+3], h.hidden[5*8] = nan, inf
		res := h.run(t, l, 0, 7)
		for _, i := range []int{2, 5} {
			if v := float64(res.LSE[i]); !math.IsNaN(v) && !math.IsInf(v, 0) {
				t.Errorf("row %d has LSE %v", i, v)
			}
			seen := map[int32]bool{}
			for _, id := range res.TopIDs[i*4 : i*4+4] {
				if id < 0 || id >= 40 || seen[id] {
					t.Errorf("row %d has top ids %v", i, res.TopIDs[i*4:i*4+4])
				}
				seen[id] = true
			}
		}
		per := len(numbers(res, 4)) / 7
		for _, i := range []int{0, 1, 3, 4, 6} {
			same(t, fmt.Sprintf("row %d", i), slice(numbers(res, 4), per, i, i+1), slice(numbers(clean, 4), per, i, i+1))
		}
	})
	t.Run("invariance", func(t *testing.T) {
		h := newHeading(150, 67, 301, 31, 8)
		rowInvariant(t, l, 150, func(t testing.TB, l *lab, lo, hi int) []float32 {
			return numbers(h.run(t, l, lo, hi), h.k)
		})
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		good := func() cuda.HeadArgs {
			return cuda.HeadArgs{
				Hidden: l.room(t, 3, 8), Weight: l.room(t, 20, 8), K: 2, Labels: []int32{1, -1, 19},
				Target: l.room(t, 2, 8), TargetRow: []int32{0, -1, 1}, Losses: cuda.KL,
			}
		}
		for what, spoil := range map[string]func(*cuda.HeadArgs){
			"weight":        func(a *cuda.HeadArgs) { a.Weight = l.room(t, 20, 7) },
			"no vocabulary": func(a *cuda.HeadArgs) { a.Weight, a.K = l.room(t, 0, 8), 0 },
			"top":           func(a *cuda.HeadArgs) { a.K = 21 },
			"minus top":     func(a *cuda.HeadArgs) { a.K = -1 },
			"labels":        func(a *cuda.HeadArgs) { a.Labels = a.Labels[:2] },
			"far label":     func(a *cuda.HeadArgs) { a.Labels[0] = 20 },
			"target":        func(a *cuda.HeadArgs) { a.Target = l.room(t, 2, 7) },
			"target rows":   func(a *cuda.HeadArgs) { a.TargetRow = a.TargetRow[:2] },
			"far target":    func(a *cuda.HeadArgs) { a.TargetRow[2] = 2 },
			"no target":     func(a *cuda.HeadArgs) { a.Target = cuda.Tensor{} },
		} {
			args := good()
			spoil(&args)
			_, err := l.d.Head(args)
			refused(t, what, err)
		}
	})
}
