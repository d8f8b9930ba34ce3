package diagnose

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
)

// hypothesis is a family of variants, in words.
type hypothesis struct {
	key        string
	hypothesis string
	// sentence is for a person, with %s for the better graph.
	sentence string
	// least is the relative gain from which on a variant counts; 0 is
	// relevance.
	least float64
}

// informs is the least gain of what tells the drafter more than an engine can
// (early taps too, whose last row is the anchor's own), or spares it what it
// does not need: that helps a drafter a little which was never trained with it,
// and does more than this for one that was.
const informs = 0.10

// limit is the gain that matters to a family, of a level.
func (h hypothesis) limit(level float64) float64 {
	return max(relevance, h.least) * level
}

// hypothesisOf is the family of a key.
func hypothesisOf(key string) hypothesis {
	return hypotheses[slices.IndexFunc(hypotheses, func(h hypothesis) bool { return h.key == key })]
}

// hypotheses are the families in the order of the report.
var hypotheses = []hypothesis{
	{"rope-base", "the RoPE base is not the one it was trained with", "The drafter was trained with another RoPE base than its config.json says: it drafts better with %s. Correct rope_theta.", 0},
	{"rope-fraction", "the rotated fraction of a head is not the one it was trained with", "The drafter was trained with another partial_rotary_factor than its config.json says: it drafts better with %s.", 0},
	{"rope-layout", "RoPE pairs other dims than in training", "The weights expect the other RoPE layout: the drafter drafts better with %s. Convert q_proj, k_proj and their norms.", 0},
	{"rope-offset", "the block's positions are off", "The drafter was trained with other positions: it drafts better with %s.", 0},
	{"causality", "a layer's causality within the block is not as in training", "A layer's causality differs from training: the drafter drafts better with %s.", 0},
	{"window", "a layer's window is not as in training", "A layer's attention window differs from training: the drafter drafts better with %s.", 0},
	{"gqa-order", "query heads read other key-value heads than in training", "The heads were trained in the other GQA order: the drafter drafts better with %s.", 0},
	{"slot-0", "slot 0 was trained with the mask token, not the anchor's", "The drafter was trained with %s: it never learnt to read the anchor's token.", 0},
	{"anchor-leak", "the anchor's own states were in the context in training", "The drafter was trained with %s, which do not exist when it drafts in an engine. Exclude the anchor from the context (t < a) and train again.", informs},
	{"context-end", "the context ended before the last position that is known, in training", "The drafter was trained with %s; it lost nothing by it that a longer context would not give.", 0},
	{"across-blocks", "blocks of one sequence saw one another in training", "The drafter was trained with %s: anchors of later blocks show the tokens that earlier ones draft. Mask other blocks out and train again.", informs},
	{"block-size", "blocks were of another size in training", "The drafter was trained on other blocks: it drafts better with %s. Correct block_size.", informs},
	{"mask-token", "the mask token is not the one it was trained with", "The drafter was trained with another mask token: it drafts better with %s. Correct mask_token_id.", 0},
	{"state-number", "all taps read other states than in training", "The taps read other states than in training: the drafter drafts better with %s. Correct target_layer_ids (entry v is state v+1).", 0},
	{"tap-state", "one tap reads another state than in training", "One tap reads another state than in training: the drafter drafts better with %s. Correct target_layer_ids (entry v is state v+1).", 0},
	{"final-norm", "the final state is fed on the wrong side of the final norm", "The final state reaches the drafter on the wrong side of the target's final norm: it drafts better with %s.", 0},
	{"tap-order", "taps are in another order than in training", "The taps are in another order than in training: the drafter drafts better with %s.", 0},
	{"tap-use", "a tap does harm", "A tap does harm: the drafter drafts better with %s.", 0},
	{"tap-late", "taps are shifted by a token against training", "The taps were shifted by a token in training: the drafter drafts better with %s.", informs},
}

// trial is a variant and how it did.
type trial struct {
	variant
	paired          // of closeness, by which it is judged
	hits     paired // which people understand
	measured []measured
	wide     []measured // at more anchors, of those that deserved a second look
	skilled  bool       // its hits are its own, and of no token before: see [study.skilled], [study.lags]
	chance   float64    // its share of hits if its drafts were dealt to other anchors
}

// probeDrafter finds the drafter's label shift, tries every variant, and
// matches the stored drafts.
func probeDrafter(ctx context.Context, s *study, r *Report) error {
	rep, err := newReplica(s.spec, s.Drafter.Weights, s.Host, s.Device)
	if err != nil {
		return err
	}
	defer rep.close()
	if missing := s.missingTaps(); len(missing) > 0 {
		for _, h := range hypotheses {
			r.Findings = append(r.Findings, Finding{Key: h.key, Subject: OfDrafter, Hypothesis: h.hypothesis, Verdict: CannotTell, Needs: fmt.Sprintf("a capture of the states %v, or the target to recompute them", missing), Sentence: "The states that the drafter reads are not there."})
		}
		return nil
	}
	all := append([]variant{{key: "declared", graph: Declared(s.spec)}}, variants(s.spec, s.Host.Layers, s.knownStates(), s.specials())...)
	if s.Families != nil {
		all = slices.DeleteFunc(all, func(v variant) bool { return v.key != "declared" && !slices.Contains(s.Families, v.key) })
	}
	graphs := make([]Graph, len(all))
	for i, v := range all {
		graphs[i] = v.graph
	}
	declared, err := s.scan(ctx, rep, graphs[:1], variantSlots, false)
	if err != nil {
		return err
	}
	s.probeShift(r, declared[0])
	if err := s.probeSource(r, declared[0]); err != nil {
		return err
	}
	ms, err := s.scan(ctx, rep, graphs, variantSlots, false)
	if err != nil {
		return err
	}
	trials := make([]trial, len(all)-1)
	base := s.hits(ms[0], s.shift)
	for i := range trials {
		trials[i] = s.tried(all[i+1], ms[0], ms[i+1])
		trials[i].measured = ms[i+1]
	}
	if err := s.lookAgain(ctx, rep, trials); err != nil {
		return err
	}
	best, explained, err := s.bestGraph(ctx, rep, trials)
	if err != nil {
		return err
	}
	if len(best) > 0 && best[0] == "tap-order" {
		if trials, err = s.refineOrder(ctx, rep, trials); err != nil {
			return err
		}
	}
	hidden := s.unread(trials, best)
	if hidden != nil { // it comes first, and explains what gains beside it
		for _, key := range best {
			explained[key] = true
		}
		best = []string{hidden.key}
	}
	if len(best) == 0 && s.lag != 0 {
		s.lagStays(r, declared[0])
	}
	for _, h := range hypotheses {
		if f, ok := s.judge(h, trials, best, explained); ok {
			if hidden != nil && h.key == hidden.key {
				hidden.finding(s, &f)
			}
			r.Findings = append(r.Findings, f)
		}
	}
	s.probeTaps(r, trials, best)
	captured, err := s.probeAsCaptured(ctx, r, rep, base)
	if err != nil {
		return err
	}
	s.probeStored(r, ms[0], captured, trials)
	s.declared = ms[0]
	return nil
}

// mostSpecials bounds how many tokens are tried for the mask.
const mostSpecials = 8

// specials are tokens that a trainer may have taken for the mask: what the
// tokenizer calls a mask or a pad, the declared one's neighbours, the first and
// the last of the vocabulary, and what it spells as a mark, <|…|>.
func (s *study) specials() []int32 {
	last := int32(s.Host.Vocab - 1)
	var out, marked []int32
	if s.Text != nil {
		var named, marks []int32
		for id := range last + 1 {
			text := strings.ToLower(s.Text(id))
			switch {
			case !strings.HasPrefix(text, "<") || !strings.HasSuffix(text, ">") || len(text) < 5 || strings.ContainsAny(text, " \n\t"):
			case strings.Contains(text, "mask"), strings.Contains(text, "pad"), strings.Contains(text, "unk"):
				named = append(named, id)
			case strings.HasPrefix(text, "<|"):
				marks = append(marks, id)
			}
		}
		out, marked = named, marks
	}
	out = append(append(out, s.spec.MaskToken-1, s.spec.MaskToken+1, 0, last), marked...)
	seen := map[int32]bool{}
	out = slices.DeleteFunc(out, func(id int32) bool {
		again := seen[id]
		seen[id] = true
		return again || id < 0 || id > last
	})
	return out[:min(len(out), mostSpecials)]
}

// tried compares a variant's drafts with the declared graph's.
func (s *study) tried(v variant, declared, ms []measured) trial {
	_, chance := s.byChance(ms, s.shift)
	return trial{
		variant: v, paired: compare(closeness(declared), closeness(ms)),
		hits: compare(s.hits(declared, s.shift), s.hits(ms, s.shift)), skilled: s.skilled(ms, s.shift) && !s.lags(v, ms), chance: chance,
	}
}

// secondLook is at how many times the anchors a variant is tried again.
const secondLook = 4

// lookAgain tries at more anchors what may be better than the declared graph
// by something that matters, and what hides something and may cost nothing. It finds smaller faults for the price of a few
// variants. The level stays that of all of them, so that looking again makes
// no false alarm likelier.
func (s *study) lookAgain(ctx context.Context, rep *replica, trials []trial) error {
	graphs := []Graph{Declared(s.spec)}
	var again []int
	for i, t := range trials {
		better := t.p < 0.1 && t.gain.High > hypothesisOf(t.key).limit(t.a) && t.hits.gain.High > 0
		if better || hides(t.key) && t.gain.High > -matters/2*t.a {
			again = append(again, i)
			graphs = append(graphs, t.graph)
		}
	}
	if len(again) == 0 {
		return nil
	}
	s.look = secondLook
	for _, i := range again {
		if t := trials[i]; t.gain.Low > informs*t.a { // the first look decides
			s.look = 1
		}
	}
	if s.look == 1 {
		for _, i := range again {
			trials[i].wide = trials[i].measured
		}
		return nil
	}
	s.pickAnchors(s.look * s.Anchors)
	defer s.pickAnchors(s.Anchors)
	ms, err := s.scan(ctx, rep, graphs, variantSlots, false)
	if err != nil {
		return err
	}
	for j, i := range again {
		t := s.tried(trials[i].variant, ms[0], ms[j+1])
		t.measured, t.wide = trials[i].measured, ms[j+1]
		trials[i] = t
	}
	return nil
}

// missingTaps are states that the drafter reads and nobody knows.
func (s *study) missingTaps() []int {
	known := s.knownStates()
	var missing []int
	for _, t := range s.spec.Taps {
		if !slices.Contains(known, t.State) {
			missing = append(missing, t.State)
		}
	}
	return missing
}

// level is the error that one variant of a family may have: every family has
// an equal share, and its members divide it.
func level(members int) float64 {
	return familyError / float64(len(hypotheses)*max(members, 1))
}

// significant says that a variant is better than the declared graph, by more
// than relevance, at the level of its family.
func (t trial) significant(members map[string]int) bool {
	return t.wide != nil && t.skilled && t.p < level(members[t.key]) && t.gain.Value > hypothesisOf(t.key).limit(t.a) && t.hits.gain.Value > 0
}

// bestGraph follows the gains: the best significant variant, then whatever
// still adds to it. It returns the keys on that way, and the others that were
// significant alone and add nothing to the best.
func (s *study) bestGraph(ctx context.Context, rep *replica, trials []trial) (best []string, explained map[string]bool, err error) {
	var left []trial
	members := map[string]int{}
	for _, t := range trials {
		members[t.key]++
	}
	for _, t := range trials {
		if t.significant(members) {
			left = append(left, t)
		}
	}
	explained = map[string]bool{}
	if len(left) == 0 {
		return nil, explained, nil
	}
	slices.SortStableFunc(left, func(a, b trial) int { return -cmpFloat(a.gain.Value, b.gain.Value) })
	left = plainerFirst(left)
	top := left[0]
	best = append(best, top.key)
	// One more step: each other family's best on top of the best.
	var graphs []Graph
	var keys []string
	for _, t := range left[1:] {
		if t.key == top.key || slices.Contains(keys, t.key) {
			continue
		}
		keys = append(keys, t.key)
		graphs = append(graphs, merge(Declared(s.spec), top.graph, t.graph))
	}
	if len(graphs) == 0 {
		return best, explained, nil
	}
	s.pickAnchors(s.look * s.Anchors)
	defer s.pickAnchors(s.Anchors)
	ms, err := s.scan(ctx, rep, graphs, variantSlots, false)
	if err != nil {
		return nil, nil, err
	}
	for i, key := range keys {
		t := s.tried(variant{key: key}, top.wide, ms[i])
		if t.wide = ms[i]; t.significant(members) {
			best = append(best, key)
		} else {
			explained[key] = true
		}
	}
	return best, explained, nil
}

// plainerFirst puts the anchor's states in the context before early taps, which
// put them there too and move all others, unless the latter are surely better.
func plainerFirst(left []trial) []trial {
	leak := slices.IndexFunc(left, func(t trial) bool { return t.key == "anchor-leak" })
	if left[0].key != "tap-late" || leak < 0 {
		return left
	}
	if compare(closeness(left[leak].wide), closeness(left[0].wide)).p < familyError {
		return left
	}
	return slices.Concat(left[leak:leak+1], left[:leak], left[leak+1:])
}

// refineOrder exchanges further taps on top of the best order, as long as one
// does better: an order in which more than two are exchanged is found step by
// step. That the order is wrong is known by then, so that a step needs no
// share of the error.
func (s *study) refineOrder(ctx context.Context, rep *replica, trials []trial) ([]trial, error) {
	var top trial
	for _, t := range trials {
		if t.key == "tap-order" && t.wide != nil && (top.wide == nil || t.gain.Value > top.gain.Value) {
			top = t
		}
	}
	s.pickAnchors(s.look * s.Anchors)
	defer s.pickAnchors(s.Anchors)
	declared := Declared(s.spec)
	for range len(s.spec.Taps) - 2 {
		var tried []variant
		tapOrders(top.graph.Taps, func(key, _ string, change func(*Graph)) {
			g := top.graph.clone()
			change(&g)
			if !slices.Equal(g.Taps, declared.Taps) {
				tried = append(tried, variant{key, orderWords(g.Taps), g})
			}
		})
		graphs := []Graph{declared}
		for _, v := range tried {
			graphs = append(graphs, v.graph)
		}
		ms, err := s.scan(ctx, rep, graphs, variantSlots, false)
		if err != nil {
			return nil, err
		}
		better := trial{}
		for i, v := range tried {
			over := s.tried(v, top.wide, ms[i+1])
			if over.wide = ms[i+1]; over.p < familyError && over.gain.Value > 0 && (better.wide == nil || over.gain.Value > better.gain.Value) {
				better = over
			}
		}
		if better.wide == nil {
			break
		}
		top = s.tried(better.variant, ms[0], better.wide)
		top.measured, top.wide = better.wide, better.wide
		trials = append(trials, top)
	}
	return trials, nil
}

func cmpFloat(a, b float64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// merge applies what b changes of d to a.
func merge(d, a, b Graph) Graph {
	m := a.clone()
	if !slices.Equal(b.Taps, d.Taps) {
		m.Taps = b.Taps
	}
	if b.Late != nil {
		m.Late = b.Late
	}
	m.Mute = changed(d.Mute, m.Mute, b.Mute)
	m.Theta = changed(d.Theta, m.Theta, b.Theta)
	m.Rotary = changed(d.Rotary, m.Rotary, b.Rotary)
	m.Offset = changed(d.Offset, m.Offset, b.Offset)
	m.Block = changed(d.Block, m.Block, b.Block)
	m.MaskToken = changed(d.MaskToken, m.MaskToken, b.MaskToken)
	m.Context = changed(d.Context, m.Context, b.Context)
	for i := range d.Attention {
		m.Attention[i] = changed(d.Attention[i], m.Attention[i], b.Attention[i])
	}
	m.Interleaved |= b.Interleaved
	m.Tiled |= b.Tiled
	m.MaskAnchor = m.MaskAnchor || b.MaskAnchor
	m.Relative = m.Relative || b.Relative
	m.Across = m.Across || b.Across
	return m
}

// changed is b where it differs from d, else a.
func changed[T comparable](d, a, b T) T {
	if b != d {
		return b
	}
	return a
}

// judge turns a family's trials into its verdict.
func (s *study) judge(h hypothesis, trials []trial, best []string, explained map[string]bool) (Finding, bool) {
	var own []trial
	for _, t := range trials {
		if t.key == h.key {
			own = append(own, t)
		}
	}
	if len(own) == 0 {
		return Finding{}, false
	}
	top := slices.MaxFunc(own, func(a, b trial) int { return cmpFloat(a.gain.Value, b.gain.Value) })
	f := Finding{Key: h.key, Subject: OfDrafter, Hypothesis: h.hypothesis, weight: top.gain.Value}
	f.describe(s, top)
	f.Control = control(own)
	limit := h.limit(top.a)
	identical, open := 0, 0
	for _, t := range own {
		switch {
		case t.disagree == 0:
			identical++
		case t.gain.High >= limit:
			open++
		}
	}
	switch {
	case slices.Contains(best, h.key):
		top = leader(own)
		f.describe(s, top)
		f.Verdict = Supported
		if top.gain.Low > limit {
			f.Verdict = Confirmed
		}
		f.Sentence = fmt.Sprintf(h.sentence, top.words)
		if h.key != best[0] {
			f.weight /= 2 // it adds to the first
		}
	case explained[h.key]:
		f.Verdict = CannotTell
		f.Needs = "the first finding to be repaired; the gain vanishes on top of it"
		f.Sentence = fmt.Sprintf("%s alone is better too, but adds nothing once %s is put right.", capital(top.words), best[0])
	case identical == len(own):
		f.Verdict = CannotTell
		f.Needs = "longer contexts: here the choice changes no draft"
		f.Sentence = "These sequences cannot show it."
	case open > 0 && !top.skilled:
		f.Verdict, f.Needs = CannotTell, "a drafter that hits more"
		f.Sentence = fmt.Sprintf("Its hits (%.3f) are not much more than drafts without any context would have by chance (%.3f), under this graph as under any other.", top.hits.b, top.chance)
		if s.lag != 0 {
			f.Sentence = "It drafts tokens from before under this graph too: that is not what is wrong with it."
		}
	case open > 0:
		f.Verdict = CannotTell
		f.Needs = fmt.Sprintf("more sequences: a gain of %.1f %% of the mean 1/rank is within the interval", 100*top.gain.High/math.Max(top.a, 1e-9))
		f.Sentence = fmt.Sprintf("Nothing speaks for it, but a small effect cannot be excluded with %d sequences.", len(s.seqs))
	default:
		f.Verdict = RuledOut
		f.Sentence = "The declared setting drafts best, or as well as any other."
	}
	return f, true
}

// describe notes what a variant did.
func (f *Finding) describe(s *study, t trial) {
	f.Effect = &t.hits.gain
	f.Measure = fmt.Sprintf("hits of slots 1–%d: %.3f as declared, %.3f with %s (%s; %.3f by chance); mean 1/rank of the label %.3f and %.3f (%s)",
		min(variantSlots, s.spec.BlockSize-1), t.hits.a, t.hits.b, t.words, t.hits.gain.signed(), t.chance, t.a, t.b, t.gain.signed())
}

// leader is the variant to name: of those that do as well as the best, within
// what is relevant, the first in the family's list, which has the plainest
// first.
func leader(own []trial) trial {
	top := slices.MaxFunc(own, func(a, b trial) int { return cmpFloat(a.gain.Value, b.gain.Value) })
	for _, t := range own {
		if t.b > top.b*(1-relevance/4) {
			return t
		}
	}
	return top
}

// control is what planting the family's strongest member costs.
func control(own []trial) string {
	worst := slices.MinFunc(own, func(a, b trial) int { return cmpFloat(a.hits.gain.Value, b.hits.gain.Value) })
	if worst.hits.gain.Value >= 0 {
		return ""
	}
	return fmt.Sprintf("planted: %s costs %.3f (%s)", worst.words, -worst.hits.gain.Value, worst.hits.gain.signed())
}

// signed is an interval of a difference, in words.
func (i Interval) signed() string {
	return fmt.Sprintf("%+.3f, 95 %% %+.3f to %+.3f", i.Value, i.Low, i.High)
}

// plain is an interval of a level.
func (i Interval) plain() string {
	return fmt.Sprintf("%.3f, 95 %% %.3f to %.3f", i.Value, i.Low, i.High)
}

func capital(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}
