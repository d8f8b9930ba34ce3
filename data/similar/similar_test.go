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

func TestTwoCapturesPartWhereTheyDo(t *testing.T) {
	a := sequence("s", []int32{1, 2, 3}, map[int][]float32{0: {1, 0, 0, 1, 3, 4}, 2: {1, 1, 1, 1, 1, 1}, 5: {9, 9, 9, 9, 9, 9}})
	b := sequence("s", []int32{1, 2, 3}, map[int][]float32{0: {1, 0, 0, 1, 3, 4}, 2: {1, 1, 1, 1, 1, 0}})
	b.Tokens[1].TargetArgmax = new(int32(7))
	c := New("a", "b", 2)
	rows := c.Add(a, b)
	if len(rows) != 6 || c.Answers != 3 || c.Agreeing != 2 || c.Parting == nil || *c.Parting != (Place{"s", 1}) {
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
	c := New("a", "b", 1)
	if rows := c.Add(a, b); len(rows) != 1 || len(c.Different) != 1 || c.Different[0].Pos != 1 {
		t.Errorf("%d rows, %+v", len(rows), c.Different)
	}
}

func TestAZeroVectorHasNoCosine(t *testing.T) {
	if r := Row([]float32{0, 0}, []float32{1, 0}); r.Cosine != nil || r.RelL2 != nil || r.MaxAbs != 1 {
		t.Errorf("%+v", r)
	}
	if r := Row([]float32{1, 0}, []float32{0, 0}); r.Cosine != nil || r.RelL2 == nil || *r.RelL2 != 1 {
		t.Errorf("%+v", r)
	}
}

func TestTheTableReadsBack(t *testing.T) {
	w, err := Create(t.TempDir(), "a", "ds:b")
	if err != nil {
		t.Fatal(err)
	}
	row := Row([]float32{1, 2}, []float32{1, 2.5})
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
