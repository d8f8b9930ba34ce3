package target

import (
	"errors"
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

// call is one pass of new rows.
type call struct {
	*Model
	seqs   []*Sequence
	pieces []piece
	pos    []int32             // of every row
	kept   []int32             // row of the arena where its keys and values go
	spans  map[int][]cuda.Span // by window
}

// seen is what every row sees of the arena: its sequence up to itself, or the
// last window of that.
func (c *call) seen(window int) []cuda.Span {
	if s, ok := c.spans[window]; ok {
		return s
	}
	spans := make([]cuda.Span, 0, len(c.pos))
	for i, p := range c.pieces {
		for j := range p.hi - p.lo {
			lo, hi := int32(c.seqs[i].rows.lo), c.kept[p.lo+j]+1
			if window > 0 {
				lo = max(lo, hi-int32(window))
			}
			spans = append(spans, cuda.Span{CtxLo: lo, CtxHi: hi})
		}
	}
	c.spans[window] = spans
	return spans
}

// Sequence is what the model remembers of one sequence: keys and values of
// its attention layers, which grow, and the states of its linear layers.
type Sequence struct {
	model  *Model
	length int
	rows   *extent // of the arena
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

// Reserve makes room for n tokens in all. Without it the room grows as tokens
// come, and doubles.
func (s *Sequence) Reserve(n int) (err error) {
	s.rows, err = s.model.arena.reserve(s.rows, s.length, n)
	return err
}

// Close gives the sequence's device memory back.
func (s *Sequence) Close() {
	for _, p := range s.layers {
		p.close()
	}
	s.model.arena.release(s.rows)
	s.layers, s.rows = nil, nil
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
// appear once. All work is done for all rows at once, but the recurrence of
// linear layers. After an error the sequences must be closed.
func (m *Model) Forward(seqs []*Sequence, ids [][]int32, states []int) (*Output, error) {
	for _, want := range states {
		if err := m.checkState(want); err != nil {
			return nil, err
		}
	}
	out := &Output{States: make([][]float32, len(states))}
	var err error
	out.Final, err = m.run(seqs, ids, func(c int, _ *call, x cuda.Tensor) error {
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
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// Tap asks for one state of a pass.
type Tap struct {
	State int // 0..n
	As    cuda.DType
	// To is where the rows of each sequence go, and stays as it is until the
	// flight has landed; [cuda.Device.HostAlloc] gives the best memory.
	To [][]byte
}

// Capture runs tokens as Forward does. It returns state n, as [Output.Final],
// and one flight a tap: states go to the host beside what is computed next.
func (m *Model) Capture(seqs []*Sequence, ids [][]int32, taps []Tap) (final cuda.Tensor, flights []cuda.Flight, err error) {
	for _, t := range taps {
		if err := m.checkState(t.State); err != nil {
			return final, nil, err
		}
	}
	flights = make([]cuda.Flight, len(taps))
	final, err = m.run(seqs, ids, func(c int, call *call, x cuda.Tensor) error {
		for i, t := range taps {
			if t.State != c {
				continue
			}
			to := make([]cuda.Landing, len(call.pieces))
			for j, p := range call.pieces {
				to[j] = cuda.Landing{Lo: p.lo, Hi: p.hi, To: t.To[j]}
			}
			var err error
			if flights[i], err = m.dev.Fetch(x, t.As, to); err != nil {
				return fmt.Errorf("fetching state %d: %w", c, err)
			}
		}
		return nil
	})
	if err != nil {
		for _, f := range flights { // nothing may land later
			if f != nil {
				_, e := f.Wait()
				err = errors.Join(err, e)
			}
		}
		return final, nil, err
	}
	return final, flights, nil
}

func (m *Model) checkState(c int) error {
	if c < 0 || c > m.cfg.Layers {
		return fmt.Errorf("%w: state %d of a model with states 0..%d", ErrInput, c, m.cfg.Layers)
	}
	return nil
}

// run computes the rows of one pass; each state in turn is shown to visit.
func (m *Model) run(seqs []*Sequence, ids [][]int32, visit func(c int, call *call, x cuda.Tensor) error) (cuda.Tensor, error) {
	var none cuda.Tensor
	c := &call{Model: m, seqs: seqs, spans: map[int][]cuda.Span{}}
	var flat []int32
	for i, s := range seqs {
		if err := m.checkNext(s, ids[i]); err != nil {
			return none, err
		}
		c.pieces = append(c.pieces, piece{len(flat), len(flat) + len(ids[i]), s.length})
		flat = append(flat, ids[i]...)
	}
	for i, s := range seqs {
		if err := s.Reserve(s.length + len(ids[i])); err != nil {
			return none, err
		}
		for j := range ids[i] {
			c.pos = append(c.pos, int32(s.length+j))
			if s.rows != nil {
				c.kept = append(c.kept, int32(s.rows.lo+s.length+j))
			}
		}
	}
	x, err := m.work("x", len(flat), m.cfg.Hidden)
	if err != nil {
		return none, err
	}
	if err := m.dev.GatherRows(x, m.embed, flat); err != nil {
		return none, fmt.Errorf("looking up embeddings: %w", err)
	}
	if err := visit(0, c, x); err != nil {
		return none, err
	}
	pasts := make([]past, len(seqs))
	for i := range m.layers {
		for j, s := range seqs {
			pasts[j] = s.layers[i]
		}
		if err := c.layer(&m.layers[i], pasts, x); err != nil {
			return none, fmt.Errorf("running layer %d: %w", i, err)
		}
		if err := visit(i+1, c, x); err != nil {
			return none, err
		}
	}
	for i, s := range seqs {
		s.length += len(ids[i])
	}
	return x, nil
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
	both, err := c.project("gate and up", u, l.gateUp)
	if err != nil {
		return err
	}
	gate, up := both.ColRange(0, l.down.Cols), both.ColRange(l.down.Cols, both.Cols)
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
