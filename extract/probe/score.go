package probe

import (
	"fmt"
	"math"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/schemas"
)

// scoreRows bounds the rows of one head product.
const scoreRows = 256

// Score fills in the target's argmax after every token, and the
// log-probability of the token that does follow. final gives rows of
// state n, or, with normed, of what the final norm makes of it.
// bad names a row whose logits are not finite.
func Score(m *target.Model, tokens []schemas.Token, final func(lo, hi int) []float32, normed bool) (bad string, err error) {
	dev, h := m.Device(), m.Config().Hidden
	buf, err := dev.New(min(len(tokens), scoreRows) * h)
	if err != nil {
		return "", err
	}
	defer buf.Close()
	for lo := 0; lo < len(tokens); lo += scoreRows {
		hi := min(lo+scoreRows, len(tokens))
		x := cuda.Matrix(buf, hi-lo, h)
		if err := dev.Upload(x, final(lo, hi)); err != nil {
			return "", err
		}
		if !normed {
			if x, err = m.Normed(x); err != nil {
				return "", err
			}
		}
		labels := make([]int32, hi-lo)
		for i := range labels {
			labels[i] = -1
			if lo+i+1 < len(tokens) {
				labels[i] = tokens[lo+i+1].TokenID
			}
		}
		res, err := dev.Head(cuda.HeadArgs{Hidden: x, Weight: m.Head(), K: 1, Labels: labels})
		if err != nil {
			return "", err
		}
		for i := range labels {
			if lse := float64(res.LSE[i]); math.IsNaN(lse) || math.IsInf(lse, 0) {
				return fmt.Sprintf("row %d: the logits are not finite (log-sum-exp %v)", lo+i, lse), nil
			}
			t := &tokens[lo+i]
			t.TargetArgmax = &res.TopIDs[i]
			if labels[i] >= 0 {
				logprob := res.LabelLogit[i] - res.LSE[i]
				t.TargetLogprob = &logprob
			}
		}
	}
	return "", nil
}
