package diagnose

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
