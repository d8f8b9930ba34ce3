package diagnose

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// carrying are weights with another tensor.
type carrying struct {
	edited
	name string
	vals []float32
	rows int
}

func (c carrying) Names() []string { return append(slices.Clone(c.Weights.Names()), c.name) }

func (c carrying) Shape(name string) ([]int, bool) {
	if name == c.name {
		return []int{c.rows, len(c.vals) / c.rows}, true
	}
	return c.Weights.Shape(name)
}

func (c carrying) Float32s(name string) ([]float32, error) {
	if name == c.name {
		return slices.Clone(c.vals), nil
	}
	return c.Weights.Float32s(name)
}

// carry gives a case's drafter a copy of a table of the target's, changed.
func carry(t *testing.T, c *Case, name string, table cuda.Tensor, change func(vals []float32)) {
	t.Helper()
	vals := make([]float32, table.Rows*table.Cols)
	if err := c.Device.Download(vals, table); err != nil {
		t.Fatal(err)
	}
	change(vals)
	c.Drafter.Weights = carrying{edited{c.Drafter.Weights, nil}, name, vals, table.Rows}
}

// blurred adds noise as large as the rows themselves.
func blurred(vals []float32) {
	rng := rand.New(rand.NewPCG(1, 9))
	var sum float64
	for _, v := range vals {
		sum += float64(v) * float64(v) / float64(len(vals))
	}
	for i := range vals {
		vals[i] += float32(rng.NormFloat64() * 1.5 * math.Sqrt(sum))
	}
}

func rounded(vals []float32) {
	for i, v := range vals {
		vals[i] = v * (1 + 0.001*float32(i%2))
	}
}

const (
	embeddingOf = "embed_tokens.weight"
	headOf      = "lm_head.weight"
)

func TestATableThatIsNotTheOneOfTheTrainingIsNamedFirst(t *testing.T) {
	for _, tt := range []struct {
		key, name string
		of        func(Case) cuda.Tensor
	}{
		{"own-embedding", embeddingOf, func(c Case) cuda.Tensor { return c.Host.Embedding }},
		{"own-head", headOf, func(c Case) cuda.Tensor { return c.Host.Head }},
	} {
		t.Run(tt.key, func(t *testing.T) {
			c := families(demoCase(t, "good"), "slot-0", "rope-offset")
			carry(t, &c, tt.name, tt.of(c), blurred)
			wantFirst(t, examine(t, c, probeDrafter, probeIdentity, probeHealth), tt.key, Confirmed)
		})
	}
}

func TestTablesThatBelongToTheDrafterRaiseNoAlarm(t *testing.T) {
	for _, tt := range []struct {
		name  string
		want  Verdict
		plant func(*testing.T, *Case)
	}{
		{"none of its own", RuledOut, func(*testing.T, *Case) {}},
		{"a copy", RuledOut, func(t *testing.T, c *Case) { carry(t, c, embeddingOf, c.Host.Embedding, func([]float32) {}) }},
		{"a copy that was rounded", RuledOut, func(t *testing.T, c *Case) { carry(t, c, embeddingOf, c.Host.Embedding, rounded) }},
		{"one that it was trained with", RuledOut, func(t *testing.T, c *Case) {
			// The drafter keeps what it learnt on; the target's is another.
			carry(t, c, embeddingOf, c.Host.Embedding, func([]float32) {})
			vals := make([]float32, c.Host.Vocab*c.Host.Hidden)
			if err := c.Device.Download(vals, c.Host.Embedding); err != nil {
				t.Fatal(err)
			}
			blurred(vals)
			buf, err := c.Device.New(len(vals))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(buf.Close)
			c.Host.Embedding = cuda.Matrix(buf, c.Host.Vocab, c.Host.Hidden)
			if err := c.Device.Upload(c.Host.Embedding, vals); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := families(demoCase(t, "good"), "slot-0", "rope-offset")
			tt.plant(t, &c)
			r := examine(t, c, probeDrafter, probeIdentity)
			wantSilence(t, r)
			f := find(t, r, "own-embedding")
			t.Logf("%s: %s (%s)", f.Verdict, f.Sentence, f.Measure)
			if f.Verdict != tt.want {
				t.Errorf("%s: %s (%s)", f.Verdict, f.Sentence, f.Measure)
			}
		})
	}
}
