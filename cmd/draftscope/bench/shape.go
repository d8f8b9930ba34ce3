package bench

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/schemas"
)

// Shape is what a token's states look like.
type Shape struct {
	Name   string `json:"name"`
	Hidden int    `json:"hidden"` // values in a state
	States int    `json:"states"` // recorded states of a token
}

// shapes are those with a name.
var shapes = []Shape{
	{"qwen3.6-27b", 5120, 6},
	{"qwen3-8b", 4096, 6},
	{"demo", 256, 6},
}

// ShapeNames lists the names that [ShapeOf] knows.
func ShapeNames() string {
	var names []string
	for _, s := range shapes {
		names = append(names, s.Name)
	}
	return strings.Join(names, ", ")
}

// ShapeOf finds a named shape.
func ShapeOf(name string) (Shape, error) {
	for _, s := range shapes {
		if s.Name == name {
			return s, nil
		}
	}
	return Shape{}, fmt.Errorf("there is no shape %q; there are %s", name, ShapeNames())
}

// tokenBytes is what the states of one token take in bf16.
func (s Shape) tokenBytes() int { return 2 * s.Hidden * s.States }

const (
	runName       = "bench"
	messageBytes  = 990_000 // states in a record, so that a record is one message
	recordsPerSeq = 16
	poolRecords   = 2 * recordsPerSeq
)

// rows is how many tokens a record has.
func (s Shape) rows() int { return max(1, messageBytes/s.tokenBytes()) }

func (s Shape) spec() schemas.CaptureSpec {
	spec := schemas.CaptureSpec{Run: runName, Hidden: s.Hidden, Layers: 12 * s.States, DType: schemas.BF16}
	for i := range s.States {
		spec.States = append(spec.States, 12*(i+1))
	}
	return spec
}

// synthetic makes states with the statistics that matter to a codec: gaussian
// values whose channels have scales over two decades, six outlier channels
// with a large mean, massive activations on first tokens, and layers that add
// to the one before.
type synthetic struct {
	shape Shape
	rng   *rand.Rand
	scale []float64 // by channel
	mean  []float64
	row   []float64 // the residual stream of one token
}

func newSynthetic(shape Shape, seed uint64) *synthetic {
	s := &synthetic{
		shape: shape, rng: rand.New(rand.NewPCG(seed, 1)),
		scale: make([]float64, shape.Hidden), mean: make([]float64, shape.Hidden), row: make([]float64, shape.Hidden),
	}
	for i := range s.scale {
		s.scale[i] = math.Pow(10, 2*s.rng.Float64()-1)
	}
	for range 6 {
		s.mean[s.rng.IntN(shape.Hidden)] = 60 * (s.rng.Float64() - 0.5)
	}
	return s
}

// states makes rows tokens: for each state the rows' values, as bytes. first
// says that a sequence begins with them.
func (s *synthetic) states(rows int, first bool) [][]byte {
	out := make([][]byte, s.shape.States)
	for r := range rows {
		for i := range s.row {
			s.row[i] = s.mean[i]
		}
		for l := range out {
			for i, scale := range s.scale {
				s.row[i] += scale * s.rng.NormFloat64()
			}
			if first && r == 0 && l == 1 {
				s.row[s.rng.IntN(len(s.row))] += 3000
			}
			out[l] = appendBF16(out[l], s.row)
		}
	}
	return out
}

func appendBF16(dst []byte, row []float64) []byte {
	dst = slices.Grow(dst, 2*len(row))
	for _, v := range row {
		bits := math.Float32bits(float32(v))
		bits += 0x7fff + bits>>16&1
		dst = binary.LittleEndian.AppendUint16(dst, uint16(bits>>16))
	}
	return dst
}

// entropy is the order-0 entropy of the two bytes of bf16 values, as a share
// of their size: what a coder that looks at one byte at a time can reach.
func entropy(states [][]byte) float64 {
	var bits float64
	for b := range 2 {
		var count [256]int
		total := 0
		for _, s := range states {
			for i := b; i < len(s); i += 2 {
				count[s[i]]++
				total++
			}
		}
		for _, n := range count {
			if n > 0 {
				p := float64(n) / float64(total)
				bits -= p * math.Log2(p)
			}
		}
	}
	return bits / 16
}

// pool is a few records' states, made once and sent under ever new names, so
// that making data costs nothing while something is measured.
type pool struct {
	shape   Shape
	schema  *arrow.Schema
	states  [][]arrow.Array // by record, by state
	raw     [][]byte        // the same bytes
	entropy float64
}

func newPool(shape Shape) (*pool, error) {
	spec := shape.spec()
	p := &pool{shape: shape, schema: schemas.CaptureSchema(spec)}
	gen := newSynthetic(shape, 1)
	tokens := make([]schemas.Token, shape.rows())
	for i := range poolRecords {
		states := gen.states(shape.rows(), i%recordsPerSeq == 0)
		rec, err := schemas.CaptureRecord(memory.NewGoAllocator(), schemas.Capture{Spec: spec, Tokens: tokens, States: states})
		if err != nil {
			return nil, fmt.Errorf("making states: %w", err)
		}
		p.states = append(p.states, rec.Columns()[int(rec.NumCols())-shape.States:])
		p.raw = append(p.raw, states...)
	}
	p.entropy = entropy(p.raw)
	return p, nil
}

// recordBytes is what a record's states take.
func (p *pool) recordBytes() int64 { return int64(p.shape.rows() * p.shape.tokenBytes()) }

// record is the record at place i of sequence seq. Its states are the pool's.
func (p *pool) record(seq string, number, i int) arrow.Record {
	tokens := make([]schemas.Token, p.shape.rows())
	for r := range tokens {
		pos := int32(i*len(tokens) + r)
		tokens[r] = schemas.Token{SeqID: seq, Pos: pos, TokenID: pos % 1000, Role: "assistant", LossMask: true}
	}
	rec := schemas.Record(memory.NewGoAllocator(), schemas.Envelope{Table: schemas.TableTokens, Run: runName}, tokens)
	defer rec.Release()
	cols := append(slices.Clone(rec.Columns()), p.states[(number*recordsPerSeq+i)%poolRecords]...)
	return array.NewRecord(p.schema, cols, int64(len(tokens)))
}

// closing is the row of the table sequences that ends a sequence.
func (p *pool) closing(seq string) arrow.Record {
	row := schemas.Sequence{SeqID: seq, Length: int32(recordsPerSeq * p.shape.rows()), FinishReason: "stop"}
	return schemas.Record(memory.NewGoAllocator(), schemas.Envelope{Table: schemas.TableSequences, Run: runName}, []schemas.Sequence{row})
}
