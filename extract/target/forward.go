package target

import (
	"fmt"

	"github.com/draftscope/draftscope/cuda"
)

// mixer is the part of a layer that mixes positions.
type mixer interface {
	// mix adds the mixer's output for the normed rows u to x. Both are
	// [rows, H] and hold the rows of call's pieces one after another.
	mix(call *call, pasts []past, u, x cuda.Tensor) error
	// remember makes the past of one sequence in this layer.
	remember(dev cuda.Device) (past, error)
}

// past is what one layer keeps of one sequence.
type past interface{ close() }

// piece is the new rows lo..hi-1 of a call that belong to one sequence, whose
// first stands at position pos.
type piece struct{ lo, hi, pos int }

// call is one Forward.
type call struct {
	*Model
	pieces []piece
	pos    []int32 // of every row
}

// Sequence is what the model remembers of one sequence: keys and values of
// its attention layers, which grow, and the states of its linear layers.
type Sequence struct {
	model  *Model
	length int
	layers []past
}

// NewSequence begins an empty sequence. The caller closes it.
func (m *Model) NewSequence() (*Sequence, error) {
	s := &Sequence{model: m}
	for i, l := range m.layers {
		p, err := l.mixer.remember(m.dev)
		if err != nil {
			s.Close()
			return nil, fmt.Errorf("beginning a sequence: layer %d: %w", i, err)
		}
		s.layers = append(s.layers, p)
	}
	return s, nil
}

// Len is the number of tokens that the sequence has been through.
func (s *Sequence) Len() int { return s.length }

// Close gives the sequence's device memory back.
func (s *Sequence) Close() {
	for _, p := range s.layers {
		p.close()
	}
	s.layers = nil
}

// Output is the states of one Forward.
type Output struct {
	// States holds, for each state asked for, rows*H values; the rows of the
	// sequences follow one another as in the call.
	States [][]float32
	// Final is state n of all rows on the device, before the final norm. It
	// is a view that lives until the next call.
	Final cuda.Tensor
}

// Forward runs the next tokens of several sequences, ids[i] being those of
// seqs[i], and returns the states asked for, each in 0..n. Every sequence may
// appear once. Projections run over all rows at once, attention and
// recurrence by sequence. After an error the sequences must be closed.
func (m *Model) Forward(seqs []*Sequence, ids [][]int32, states []int) (*Output, error) {
	c := &call{Model: m}
	var flat []int32
	for i, s := range seqs {
		if err := m.checkNext(s, ids[i]); err != nil {
			return nil, err
		}
		c.pieces = append(c.pieces, piece{len(flat), len(flat) + len(ids[i]), s.length})
		flat = append(flat, ids[i]...)
		for j := range ids[i] {
			c.pos = append(c.pos, int32(s.length+j))
		}
	}
	for _, want := range states {
		if want < 0 || want > m.cfg.Layers {
			return nil, fmt.Errorf("%w: state %d of a model with states 0..%d", ErrInput, want, m.cfg.Layers)
		}
	}
	x, err := m.work("x", len(flat), m.cfg.Hidden)
	if err != nil {
		return nil, err
	}
	if err := m.dev.GatherRows(x, m.embed, flat); err != nil {
		return nil, fmt.Errorf("looking up embeddings: %w", err)
	}
	out := &Output{States: make([][]float32, len(states)), Final: x}
	if err := m.keep(out, states, 0, x); err != nil {
		return nil, err
	}
	pasts := make([]past, len(seqs))
	for i := range m.layers {
		for j, s := range seqs {
			pasts[j] = s.layers[i]
		}
		if err := c.layer(&m.layers[i], pasts, x); err != nil {
			return nil, fmt.Errorf("running layer %d: %w", i, err)
		}
		if err := m.keep(out, states, i+1, x); err != nil {
			return nil, err
		}
	}
	for i, s := range seqs {
		s.length += len(ids[i])
	}
	return out, nil
}

func (m *Model) checkNext(s *Sequence, ids []int32) error {
	if s.model != m || s.layers == nil {
		return fmt.Errorf("%w: the sequence is closed, or another model's", ErrInput)
	}
	if n := s.length + len(ids); n > m.cfg.MaxPositions {
		return fmt.Errorf("%w: %d tokens, the model takes %d", ErrInput, n, m.cfg.MaxPositions)
	}
	for i, id := range ids {
		if id < 0 || int(id) >= m.cfg.Vocab {
			return fmt.Errorf("%w: token %d at position %d, the vocabulary has %d", ErrInput, id, s.length+i, m.cfg.Vocab)
		}
	}
	return nil
}

// keep copies state c to the host wherever it was asked for.
func (m *Model) keep(out *Output, states []int, c int, x cuda.Tensor) error {
	for i, want := range states {
		if want != c {
			continue
		}
		out.States[i] = make([]float32, x.Rows*x.Cols)
		if err := m.dev.Download(out.States[i], x); err != nil {
			return fmt.Errorf("reading state %d: %w", c, err)
		}
	}
	return nil
}

func (c *call) layer(l *layer, pasts []past, x cuda.Tensor) error {
	u, err := c.work("u", x.Rows, x.Cols)
	if err != nil {
		return err
	}
	if err := c.dev.RMSNorm(u, x, l.before, c.cfg.Eps, c.cfg.gain()); err != nil {
		return err
	}
	if err := l.mixer.mix(c, pasts, u, x); err != nil {
		return err
	}
	if err := c.dev.RMSNorm(u, x, l.after, c.cfg.Eps, c.cfg.gain()); err != nil {
		return err
	}
	gate, err := c.project("gate", u, l.gate)
	if err != nil {
		return err
	}
	up, err := c.project("up", u, l.up)
	if err != nil {
		return err
	}
	if err := c.dev.GateMul(up, gate, up, cuda.SiLU); err != nil {
		return err
	}
	return c.dev.Gemm(x, up, l.down, true)
}

// project is u · wᵀ in scratch memory of that name.
func (c *call) project(name string, u, w cuda.Tensor) (cuda.Tensor, error) {
	y, err := c.work(name, u.Rows, w.Rows)
	if err != nil {
		return y, err
	}
	return y, c.dev.Gemm(y, u, w, false)
}

// Normed applies the final norm to rows of state n, in scratch memory that
// lives until the next call: what the head reads.
func (m *Model) Normed(final cuda.Tensor) (cuda.Tensor, error) {
	y, err := m.work("normed", final.Rows, final.Cols)
	if err != nil {
		return y, err
	}
	return y, m.dev.RMSNorm(y, final, m.norm, m.cfg.Eps, m.cfg.gain())
}
