package drafter

// Tally counts, slot by slot, what a set of blocks got right. Its zero value
// is empty; blocks must all have the same size. Index 0 of every slice is
// slot 0, which is never scored.
type Tally struct {
	Blocks int
	Hits   []int // scored slots whose draft equals the label
	Scored []int
	Prefix []int // blocks whose slots 1..k are all scored and hit
}

// Add counts one block: hit[k] says whether slot k's draft equals its label,
// scored[k] whether it counts. Both include slot 0, which is not read.
func (t *Tally) Add(hit, scored []bool) {
	if t.Hits == nil {
		t.Hits, t.Scored, t.Prefix = make([]int, len(hit)), make([]int, len(hit)), make([]int, len(hit))
	}
	t.Blocks++
	streak := true
	for k := 1; k < len(hit); k++ {
		streak = streak && scored[k] && hit[k]
		if streak {
			t.Prefix[k]++
		}
		if scored[k] {
			t.Scored[k]++
			if hit[k] {
				t.Hits[k]++
			}
		}
	}
}

// SlotAccuracy is hits over scored at slot k; false when nothing was scored.
func (t *Tally) SlotAccuracy(k int) (float64, bool) {
	if k < 1 || k >= len(t.Scored) || t.Scored[k] == 0 {
		return 0, false
	}
	return float64(t.Hits[k]) / float64(t.Scored[k]), true
}

// Accuracy pools every slot: its numerator and denominator.
func (t *Tally) Accuracy() (hits, scored int) {
	for k := 1; k < len(t.Hits); k++ {
		hits += t.Hits[k]
		scored += t.Scored[k]
	}
	return hits, scored
}

// EAL is the expected accepted length Σ_k Π_{i≤k} accuracy_i, bonus not
// counted. It takes slots for independent, which they are not; [Tally.Expected]
// does not.
func (t *Tally) EAL() float64 {
	acc := make([]float64, len(t.Hits))
	for k := range acc {
		acc[k], _ = t.SlotAccuracy(k)
	}
	if len(acc) < 2 {
		return 0
	}
	return EAL(acc[1:])
}

// EAL is Σ_k Π_{i≤k} acc[i].
func EAL(acc []float64) float64 {
	var sum float64
	run := 1.0
	for _, a := range acc {
		run *= a
		sum += run
	}
	return sum
}

// Expected is Σ_k prefix_rate[k], the mean number of leading hits; 0 without
// blocks.
func (t *Tally) Expected() float64 {
	if t.Blocks == 0 {
		return 0
	}
	var sum int
	for _, n := range t.Prefix {
		sum += n
	}
	return float64(sum) / float64(t.Blocks)
}

// Streak is the number of leading slots whose label is among the first n of
// the draft: ranks has one entry a slot from slot 1 on, negative for "not
// among the kept".
func Streak(ranks []int32, n int32) int {
	for k, r := range ranks {
		if r < 0 || r >= n {
			return k
		}
	}
	return len(ranks)
}
