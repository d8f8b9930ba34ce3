package similar

import (
	"math"
	"testing"

	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go"
)

func sequence(id string, ids []int32, states map[int][]float32) Sequence {
	q := Sequence{ID: id, States: states}
	for t, x := range ids {
		q.Tokens = append(q.Tokens, schemas.Token{SeqID: id, Pos: int32(t), TokenID: x, TargetArgmax: new(x + 1)})
	}
	return q
}

// plainly compares rows by the formulas.
func plainly(a, b []float32, width int) ([]schemas.Similarity, error) {
	var out []schemas.Similarity
	for lo := 0; lo < len(a); lo += width {
		var dot, na, nb, diff, most float64
		for i := lo; i < lo+width; i++ {
			x, y := float64(a[i]), float64(b[i])
			dot, na, nb, diff, most = dot+x*y, na+x*x, nb+y*y, diff+(x-y)*(x-y), max(most, math.Abs(x-y))
		}
		out = append(out, schemas.Similarity{
			MaxAbs: float32(most), NormA: float32(math.Sqrt(na)), NormB: float32(math.Sqrt(nb)),
			Cosine: new(float32(dot / math.Sqrt(na*nb))), RelL2: new(float32(math.Sqrt(diff / na))),
		})
	}
	return out, nil
}

func TestTwoCapturesPartWhereTheyDo(t *testing.T) {
	a := sequence("s", []int32{1, 2, 3}, map[int][]float32{0: {1, 0, 0, 1, 3, 4}, 2: {1, 1, 1, 1, 1, 1}, 5: {9, 9, 9, 9, 9, 9}})
	b := sequence("s", []int32{1, 2, 3}, map[int][]float32{0: {1, 0, 0, 1, 3, 4}, 2: {1, 1, 1, 1, 1, 0}})
	b.Tokens[1].TargetArgmax = new(int32(7))
	c := New("a", "b", 2, plainly)
	rows, err := c.Add(a, b)
	if err != nil || len(rows) != 6 || c.Answers != 3 || c.Agreeing != 2 || c.Parting == nil || *c.Parting != (Place{"s", 1}) {
		t.Errorf("%d rows, %+v", len(rows), c)
	}
	if len(c.States) != 2 || c.States[0].Equal != 3 || c.States[0].First != nil || c.States[0].MeanCosine != 1 {
		t.Errorf("state 0: %+v", c.States[0])
	}
	s := c.States[1]
	if s.Equal != 2 || s.First == nil || *s.First != (Place{"s", 2}) || *s.Worst != (Place{"s", 2}) || s.MaxAbs != 1 {
		t.Errorf("state 2: %+v", s)
	}
	if want := math.Sqrt(0.5); math.Abs(s.MinCosine-want) > 1e-6 || math.Abs(s.MaxRelL2-want) > 1e-6 {
		t.Errorf("state 2: cosine %v, relative %v, want %v", s.MinCosine, s.MaxRelL2, want)
	}
}

func TestDifferentIdsAreComparedUpToWhereTheyPart(t *testing.T) {
	a := sequence("s", []int32{1, 2, 3}, map[int][]float32{0: {1, 2, 3}})
	b := sequence("s", []int32{1, 9, 3}, map[int][]float32{0: {1, 2, 3}})
	c := New("a", "b", 1, plainly)
	if rows, err := c.Add(a, b); err != nil || len(rows) != 1 || len(c.Different) != 1 || c.Different[0].Pos != 1 {
		t.Errorf("%d rows, %+v", len(rows), c.Different)
	}
}

func TestTheTableReadsBack(t *testing.T) {
	w, err := Create(t.TempDir(), "a", "ds:b")
	if err != nil {
		t.Fatal(err)
	}
	row := schemas.Similarity{MaxAbs: .5, Cosine: new(float32(.9))}
	row.RunA, row.RunB, row.SeqID, row.State = "a", "ds:b", "s", 3
	if err := w.Write([]schemas.Similarity{row}); err != nil {
		t.Fatal(err)
	}
	path, err := w.Close()
	if err != nil {
		t.Fatal(err)
	}
	got, err := parquet.ReadFile[schemas.Similarity](path)
	if err != nil || len(got) != 1 || *got[0].Cosine != *row.Cosine || got[0].RunB != "ds:b" {
		t.Errorf("%+v, %v", got, err)
	}
}
