package verify

import "fmt"

// VocabMap checks the map of a reduced draft vocabulary: d2t holds, for each
// draft token, the target's token less the draft's (an offset), and t2d marks
// the target's tokens that a draft token stands for. A d2t of zeros alone with
// a full draft vocabulary is the identity. why is "" when all is well; row is
// the entry at fault, of t2d where why begins with it, or -1.
func VocabMap(d2t, t2d []int64, draft, target int) (row int, why string) {
	if len(d2t) != draft {
		return -1, fmt.Sprintf("d2t has %d entries, the draft head %d rows", len(d2t), draft)
	}
	if t2d != nil && len(t2d) != target {
		return -1, fmt.Sprintf("t2d has %d entries, the target's vocabulary %d", len(t2d), target)
	}
	seen := make(map[int64]int, draft)
	for d, off := range d2t {
		t := int64(d) + off
		if t < 0 || t >= int64(target) {
			return d, fmt.Sprintf("%d: draft token %d stands for %d, outside the target's vocabulary of %d%s", off, d, t, target, absolute(d2t, t2d, target))
		}
		if other, twice := seen[t]; twice {
			return d, fmt.Sprintf("%d: draft tokens %d and %d stand for the same token %d%s", off, other, d, t, absolute(d2t, t2d, target))
		}
		seen[t] = d
	}
	if t2d == nil {
		return -1, ""
	}
	on := 0
	for t, bit := range t2d {
		if bit == 0 {
			continue
		}
		on++
		if _, ok := seen[int64(t)]; !ok {
			return t, fmt.Sprintf("t2d marks token %d, for which no draft token stands%s", t, absolute(d2t, t2d, target))
		}
	}
	if on != draft {
		return -1, fmt.Sprintf("t2d marks %d tokens, the draft vocabulary has %d", on, draft)
	}
	return -1, ""
}

// absolute recognises a map that holds the target's tokens themselves.
func absolute(d2t []int64, t2d []int64, target int) string {
	last := int64(-1)
	for _, t := range d2t {
		if t <= last || t >= int64(target) || t2d != nil && t2d[t] == 0 {
			return ""
		}
		last = t
	}
	return "; it holds tokens, where offsets belong"
}
