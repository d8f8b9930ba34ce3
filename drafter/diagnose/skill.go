package diagnose

import "fmt"

// ownHits is what part of a graph's hits must be its own at least before
// anything is concluded from them. Drafts that are always the same tokens hit
// whatever text has more of these, under any graph: of random weights another
// mask token drafts another token, which may be the more frequent one.
const ownHits = 0.5

// byChance is a graph's share of hits on the labels shift tokens further on,
// and what it would be if each slot's drafts were dealt to other anchors.
func (s *study) byChance(ms []measured, shift int) (hits, chance float64) {
	if len(ms) == 0 {
		return 0, 0
	}
	all := 0.0
	for k := range ms[0].slots {
		drafts, labels, scored := map[int32]float64{}, map[int32]float64{}, 0.0
		for i, m := range ms {
			q := s.seqs[i]
			for j, a := range m.anchors {
				t := int(a) + k + 1
				if !q.scored(t) || !q.scored(t+shift) {
					continue
				}
				draft, label := m.tokens[j*m.slots+k], q.labels[t+shift]
				drafts[draft]++
				labels[label]++
				scored++
				if draft == label {
					hits++
				}
			}
		}
		for id, n := range drafts {
			chance += n * labels[id] / scored
		}
		all += scored
	}
	if all == 0 {
		return 0, 0
	}
	return hits / all, chance / all
}

// skilled says that a graph's hits are its own for the most part.
func (s *study) skilled(ms []measured, shift int) bool {
	hits, chance := s.byChance(ms, shift)
	return hits-chance >= ownHits*hits && hits > 0
}

// littleToJudge is the rest of the sentence "no fault found", where the
// drafter hits too little of its own for most faults to show; else empty.
func (s *study) littleToJudge() string {
	if len(s.declared) == 0 || s.skilled(s.declared, s.shift) {
		return ""
	}
	hits, chance := s.byChance(s.declared, s.shift)
	return fmt.Sprintf(", but it hits so little of its own that most faults of a drafter would not show yet: %.2f of slots 1–%d, where the same drafts dealt to other anchors hit %.2f",
		hits, s.declared[0].slots, chance)
}
