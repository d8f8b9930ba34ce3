package cpu

import "math"

// ordered maps a logit to what it is ranked by: NaN ranks as -Inf.
func ordered(v float32) float32 {
	if v != v {
		return float32(math.Inf(-1))
	}
	return v
}

// topK writes the len(ids) largest logits and their ids, largest first, equal
// ones by lowest id. len(ids) is at least 1 and at most len(logits).
func topK(ids []int32, values, logits []float32) {
	k := len(ids)
	for n := range k {
		insert(ids, values, n, int32(n), ordered(logits[n]))
	}
	least := values[k-1]
	for lo := k; lo < len(logits); {
		lo += kernels.above(logits[lo:], least)
		for end := min(lo+8, len(logits)); lo < end; lo++ {
			// An equal logit has a higher id and comes after; NaN compares false.
			if v := logits[lo]; v > least {
				insert(ids, values, k-1, int32(lo), v)
				least = values[k-1]
			}
		}
	}
	for i, id := range ids {
		values[i] = logits[id] // a NaN again, if it was one
	}
}

// insert puts id among the n sorted entries before it, dropping entry n.
func insert(ids []int32, values []float32, n int, id int32, v float32) {
	for n > 0 && values[n-1] < v {
		ids[n], values[n] = ids[n-1], values[n-1]
		n--
	}
	ids[n], values[n] = id, v
}
