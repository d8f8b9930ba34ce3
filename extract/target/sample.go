package target

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/draftscope/draftscope/cuda"
)

// sampler draws the tokens of one sequence. Its draws depend on the seed and
// the sequence's id alone, not on what else is in the batch.
type sampler struct {
	rng *rand.Rand
}

func newSampler(seed uint64, id string) *sampler {
	h := fnv.New64a()
	_ = binary.Write(h, binary.LittleEndian, seed)
	h.Write([]byte(id))
	return &sampler{rand.New(rand.NewPCG(seed, h.Sum64()))}
}

// draw picks an id with probability softmax(logits/temperature), cut to the
// smallest set of likeliest ids that holds topP of it (all for topP 0 or 1).
func (s *sampler) draw(logits []float32, temperature, topP float32) int32 {
	type choice struct {
		id int32
		p  float64
	}
	top := slices.Max(logits)
	choices := make([]choice, len(logits))
	total := 0.0
	for i, l := range logits {
		p := math.Exp(float64(l-top) / float64(temperature))
		choices[i] = choice{int32(i), p}
		total += p
	}
	if topP > 0 && topP < 1 {
		slices.SortFunc(choices, func(a, b choice) int {
			return cmp.Or(cmp.Compare(b.p, a.p), cmp.Compare(a.id, b.id))
		})
		kept, limit := 0.0, total*float64(topP)
		for i, c := range choices {
			if kept += c.p; kept >= limit {
				choices = choices[:i+1]
				break
			}
		}
		total = kept
	}
	at := s.rng.Float64() * total
	for _, c := range choices {
		if at -= c.p; at < 0 {
			return c.id
		}
	}
	// Rounding left a remainder: the likeliest that can be last.
	return choices[len(choices)-1].id
}

// next chooses the token after each of the rows of state n: the likeliest,
// ties to the lowest id, or, above temperature 0, a draw of its sampler.
func (m *Model) next(final cuda.Tensor, rows []int32, samplers []*sampler, temperature, topP float32) ([]int32, error) {
	last, err := m.work("last", len(rows), final.Cols)
	if err != nil {
		return nil, err
	}
	if err := m.dev.GatherRows(last, final, rows); err != nil {
		return nil, err
	}
	normed, err := m.Normed(last)
	if err != nil {
		return nil, err
	}
	if temperature == 0 {
		res, err := m.dev.Head(cuda.HeadArgs{Hidden: normed, Weight: m.head, K: 1})
		return res.TopIDs, err
	}
	logits, err := m.work("logits", len(rows), m.cfg.Vocab)
	if err != nil {
		return nil, err
	}
	if err := m.dev.Gemm(logits, normed, m.head, false); err != nil {
		return nil, err
	}
	host := make([]float32, len(rows)*m.cfg.Vocab)
	if err := m.dev.Download(host, logits); err != nil {
		return nil, err
	}
	ids := make([]int32, len(rows))
	for i, s := range samplers {
		ids[i] = s.draw(host[i*m.cfg.Vocab:(i+1)*m.cfg.Vocab], temperature, topP)
	}
	return ids, nil
}
