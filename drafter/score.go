package drafter

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/schemas"
)

// tileAnchors is how many blocks are drafted and scored in one pass. It bounds
// scratch memory and changes no number.
const tileAnchors = 64

// scorer turns tiles of anchors into rows of the tables drafts and slots, and
// into outcomes of rounds.
type scorer struct {
	dev    cuda.Device
	k      int // candidates that the table drafts keep of a slot
	topK   int // candidates that the trees need
	losses cuda.Losses
	// compact holds the target states that one tile is compared with.
	compact scratch
}

// tile is one pass: blocks at anchors, and what the head said of slot k of
// block i in row i*(b-1)+k-1.
type tile struct {
	seq     *sequence
	lane    *lane
	anchors []int32
	b       int
	slots   []schemas.Slot
	head    cuda.HeadResult
}

// score drafts blocks at anchors, which are ascending, and adds their rows and
// outcomes to the lane. Every token before anchor+B that the sequence will
// ever have must be there already. A draft that is not finite is a fault of
// the lane. It gives back what the head could not do without.
func (s *scorer) score(seq *sequence, l *lane, anchors []int32) (cuda.Work, error) {
	t := &tile{seq: seq, lane: l, anchors: anchors, b: l.drafter.BlockSize()}
	tokens := make([]int32, len(anchors))
	for i, a := range anchors {
		tokens[i] = seq.tokens[a]
	}
	var work cuda.Work
	z, err := l.context.Draft(anchors, tokens)
	if err != nil {
		return work, err
	}
	labels := t.truths()
	args := cuda.HeadArgs{Hidden: z, Weight: l.drafter.head, K: s.topK, Labels: labels}
	if err := s.compare(&args, t); err != nil {
		return work, err
	}
	if t.head, err = s.dev.Head(args); err != nil {
		return work, fmt.Errorf("scoring %d anchors: %w", len(anchors), err)
	}
	work = headWork(z.Rows+args.Target.Rows, args.Weight)
	if row := t.notFinite(s.topK, labels); row >= 0 {
		sl := t.slots[row]
		l.fail(checkFinite, fmt.Sprintf("the draft at anchor %d, slot %d is not finite", sl.Anchor, sl.Slot))
		return work, nil
	}
	t.fill(s.k, s.topK, labels, args.TargetRow)
	l.slots = append(l.slots, t.slots...)
	logprobs := t.logprobs(s.topK)
	for i := range anchors {
		l.drafts = append(l.drafts, t.draft(i, s.k, s.topK, logprobs))
	}
	return work, t.verify(s.dev, s.topK, logprobs)
}

// truths starts the rows of the table slots with what is known before
// drafting, and gives the label of each scored slot, -1 for the others.
func (t *tile) truths() []int32 {
	n := len(t.anchors) * (t.b - 1)
	t.slots = make([]schemas.Slot, n)
	labels := make([]int32, n)
	known := make([]struct {
		label, data int32
		mask        bool
	}, n)
	length := len(t.seq.tokens)
	for row := range t.slots {
		a, k := int(t.anchors[row/(t.b-1)]), row%(t.b-1)+1
		sl, v := &t.slots[row], &known[row]
		sl.SeqID, sl.Anchor, sl.Slot = t.seq.id, int32(a), int32(k)
		labels[row] = -1
		if a+k >= length {
			continue // past the stored end: no data token, and no label
		}
		v.data, v.mask, v.label = t.seq.tokens[a+k], t.seq.mask[a+k], t.seq.labels[a+k-1]
		sl.DataToken, sl.LossMask = &v.data, &v.mask
		if v.label >= 0 {
			sl.Label = &v.label
			if v.mask {
				labels[row] = v.label
			}
		}
	}
	return labels
}

// compare adds to args the target's distributions for the scored slots, each
// state once. It does nothing where they are not asked for or not known.
func (s *scorer) compare(args *cuda.HeadArgs, t *tile) error {
	if s.losses == 0 || t.seq.final == nil || t.lane.drafter.OwnHead() {
		return nil
	}
	args.TargetRow = make([]int32, len(t.slots))
	var rows []int32 // positions, ascending
	at := map[int32]int32{}
	for i, sl := range t.slots {
		args.TargetRow[i] = -1
		if args.Labels[i] < 0 {
			continue
		}
		pos := sl.Anchor + sl.Slot - 1
		if _, ok := at[pos]; !ok {
			at[pos] = int32(len(rows))
			rows = append(rows, pos)
		}
		args.TargetRow[i] = at[pos]
	}
	if len(rows) == 0 {
		args.TargetRow = nil
		return nil
	}
	o := ops{dev: s.dev}
	args.Losses = s.losses
	args.Target = s.compact.tensor(&o, "target", len(rows), args.Hidden.Cols)
	o.gather(args.Target, t.seq.finalRows(), rows)
	return o.err
}

// notFinite is the first row with a number that must not be stored, -1 if
// there is none.
func (t *tile) notFinite(topK int, labels []int32) int {
	h := t.head
	for row := range t.slots {
		ok := finite(h.LSE[row])
		for _, v := range h.TopLogits[row*topK : (row+1)*topK] {
			ok = ok && finite(v-h.LSE[row])
		}
		if labels[row] >= 0 {
			ok = ok && finite(h.LabelLogit[row])
			for _, loss := range [][]float32{h.KL, h.RKL, h.JSD, h.TV} {
				ok = ok && (loss == nil || finite(loss[row]))
			}
		}
		if !ok {
			return row
		}
	}
	return -1
}

// fill completes the rows of the table slots. Measures of unscored slots stay
// NULL: neither a miss nor a 0.
func (t *tile) fill(k, topK int, labels, targetRow []int32) {
	h := t.head
	values := make([]struct {
		hit  bool
		rank int32
		ce   float32
	}, len(t.slots))
	for row := range t.slots {
		sl, v := &t.slots[row], &values[row]
		sl.DraftToken = h.TopIDs[row*topK]
		sl.DraftLogprob = h.TopLogits[row*topK] - h.LSE[row]
		if labels[row] < 0 {
			continue
		}
		v.hit = sl.DraftToken == labels[row]
		v.ce = h.LSE[row] - h.LabelLogit[row]
		v.rank = h.LabelRank[row]
		sl.Hit, sl.CE = &v.hit, &v.ce
		if int(v.rank) < k {
			sl.Rank = &v.rank
		}
		if targetRow == nil {
			continue
		}
		for _, loss := range []struct {
			from []float32
			to   **float32
		}{{h.KL, &sl.KL}, {h.RKL, &sl.RKL}, {h.JSD, &sl.JSD}, {h.TV, &sl.TV}} {
			if loss.from != nil {
				*loss.to = &loss.from[row]
			}
		}
	}
}

// logprobs are those of the head's candidates, in their order.
func (t *tile) logprobs(topK int) []float32 {
	out := make([]float32, len(t.head.TopLogits))
	for i, v := range t.head.TopLogits {
		out[i] = v - t.head.LSE[i/topK]
	}
	return out
}

// draft is block i as a row of the table drafts, k candidates a slot.
func (t *tile) draft(i, k, topK int, logprobs []float32) schemas.Draft {
	d := schemas.Draft{
		SeqID: t.seq.id, Anchor: t.anchors[i],
		DraftTokens: make([]int32, 0, t.b-1),
		TopIDs:      make([]int32, 0, (t.b-1)*k), TopLogprobs: make([]float32, 0, (t.b-1)*k),
	}
	for row := i * (t.b - 1); row < (i+1)*(t.b-1); row++ {
		ids := t.head.TopIDs[row*topK:][:k]
		d.DraftTokens = append(d.DraftTokens, ids[0])
		d.TopIDs = append(d.TopIDs, ids...)
		d.TopLogprobs = append(d.TopLogprobs, logprobs[row*topK:][:k]...)
	}
	return d
}

// verify replays the target's verification of what each method proposes at the
// tile's anchors, and keeps the outcomes. The stored continuation answers for
// the target: it is the target's argmax on greedy text and its own sample
// otherwise, so in both cases what a round would have committed. It ends where
// tokens end or stop being the target's own, and a round needs no more of it
// than anchor..anchor+B-1.
func (t *tile) verify(dev cuda.Device, topK int, logprobs []float32) error {
	args := cuda.TreeArgs{
		Depth: t.b - 1, K: topK, IDs: t.head.TopIDs, Logprobs: logprobs,
		Tokens: t.seq.tokens, Anchors: t.anchors, Ends: make([]int32, len(t.anchors)),
	}
	for i, a := range t.anchors {
		end := int(a)
		for end < min(len(t.seq.mask), int(a)+t.b) && t.seq.mask[end] {
			end++
		}
		args.Ends[i] = int32(end)
	}
	for _, m := range t.lane.methods {
		if m.Name == schemas.MethodDDTree {
			args.Budgets = append(args.Budgets, m.Budget)
		}
	}
	got, err := dev.Trees(args)
	if err != nil {
		return fmt.Errorf("verifying at %d anchors: %w", len(t.anchors), err)
	}
	n := len(args.Budgets)
	for i, a := range t.anchors {
		t.lane.outcomes[a] = append([]cuda.Outcome{got.Chains[i]}, got.Trees[i*n:(i+1)*n]...)
	}
	return nil
}
