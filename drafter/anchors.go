package drafter

// Mode says at which anchors a stage drafts.
type Mode string

// The anchor modes.
const (
	// Every drafts at each anchor whose own token and successor both carry
	// loss mask 1. The successor of the last prompt token is thereby never
	// predicted, as in decoding, where the target's prefill yields it.
	Every Mode = "every"
	// Rounds drafts only at anchors that simulated decoding reaches.
	Rounds Mode = "rounds"
)

// Turn is a contiguous stretch of tokens Lo..Hi-1 with loss mask 1: what the
// target generated in one turn.
type Turn struct{ Lo, Hi int }

// Turns lists the stretches of 1 in mask, in order.
func Turns(mask []bool) []Turn {
	var turns []Turn
	for t := 0; t < len(mask); t++ {
		if !mask[t] {
			continue
		}
		lo := t
		for t < len(mask) && mask[t] {
			t++
		}
		turns = append(turns, Turn{lo, t})
	}
	return turns
}

// Anchors lists every anchor of a sequence: positions a with mask[a] and
// mask[a+1].
func Anchors(mask []bool) []int32 {
	var anchors []int32
	for t := 0; t+1 < len(mask); t++ {
		if mask[t] && mask[t+1] {
			anchors = append(anchors, int32(t))
		}
	}
	return anchors
}
