package verify

import (
	"math"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/schemas/sound"
)

// tinyHead is the head of the fixture "tiny": 32 rows of ±1, and a final norm
// that is not uniform.
func tinyHead(rows []float32, normed bool, next []int32) (hits int, logprob float64, err error) {
	const width, vocab = 8, 32
	for i, label := range next {
		x := rows[i*width : (i+1)*width]
		z := make([]float64, width)
		for j, v := range x {
			if z[j] = float64(v); normed {
				z[j] *= 0.25 * float64(j+1) / (RowRMS(x, width)[0] + 1e-6)
			}
		}
		best, top, sum := int32(0), math.Inf(-1), 0.0
		logits := make([]float64, vocab)
		for t := range logits {
			for j := range z {
				logits[t] += z[j] * float64(1-2*((t>>(j%5)^t*j>>2)&1))
			}
			if logits[t] > top {
				best, top = int32(t), logits[t]
			}
			sum += math.Exp(logits[t])
		}
		if best == label {
			hits++
		}
		logprob += (logits[label] - math.Log(sum)) / float64(len(next))
	}
	return hits, logprob, nil
}

// answered is tiny with the answers of its own final state.
func answered(n int) Sequence {
	q := tiny(n)
	for t := range q.Tokens {
		for id := int32(0); ; id++ {
			if hits, _, _ := tinyHead(q.States[4][t*8:(t+1)*8], true, []int32{id}); hits == 1 {
				q.Tokens[t].TargetArgmax = &id
				break
			}
		}
	}
	return q
}

func TestTheHeadProbeNamesWhereTheAnswersComeFrom(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		spoil      func(*Sequence)
	}{
		{"as it is", "", func(*Sequence) {}},
		{"rows a token early", "on the row before", func(q *Sequence) { q.States[4] = append(q.States[4][8:], q.States[4][:8]...) }},
		{"rows a token late", "on the row after", func(q *Sequence) {
			q.States[4] = append(append([]float32{}, q.States[4][:8]...), q.States[4][:len(q.States[4])-8]...)
		}},
		{"two states exchanged", "on state 3", func(q *Sequence) { q.States[3], q.States[4] = q.States[4], q.States[3] }},
		{"already normed", "without the final norm", func(q *Sequence) {
			for i := range q.States[4] {
				row := q.States[4][i/8*8 : i/8*8+8]
				if i%8 == 0 {
					rms := float32(RowRMS(row, 8)[0])
					for j := range row {
						row[j] *= 0.25 * float32(j+1) / rms
					}
				}
			}
		}},
		{"another target's answers", "another target's", func(q *Sequence) {
			for t := range q.Tokens {
				id := (*q.Tokens[t].TargetArgmax*7 + 5) % 32
				q.Tokens[t].TargetArgmax = &id
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			q := answered(200)
			tt.spoil(&q)
			got, err := q.HeadProbe(tinyHead)
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case tt.want == "" && len(got) > 0:
				t.Errorf("a false alarm: %s", got[0])
			case tt.want != "" && (len(got) != 1 || got[0].Rule != "K5" || !strings.Contains(got[0].Value, tt.want)):
				t.Errorf("faults %v, want %q", got, tt.want)
			}
		})
	}
}

func TestBitsOfAnotherDtypeFailTheBand(t *testing.T) {
	reference := sound.Profile{}
	for state, vals := range tiny(200).States {
		var sizes sound.Sizes
		sizes.Add(RowRMS(vals, 8))
		reference[state], _ = sizes.Size()
	}
	if got := tiny(200).Band(reference); len(got) > 0 {
		t.Errorf("a false alarm: %s", got[0])
	}
	q := tiny(200)
	for i, v := range q.States[2] { // bf16 bits read as F16
		bits := uint16(math.Float32bits(v) >> 16)
		half := math.Ldexp(float64(bits&0x3ff|0x400), int(bits>>10&0x1f)-25)
		q.States[2][i] = float32(half)
	}
	got := q.Band(reference)
	if len(got) != 1 || got[0].State != 2 || got[0].Rule != "K7" || !strings.Contains(got[0].Value, "a ratio of") {
		t.Errorf("faults %v, want one of state 2", got)
	}
}
