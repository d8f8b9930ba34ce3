package diagnose

import (
	"context"
	"fmt"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
)

// measured is what a graph drafted on one sequence.
type measured struct {
	anchors []int32
	slots   int
	tokens  []int32 // slot k of block i at i*slots+k-1
	ranks   []int32 // of its label, 0 first; -1 where it is unscored
}

// device states of one sequence, uploaded once for all variants.
type uploads struct {
	s      *study
	states [][]float32 // by state, nil where unknown
	length int
	bufs   map[drafter.Tap]cuda.Tensor
}

func (u *uploads) rows(tap drafter.Tap) (cuda.Tensor, error) {
	if t, ok := u.bufs[tap]; ok {
		return t, nil
	}
	if tap.State >= len(u.states) || u.states[tap.State] == nil {
		return cuda.Tensor{}, fmt.Errorf("%w: state %d is not known", ErrCase, tap.State)
	}
	h, dev := u.s.Host, u.s.Device
	buf, err := dev.New(u.length * h.Hidden)
	if err != nil {
		return cuda.Tensor{}, err
	}
	t := cuda.Matrix(buf, u.length, h.Hidden)
	u.bufs[tap] = t
	if err := dev.Upload(t, u.states[tap.State]); err != nil {
		return t, err
	}
	if tap.Normed {
		return t, dev.RMSNorm(t, t, h.FinalNorm, h.Eps, h.Gain)
	}
	return t, nil
}

func (u *uploads) close() {
	for _, t := range u.bufs {
		t.Buf.Close()
	}
}

// states are those that the drafters read of a sequence: recomputed ones where
// there are any, so that a fault of the capture is not taken for one of the
// drafter; else the stored ones.
func (s *study) states(q *subject, stored bool) [][]float32 {
	if q.clean != nil && !stored {
		return q.clean
	}
	out := make([][]float32, s.Host.Layers+1)
	for c, vals := range q.States {
		if c <= s.Host.Layers {
			out[c] = vals
		}
	}
	return out
}

// knownStates lists the states that variants may read.
func (s *study) knownStates() []int {
	var out []int
	for c, vals := range s.states(s.seqs[0], false) {
		if vals != nil {
			out = append(out, c)
		}
	}
	return out
}

// scan drafts with every graph at the sampled anchors of every sequence:
// result [graph][sequence]. Ranks are of the labels s.shift tokens further on.
func (s *study) scan(ctx context.Context, r *replica, graphs []Graph, slots int, stored bool) ([][]measured, error) {
	out := make([][]measured, len(graphs))
	slots = min(slots, r.spec.BlockSize-1)
	for i, q := range s.seqs {
		s.tell(fmt.Sprintf("drafting with %d graphs", len(graphs)), i, len(s.seqs))
		if len(q.sample) == 0 {
			for g := range graphs {
				out[g] = append(out[g], measured{slots: slots})
			}
			continue
		}
		if err := s.scanOne(ctx, r, graphs, q, slots, stored, out); err != nil {
			return nil, fmt.Errorf("drafting on %s: %w", q.ID, err)
		}
	}
	return out, nil
}

func (s *study) scanOne(ctx context.Context, r *replica, graphs []Graph, q *subject, slots int, stored bool, out [][]measured) error {
	up := &uploads{s: s, states: s.states(q, stored), length: len(q.ids), bufs: map[drafter.Tap]cuda.Tensor{}}
	defer up.close()
	b := blocks{anchors: q.sample, slots: slots, length: len(q.ids)}
	for _, a := range q.sample {
		b.tokens = append(b.tokens, q.ids[a])
	}
	labels := make([]int32, 0, len(q.sample)*slots)
	for _, a := range q.sample {
		for k := 1; k <= slots; k++ {
			label := int32(-1)
			if t := int(a) + k; q.scored(t) && q.scored(t+s.shift) {
				label = q.labels[t+s.shift]
			}
			labels = append(labels, label)
		}
	}
	for g, graph := range graphs {
		if err := ctx.Err(); err != nil {
			return err
		}
		tokens, ranks, err := r.draft(graph, up.rows, b, labels)
		if err != nil {
			return err
		}
		out[g] = append(out[g], measured{q.sample, slots, tokens, ranks})
	}
	return nil
}

// hits counts, by sequence, the slots whose draft is the label shift tokens
// further on.
func (s *study) hits(ms []measured, shift int) []count {
	out := make([]count, len(ms))
	for i, m := range ms {
		q := s.seqs[i]
		for j, a := range m.anchors {
			for k := 1; k <= m.slots; k++ {
				t := int(a) + k
				if !q.scored(t) || !q.scored(t+shift) {
					continue
				}
				out[i].scored++
				if m.tokens[j*m.slots+k-1] == q.labels[t+shift] {
					out[i].hits++
				}
			}
		}
	}
	return out
}

// closeness sums, by sequence, 1/(1+rank) of the labels. Like a hit it does
// not depend on how sure a draft is, but a near miss counts for something, so
// that fewer sequences tell two graphs apart.
func closeness(ms []measured) []count {
	out := make([]count, len(ms))
	for i, m := range ms {
		for _, rank := range m.ranks {
			if rank >= 0 {
				out[i].scored++
				out[i].hits += 1 / float64(1+rank)
			}
		}
	}
	return out
}
