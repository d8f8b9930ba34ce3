package diagnose

import (
	"fmt"
	"math"
	"slices"
)

// normForm is what was done to a state before it was recorded.
type normForm int

const (
	asComputed  normForm = iota
	finalNormed          // by the target's final norm
	otherNormed          // by one whose gain has the other form, 1+w for w
	twiceNormed
)

// source is what a stored state is compared with: a state, in some form, of
// the token that stands by rows further on.
type source struct {
	state int
	norm  normForm
	by    int
}

func (s source) String() string {
	words := fmt.Sprintf("state %d", s.state)
	switch s.norm {
	case finalNormed:
		words += " after the final norm"
	case otherNormed:
		words += " after a final norm whose gain has the other form (1+w for w)"
	case twiceNormed:
		words += " after the final norm, twice"
	}
	switch {
	case s.by == 1:
		words += " of the next token"
	case s.by == -1:
		words += " of the token before"
	case s.by != 0:
		words += fmt.Sprintf(" of the token %+d", s.by)
	}
	return words
}

// causeKind is why a recorded state is not the recomputed one.
type causeKind int

const (
	asRecomputed causeKind = iota // it is
	elsewhere                     // another state, form or row is recorded
	empty                         // rows are zero, or repeat the row before
	halfAsBF16                    // the bits of half floats were read as bf16
	bf16AsHalf                    // and the other way
	scaled                        // a factor
	unexplained                   // noise, or another computation
)

// cause explains a recorded state of a sequence.
type cause struct {
	kind causeKind
	from source // of elsewhere
}

// verdictOf is what was found of a state in one sequence.
type verdictOf struct {
	cause
	own, left count // distances as recorded, and when the cause is put right
	rows      int   // that the cause concerns
	coded     bool  // the values are codes of at most 8 bits
	detail    string
}

// explain finds why state c of a sequence is not the recomputed one.
func (s *study) explain(q *subject, c int, norms map[normForm]normer) verdictOf {
	limit, h := s.Capture.drift(), s.Host.Hidden
	stored, clean := q.States[c], q.clean[c]
	out := verdictOf{rows: len(q.ids)}
	s.distance(&out.own, q, stored, source{state: c}, norms)
	out.left = out.own
	gone, rest, where := emptyRows(stored, clean, h, limit)
	if gone > 0 && rest.rate() <= limit {
		out.kind, out.rows, out.left = empty, gone, rest
		out.detail = fmt.Sprintf("%s, token %d first", q.ID, where)
		return out
	}
	if out.own.rate() <= limit {
		out.coded = isCoded(stored, clean)
		return out
	}
	if out.coded = isCoded(stored, clean); out.coded {
		return out
	}
	half := out.own.rate() / 2
	better := func(kind causeKind, from source, d count) bool {
		if d.scored == 0 || !(d.rate() < half) || !(d.rate() < out.left.rate()) {
			return false
		}
		out.cause, out.left = cause{kind, from}, d
		return true
	}
	for _, src := range s.sourcesOf(c) {
		var d count
		s.distance(&d, q, stored, src, norms)
		better(elsewhere, src, d)
	}
	for _, kind := range []causeKind{halfAsBF16, bf16AsHalf} {
		var d count
		s.distance(&d, q, reread(stored, kind), source{state: c}, norms)
		better(kind, source{}, d)
	}
	if factor := factorOf(stored, clean); factor > 0 {
		var d count
		s.distance(&d, q, times(stored, 1/factor), source{state: c}, norms)
		if better(scaled, source{}, d) {
			out.detail = fmt.Sprintf("it is %.4g times what it should be", factor)
		}
	}
	if out.kind == asRecomputed {
		out.kind = unexplained
		out.detail = s.beginning(q, stored, clean, limit)
	}
	return out
}

// sourcesOf is what could stand in the place of state c.
func (s *study) sourcesOf(c int) (out []source) {
	n := s.Host.Layers
	for u := range n + 1 {
		if u != c {
			out = append(out, source{state: u})
		}
	}
	for by := -mistakeRows; by <= mistakeRows; by++ {
		if by != 0 {
			out = append(out, source{state: c, by: by})
		}
	}
	for _, form := range []normForm{finalNormed, otherNormed, twiceNormed} {
		out = append(out, source{state: c, norm: form})
		if c != n {
			out = append(out, source{state: n, norm: form})
		}
	}
	return out
}

// beginning says from where on a sequence deviates, and what does that.
func (s *study) beginning(q *subject, stored, clean []float32, limit float64) string {
	h := s.Host.Hidden
	first := 0
	for first < len(q.ids)-1 && !(rowDistance(stored[first*h:(first+1)*h], clean[first*h:(first+1)*h]) > limit) {
		first++
	}
	switch {
	case first == 0:
		return "from the first token on they differ, as with other weights (of another checkpoint, or quantised) or with a text before these tokens that is not among them"
	case q.Tokens[first].Turn != q.Tokens[first-1].Turn:
		return fmt.Sprintf("each is right up to the begin of a later turn (%s, token %d), as where turns are computed apart or their positions begin anew", q.ID, first)
	}
	return fmt.Sprintf("they are right up to a token (%s, token %d) and differ from there on, as where a cache was lost, positions begin anew or texts are packed", q.ID, first)
}

// normer norms a row into dst.
type normer func(dst, row []float32)

// finalNorms are the target's final norm on the host, in every form.
func (s *study) finalNorms() map[normForm]normer {
	norm := s.finalNorm()
	other := *s
	other.Host.Gain = 1 - s.Host.Gain
	return map[normForm]normer{finalNormed: norm, otherNormed: other.finalNorm(), twiceNormed: func(dst, row []float32) {
		norm(dst, row)
		norm(dst, dst)
	}}
}

// distance adds the relative distances of rows of stored to a source's.
func (s *study) distance(to *count, q *subject, stored []float32, src source, norms map[normForm]normer) {
	h := s.Host.Hidden
	row := make([]float32, h)
	for t := range q.ids {
		from := t + src.by
		if from < 0 || from >= len(q.ids) {
			continue
		}
		want := q.clean[src.state][from*h : (from+1)*h]
		if src.norm != asComputed {
			norms[src.norm](row, want)
			want = row
		}
		if d := rowDistance(stored[t*h:(t+1)*h], want); !math.IsNaN(d) {
			to.hits += d
			to.scored++
		}
	}
}

// rowDistance is |a − b| / |b|, NaN for b of zeros.
func rowDistance(a, b []float32) float64 {
	var diff, ref float64
	for i, v := range a {
		d := float64(v) - float64(b[i])
		diff += d * d
		ref += float64(b[i]) * float64(b[i])
	}
	if ref == 0 {
		return math.NaN()
	}
	return math.Sqrt(diff / ref)
}

// finalNorm is the target's final norm on the host.
func (s *study) finalNorm() normer {
	h := s.Host
	w := make([]float32, h.Hidden)
	if err := s.Device.Download(w, h.FinalNorm); err != nil {
		return func(_, _ []float32) {}
	}
	return func(dst, row []float32) {
		var sum float64
		for _, v := range row {
			sum += float64(v) * float64(v)
		}
		scale := 1 / math.Sqrt(sum/float64(len(row))+float64(h.Eps))
		for i, v := range row {
			dst[i] = float32(float64(v) * scale * float64(h.Gain+w[i]))
		}
	}
}

// emptyRows counts rows that are zero or repeat the row before where the
// recomputed ones do not, with the distances of the others and the first.
func emptyRows(stored, clean []float32, h int, limit float64) (gone int, rest count, where int) {
	where = -1
	for t := range len(stored) / h {
		row, want := stored[t*h:(t+1)*h], clean[t*h:(t+1)*h]
		zero := !slices.ContainsFunc(row, func(v float32) bool { return v != 0 }) && slices.ContainsFunc(want, func(v float32) bool { return v != 0 })
		again := t > 0 && slices.Equal(row, stored[(t-1)*h:t*h]) && rowDistance(want, clean[(t-1)*h:t*h]) > limit
		if zero || again {
			gone++
			if where < 0 {
				where = t
			}
			continue
		}
		if d := rowDistance(row, want); !math.IsNaN(d) {
			rest.hits += d
			rest.scored++
		}
	}
	if rest.scored == 0 { // nothing else is there
		rest.scored = 1
	}
	return gone, rest, where
}

// mostCodes is how many different values codes of 8 bits have.
const mostCodes = 256

// isCoded says that a state has no more different values than codes of 8 bits
// have, and is the recomputed one to within a step of them: it was rounded so,
// whatever the record says.
func isCoded(stored, clean []float32) bool {
	seen := map[float32]bool{}
	lo, hi, off := math.Inf(1), math.Inf(-1), 0.0
	for i, v := range stored {
		if seen[v] = true; len(seen) > mostCodes {
			return false
		}
		lo, hi = math.Min(lo, float64(v)), math.Max(hi, float64(v))
		off = math.Max(off, math.Abs(float64(v)-float64(clean[i])))
	}
	return len(stored) > 8*mostCodes && off <= (hi-lo)/(mostCodes/2)
}

// reread reads the 16 bits of every value as the other kind of float.
func reread(stored []float32, kind causeKind) []float32 {
	out := make([]float32, len(stored))
	for i, v := range stored {
		b := math.Float32bits(v)
		if kind == halfAsBF16 {
			out[i] = halfValue(uint16(b >> 16))
			continue
		}
		out[i] = math.Float32frombits(uint32(halfBits(v)) << 16)
	}
	return out
}

// halfValue is what the bits of a half float mean.
func halfValue(b uint16) float32 {
	sign, e, frac := 1-2*float64(b>>15), int(b>>10&31), float64(b&0x3ff)
	if e == 0 {
		return float32(math.Ldexp(sign*frac, -24))
	}
	return float32(math.Ldexp(sign*(1024+frac), e-25))
}

// halfBits are the bits of the half float of a value that is one.
func halfBits(v float32) uint16 {
	b := math.Float32bits(v)
	sign, e := uint16(b>>16&0x8000), int(b>>23&255)-127
	switch {
	case e > 15:
		return sign | 0x7c00
	case e < -14: // a multiple of 2^-24
		return sign | uint16(math.Ldexp(math.Abs(float64(v)), 24))
	}
	return sign | uint16(e+15)<<10 | uint16(b>>13&0x3ff)
}

// factorOf is the multiple of clean that is nearest to stored.
func factorOf(stored, clean []float32) float64 {
	var dot, square float64
	for i, v := range stored {
		dot += float64(v) * float64(clean[i])
		square += float64(clean[i]) * float64(clean[i])
	}
	return dot / math.Max(square, 1e-300)
}

func times(vals []float32, by float64) []float32 {
	out := make([]float32, len(vals))
	for i, v := range vals {
		out[i] = float32(float64(v) * by)
	}
	return out
}
