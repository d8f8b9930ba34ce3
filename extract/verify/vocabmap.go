package verify

import "fmt"

// VocabMap checks the map of a reduced draft vocabulary: d2t holds, for each
// draft token, the target's token less the draft's (an offset), and t2d marks
// the target's tokens that a draft token stands for. A d2t of zeros alone with
// a full draft vocabulary is the identity. "" means that all is well.
func VocabMap(d2t []int64, t2d []bool, draft, target int) string {
	if len(d2t) != draft {
		return fmt.Sprintf("d2t has %d entries, the draft head %d rows", len(d2t), draft)
	}
	if t2d != nil && len(t2d) != target {
		return fmt.Sprintf("t2d has %d entries, the target's vocabulary %d", len(t2d), target)
	}
	seen := make(map[int64]int, draft)
	for d, off := range d2t {
		t := int64(d) + off
		if t < 0 || t >= int64(target) {
			return fmt.Sprintf("draft token %d stands for %d, outside the target's vocabulary of %d%s", d, t, target, absolute(d2t, t2d, target))
		}
		if other, twice := seen[t]; twice {
			return fmt.Sprintf("draft tokens %d and %d stand for the same token %d%s", other, d, t, absolute(d2t, t2d, target))
		}
		seen[t] = d
	}
	if t2d == nil {
		return ""
	}
	on := 0
	for t, bit := range t2d {
		if !bit {
			continue
		}
		on++
		if _, ok := seen[int64(t)]; !ok {
			return fmt.Sprintf("t2d marks token %d, for which no draft token stands%s", t, absolute(d2t, t2d, target))
		}
	}
	if on != draft {
		return fmt.Sprintf("t2d marks %d tokens, the draft vocabulary has %d", on, draft)
	}
	return ""
}

// absolute recognises a map that holds the target's tokens themselves.
func absolute(d2t []int64, t2d []bool, target int) string {
	last := int64(-1)
	for _, t := range d2t {
		if t <= last || t >= int64(target) || t2d != nil && !t2d[t] {
			return ""
		}
		last = t
	}
	return "; it holds tokens, where offsets belong"
}
