package tap

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/schemas"
)

// sameModel compares what an engine says of its model with the target.
func sameModel(h Hello, m *target.Model) error {
	c := m.Config()
	var errs []error
	for _, x := range []struct {
		what       string
		has, wants int
	}{{"layers", h.Model.Layers, c.Layers}, {"hidden", h.Model.Hidden, c.Hidden}, {"vocabulary", h.Model.Vocab, c.Vocab}} {
		if x.has != x.wants {
			errs = append(errs, fmt.Errorf("%w: the engine's model has %s %d and the target %d; give the --target that the engine runs", ErrClaim, x.what, x.has, x.wants))
		}
	}
	if p := h.Model.Fingerprint; p != "" && p != m.Fingerprint() {
		errs = append(errs, fmt.Errorf("%w: the engine's model has the fingerprint %.12s and the target %.12s", ErrClaim, p, m.Fingerprint()))
	}
	if len(errs) == 0 && h.FinalNorm.SHA256 != "" {
		sum, err := normSum(m)
		if err != nil {
			return err
		}
		if sum != h.FinalNorm.SHA256 {
			errs = append(errs, fmt.Errorf("%w: the weights of the engine's final norm are not the target's; give the --target that the engine runs", ErrClaim))
		}
	}
	return errors.Join(errs...)
}

// normSum is the hash of the final norm's weights that a hello carries.
func normSum(m *target.Model) (string, error) {
	w, _, _ := m.FinalNorm()
	vals := make([]float32, w.Rows*w.Cols)
	if err := m.Device().Download(vals, w); err != nil {
		return "", fmt.Errorf("reading the final norm: %w", err)
	}
	var raw []byte
	for _, v := range vals {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(v))
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:]), nil
}

// prober runs a few rows of a sequence natively, and finds out what the
// engine's states are.
type prober struct {
	model  *target.Model
	states []int // claimed
	format format
	dtype  schemas.DType // of the rows
}

const (
	// probeWindow bounds the tokens that are run again.
	probeWindow = 512
	// probeEdge is how many rows are compared at each end of the window.
	probeEdge = 8
	// probePiece bounds the rows of one forward pass.
	probePiece = 256
	// A state must be this near to what it is said to be. Engines compute in
	// 16 bits and the target in 32, which costs a deep model about 0.5 % of
	// cosine and a tenth of distance; a layer more or less costs more.
	nearCosine   = 0.98
	nearDistance = 0.25
)

// nearness is how near two sets of rows are, as means over the rows.
type nearness struct{ cosine, distance float64 }

func (n nearness) String() string {
	return fmt.Sprintf("cosine %.4f, distance %.3f", n.cosine, n.distance)
}

// test compares rows of q with the target's. An error that wraps [ErrClaim]
// names, for each state that is not what the engine calls it, what it is.
func (p prober) test(q *sequence) error {
	rows := probeRows(min(len(q.ids), probeWindow))
	if len(rows) == 0 {
		return nil // one row says nothing: its state may be any token's
	}
	native, err := p.run(q.ids, rows)
	if err != nil {
		return fmt.Errorf("testing the states of sequence %s: running the target: %w", q.id, err)
	}
	var wrong []string
	for i, c := range p.states {
		got := make([][]float32, len(rows))
		for j, r := range rows {
			got[j] = q.rowsOf(i, r, r+1, p.dtype)
		}
		if verdict := p.judge(c, got, native, rows); verdict != "" {
			wrong = append(wrong, fmt.Sprintf("state %d: %s", c, verdict))
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	return fmt.Errorf("%w: sequence %s: %s", ErrClaim, q.id, strings.Join(wrong, "; "))
}

// probeRows are the rows of a window that are compared: both ends of it, but
// for the first row, whose state is huge in many models and says little.
func probeRows(window int) []int {
	var rows []int
	for r := 1; r < window; r++ {
		if r <= probeEdge || r >= window-probeEdge {
			rows = append(rows, r)
		}
	}
	return rows
}

// natives are the target's states: by name, then by row.
type natives map[string]map[int][]float32

func nameOf(c int) string { return fmt.Sprintf("state %d", c) }

// run computes all states of the rows around those asked for, and the final
// norm of the last.
func (p prober) run(ids []int32, rows []int) (natives, error) {
	n, h := p.model.Config().Layers, p.model.Config().Hidden
	want := map[int]bool{}
	for _, r := range rows {
		want[r-1], want[r], want[r+1] = true, true, true
	}
	all := make([]int, n+1)
	for c := range all {
		all[c] = c
	}
	seq, err := p.model.NewSequence()
	if err != nil {
		return nil, err
	}
	defer seq.Close()
	out := natives{normed: {}}
	for _, c := range all {
		out[nameOf(c)] = map[int][]float32{}
	}
	end := min(len(ids), rows[len(rows)-1]+2)
	for lo := 0; lo < end; {
		// A piece is all wanted or all unwanted: states of a piece that nobody
		// compares are not read back.
		hi := lo + 1
		for hi < end && hi < lo+probePiece && want[hi] == want[lo] {
			hi++
		}
		states := all
		if !want[lo] {
			states = nil
		}
		got, err := p.model.Forward([]*target.Sequence{seq}, [][]int32{ids[lo:hi]}, states)
		if err != nil {
			return nil, err
		}
		if states != nil {
			for c, vals := range got.States {
				for r := lo; r < hi; r++ {
					out[nameOf(c)][r] = vals[(r-lo)*h : (r-lo+1)*h]
				}
			}
			if err := p.normed(out, got.Final, lo, hi); err != nil {
				return nil, err
			}
		}
		lo = hi
	}
	return out, nil
}

const normed = "the last state after the final norm"

func (p prober) normed(out natives, final cuda.Tensor, lo, hi int) error {
	y, err := p.model.Normed(final)
	if err != nil {
		return err
	}
	h := y.Cols
	vals := make([]float32, y.Rows*h)
	if err := p.model.Device().Download(vals, y); err != nil {
		return err
	}
	for r := lo; r < hi; r++ {
		out[normed][r] = vals[(r-lo)*h : (r-lo+1)*h]
	}
	return nil
}

// judge says what is wrong with the rows got, which are claimed to be state
// c; "" when they are.
func (p prober) judge(c int, got [][]float32, native natives, rows []int) string {
	claimed, _ := near(got, native[nameOf(c)], rows, 0)
	best, bestName := claimed, ""
	try := func(name string, vals [][]float32, of map[int][]float32, shift int) {
		if n, ok := near(vals, of, rows, shift); ok && n.distance < best.distance {
			best, bestName = n, name
		}
	}
	for name, of := range native {
		if name != nameOf(c) {
			try("it is "+name, got, of, 0)
		}
	}
	for _, shift := range []int{-1, 1} {
		try(fmt.Sprintf("its rows are those of the token %+d", shift), got, native[nameOf(c)], shift)
	}
	if other, name := p.reread(got); other != nil {
		try(name, other, native[nameOf(c)], 0)
	}
	fits := claimed.cosine >= nearCosine && claimed.distance <= nearDistance
	switch {
	case bestName != "" && best.cosine >= nearCosine && best.distance <= nearDistance:
		return fmt.Sprintf("%s (%v; as claimed %v)", bestName, best, claimed)
	case fits:
		return ""
	}
	return fmt.Sprintf("it is none of the target's states (%v; a missing prefix, other weights, or padding taken for tokens?)", claimed)
}

// reread is the same bytes as the other 16-bit type.
func (p prober) reread(got [][]float32) (vals [][]float32, name string) {
	bits := func(v float32) uint16 { return uint16(math.Float32bits(v) >> 16) }
	read := half
	name = "its bytes are f16, sent as bf16"
	switch p.format.name {
	case "f16":
		bits, name = toHalf, "its bytes are bf16, sent as f16"
		read = func(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }
	case "bf16":
	default:
		return nil, ""
	}
	for _, row := range got {
		out := make([]float32, len(row))
		for i, v := range row {
			out[i] = read(bits(v))
		}
		vals = append(vals, out)
	}
	return vals, name
}

// toHalf is the half that v, which was a half, came from.
func toHalf(v float32) uint16 {
	bits := math.Float32bits(v)
	sign := uint16(bits>>16) & 0x8000
	exp, frac := int(bits>>23)&0xff-127+15, bits&0x7fffff
	switch {
	case exp >= 0x1f:
		return sign | 0x7c00 | uint16(frac>>13)
	case exp <= 0:
		return sign | uint16(math.Abs(float64(v))*(1<<24))
	}
	return sign | uint16(exp)<<10 | uint16(frac>>13)
}

// near compares rows with those of of that lie shift away. It is not ok where
// none is there to compare.
func near(got [][]float32, of map[int][]float32, rows []int, shift int) (n nearness, ok bool) {
	count := 0.0
	for j, r := range rows {
		want := of[r+shift]
		if want == nil {
			continue
		}
		var dot, gg, ww, dd float64
		for i, v := range got[j] {
			g, w := float64(v), float64(want[i])
			dot, gg, ww, dd = dot+g*w, gg+g*g, ww+w*w, dd+(g-w)*(g-w)
		}
		if gg > 0 && ww > 0 {
			n.cosine += dot / math.Sqrt(gg*ww)
		}
		n.distance += math.Sqrt(dd / max(ww, 1e-30))
		count++
	}
	if count == 0 {
		return nearness{distance: math.Inf(1)}, false
	}
	return nearness{n.cosine / count, n.distance / count}, true
}
