package backendtest

import (
	"math"
	"strconv"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// testSimilarity holds for both precisions: values are ones that bf16 has, and
// sums are float64 in both.
func testSimilarity(t *testing.T, l *lab) {
	compare := func(t testing.TB, l *lab, a, b []float32, cols int) []cuda.Similarity {
		t.Helper()
		got, err := l.d.Similarity(l.put(t, a, cols), l.put(t, b, cols))
		must(t, err)
		return got
	}
	// pair is a matrix and another near it; every third row is equal.
	pair := func(rows, cols int) (a, b []float32) {
		a, b = rounded(random(1, rows, cols)), rounded(random(2, rows, cols))
		for i := range a {
			b[i] = a[i] + b[i]/8
			if i/cols%3 == 0 {
				b[i] = a[i]
			}
		}
		return a, rounded(b)
	}
	for _, lay := range layouts {
		t.Run(lay.name, func(t *testing.T) {
			l := l.in(lay)
			for _, e := range append(edges(), 2047, 2049, 5120) {
				t.Run(strconv.Itoa(e), func(t *testing.T) {
					rows := min(e, 33)
					a, b := pair(rows, e)
					for i, got := range compare(t, l, a, b, e) {
						checkSimilarity(t, i, got, slice(a, e, i, i+1), slice(b, e, i, i+1))
					}
				})
			}
		})
	}
	t.Run("rows do not depend on each other, nor on their place", func(t *testing.T) {
		const rows, cols = 40, 777
		a, b := pair(rows, cols)
		want := compare(t, l, a, b, cols)
		for _, lay := range layouts {
			for lo := 0; lo < rows; lo += 7 {
				hi := min(lo+7, rows)
				for i, got := range compare(t, l.in(lay), slice(a, cols, lo, hi), slice(b, cols, lo, hi), cols) {
					if got != want[lo+i] {
						t.Fatalf("%s: row %d is %+v, was %+v", lay.name, lo+i, got, want[lo+i])
					}
				}
			}
		}
	})
	t.Run("NaN comes through, zeros and their signs are told apart", func(t *testing.T) {
		got := compare(t, l, []float32{1, nan, 0, 0, 3, 4}, []float32{1, 2, 0, float32(math.Copysign(0, -1)), 4, -3}, 2)
		if s := got[0]; !math.IsNaN(s.Dot) || !math.IsNaN(s.MaxDiff) || s.Equal {
			t.Errorf("with a NaN: %+v", s)
		}
		if s := got[1]; s.Equal || s.MaxDiff != 0 {
			t.Errorf("0 and -0: %+v", s)
		}
		if _, ok := got[1].Cosine(); ok {
			t.Error("a row of zeros has a cosine")
		}
		if _, ok := got[1].RelL2(); ok {
			t.Error("a row of zeros has a relative distance")
		}
		cos, _ := got[2].Cosine()
		rel, _ := got[2].RelL2()
		if na, nb := got[2].Norms(); cos != 0 || math.Abs(rel-math.Sqrt2) > 1e-15 || na != 5 || nb != 5 || got[2].MaxDiff != 7 {
			t.Errorf("(3,4) and (4,-3): %+v", got[2])
		}
	})
	t.Run("nothing in, nothing out", func(t *testing.T) {
		if got := compare(t, l, nil, nil, 5); len(got) != 0 {
			t.Errorf("%d rows", len(got))
		}
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		m := l.room(t, 4, 6)
		_, err := l.d.Similarity(m, l.room(t, 4, 5))
		refused(t, "columns", err)
		_, err = l.d.Similarity(m.RowRange(0, 3), m)
		refused(t, "rows", err)
	})
}

// checkSimilarity compares with sums taken here, in parts that another order
// of adding moves by no more than 1e-13 of what is added.
func checkSimilarity(t testing.TB, row int, got cuda.Similarity, a, b []float32) {
	t.Helper()
	var want cuda.Similarity
	var size float64
	want.Equal = true
	for i := range a {
		x, y := float64(a[i]), float64(b[i])
		want.Dot += x * y
		size += math.Abs(x * y)
		want.SquaresA += x * x
		want.SquaresB += y * y
		want.SquaresDiff += (x - y) * (x - y)
		want.MaxDiff = max(want.MaxDiff, math.Abs(x-y))
		want.Equal = want.Equal && x == y
	}
	for _, v := range []struct {
		name      string
		got, want float64
		size      float64
	}{
		{"dot", got.Dot, want.Dot, size},
		{"squares of a", got.SquaresA, want.SquaresA, want.SquaresA},
		{"squares of b", got.SquaresB, want.SquaresB, want.SquaresB},
		{"squares of the difference", got.SquaresDiff, want.SquaresDiff, want.SquaresDiff},
		{"largest difference", got.MaxDiff, want.MaxDiff, 0},
	} {
		if !(math.Abs(v.got-v.want) <= 1e-13*v.size) {
			t.Fatalf("row %d: %s is %v, want %v", row, v.name, v.got, v.want)
		}
	}
	if got.Equal != want.Equal {
		t.Fatalf("row %d: equal is %t, want %t", row, got.Equal, want.Equal)
	}
}

func benchSimilarity(b *testing.B, l *lab) {
	for _, cols := range []int{256, 5120} {
		b.Run(strconv.Itoa(cols), func(b *testing.B) {
			rows := 1 << 21 / cols
			x, y := l.put(b, random(1, rows, cols), cols), l.put(b, random(2, rows, cols), cols)
			for b.Loop() {
				_, err := l.d.Similarity(x, y)
				must(b, err)
			}
			b.ReportMetric(float64(rows)*float64(b.N)/b.Elapsed().Seconds(), "rows/s")
		})
	}
}
