// Package backendtest is the conformance suite of [cuda.Device]: every
// backend passes it, or is wrong. The judge is a float64 oracle written here
// from the formulas, never another backend.
//
// For each operation the suite checks values on sizes around the widths of
// warps, vectors and tiles; empty and single rows; operands that lie anywhere
// in their buffers (odd offsets and strides), with what surrounds them left
// alone; that NaN and Inf come through; that a second run, other neighbours
// and another place in memory give the same bits; and that shapes which do
// not fit are errors.
package backendtest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// Opener opens the device under test, or skips or fails the test.
type Opener func(t testing.TB) cuda.Device

// part is the tests of one operation.
type part struct {
	name string
	test func(*testing.T, *lab)
}

// Run runs the whole suite. Every operation gets a device of its own.
func Run(t *testing.T, open Opener) {
	runParts(t, open, []part{
		{"Memory", testMemory},
		{"Grow", testGrow},
		{"Gemm", testGemm},
		{"RMSNorm", testRMSNorm},
		{"NormRoPE", testNormRoPE},
		{"Attention", testAttention},
		{"GateMul", testGateMul},
		{"GatherRows", testGather},
		{"ScatterRows", testScatter},
		{"Load", testLoad},
		{"Fetch", testFetch},
		{"Conv", testConv},
		{"DeltaRule", testDeltaRule},
		{"Head", testHead},
		{"Trees", testTrees},
		{"Similarity", testSimilarity},
		{"Limits", testLimits},
	})
}

func runParts(t *testing.T, open Opener, parts []part) {
	for _, p := range parts {
		t.Run(p.name, func(t *testing.T) {
			d := open(t)
			t.Cleanup(func() {
				if err := d.Close(); err != nil {
					t.Errorf("closing the device: %v", err)
				}
			})
			p.test(t, &lab{d: d})
		})
	}
}

// edges are sizes on and around the widths of vectors, warps and tiles. In
// short mode, for tools that slow a device down a hundredfold, few are tried.
var edges = sync.OnceValue(func() []int {
	if testing.Short() {
		return []int{1, 17, 64, 129}
	}
	return []int{1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129}
})

// cuts are the batch sizes that must not change a bit.
var cuts = sync.OnceValue(func() []int {
	if testing.Short() {
		return []int{64}
	}
	return []int{1, 7, 64}
})

// layout says where a matrix lies in its buffer.
type layout struct {
	name      string
	off, skip int // first value; values between rows
}

var (
	packed  = layout{"packed", 0, 0}
	layouts = []layout{packed, {"strided", 8, 16}, {"odd", 5, 3}}
)

// outside fills a buffer around the matrix in it; bf16 holds it exactly.
const outside = 12352

// lab is a device and the values it is tried on.
type lab struct {
	d   cuda.Device
	lay layout // of every matrix that put places
}

// in is the same lab with another layout.
func (l *lab) in(lay layout) *lab { return &lab{d: l.d, lay: lay} }

// random draws rows x cols values of mean 0 and deviation 1.
func random(seed uint64, rows, cols int) []float32 {
	rng := rand.New(rand.NewPCG(seed, 1))
	out := make([]float32, rows*cols)
	for i := range out {
		out[i] = float32(rng.NormFloat64())
	}
	return out
}

// put places values on the device as rows of cols.
func (l *lab) put(t testing.TB, values []float32, cols int) cuda.Tensor {
	t.Helper()
	rows := 0
	if cols > 0 {
		rows = len(values) / cols
	}
	m := l.room(t, rows, cols)
	if err := l.d.Upload(m, values); err != nil {
		t.Fatalf("uploading: %v", err)
	}
	return m
}

// room is a rows x cols matrix of no particular values.
func (l *lab) room(t testing.TB, rows, cols int) cuda.Tensor {
	t.Helper()
	n := l.lay.off + rows*(cols+l.lay.skip) + l.lay.off
	buf, err := l.d.New(n)
	if err != nil {
		t.Fatalf("allocating: %v", err)
	}
	t.Cleanup(buf.Close)
	fill := make([]float32, n)
	for i := range fill {
		fill[i] = outside
	}
	if err := l.d.Upload(cuda.Matrix(buf, 1, n), fill); err != nil {
		t.Fatalf("uploading: %v", err)
	}
	return cuda.Tensor{Buf: buf, Off: l.lay.off, Rows: rows, Cols: cols, Stride: cols + l.lay.skip}
}

// get reads a matrix back and checks that nothing around it was written.
func (l *lab) get(t testing.TB, m cuda.Tensor) []float32 {
	t.Helper()
	all := make([]float32, m.Buf.Len())
	if err := l.d.Download(all, cuda.Matrix(m.Buf, 1, len(all))); err != nil {
		t.Fatalf("downloading: %v", err)
	}
	var inside []float32
	for i := range m.Rows {
		lo := m.Off + i*m.Stride
		inside = append(inside, all[lo:lo+m.Cols]...)
		for j := range m.Cols {
			all[lo+j] = outside
		}
	}
	for i, v := range all {
		if v != outside {
			t.Fatalf("value %d, outside the %d x %d matrix, was overwritten with %v", i, m.Rows, m.Cols, v)
		}
	}
	return inside
}

// near compares with the oracle: a value may differ by tol times its scale,
// which is nil for 1. Where the oracle has NaN or Inf, the value is neither
// finite.
func near(t testing.TB, got []float32, want, scale []float64, tol float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d values, want %d", len(got), len(want))
	}
	for i, w := range want {
		g, allowed := float64(got[i]), tol
		if scale != nil {
			allowed *= scale[i]
		}
		if math.IsNaN(w) || math.IsInf(w, 0) {
			if !math.IsNaN(g) && g != w {
				t.Fatalf("value %d is %v, want %v", i, g, w)
			}
			continue
		}
		if !(math.Abs(g-w) <= allowed) {
			t.Fatalf("value %d is %v, want %v: off by %.3g, allowed %.3g", i, g, w, math.Abs(g-w), allowed)
		}
	}
}

// distance is the relative L2 distance of got from want.
func distance(got []float32, want []float64) float64 {
	var diff, norm float64
	for i, w := range want {
		diff += (float64(got[i]) - w) * (float64(got[i]) - w)
		norm += w * w
	}
	return math.Sqrt(diff / norm)
}

// same compares bit by bit; all NaNs are one.
func same(t testing.TB, what string, got, want []float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d values, want %d", what, len(got), len(want))
	}
	for i, w := range want {
		if math.Float32bits(got[i]) != math.Float32bits(w) && (got[i] == got[i] || w == w) {
			t.Fatalf("%s: value %d is %v, was %v: not the same bits", what, i, got[i], w)
		}
	}
}

// rowInvariant checks that f, which computes rows lo..hi-1 and returns them,
// gives the same bits when run again, in batches of other sizes, and with its
// operands elsewhere in memory.
func rowInvariant(t *testing.T, l *lab, rows int, f func(t testing.TB, l *lab, lo, hi int) []float32) {
	t.Helper()
	whole := f(t, l, 0, rows)
	t.Run("a second run gives the same bits", func(t *testing.T) {
		same(t, "again", f(t, l, 0, rows), whole)
	})
	t.Run("other batches give the same bits", func(t *testing.T) {
		for _, cut := range cuts() {
			var joined []float32
			for lo := 0; lo < rows; lo += cut {
				joined = append(joined, f(t, l, lo, min(lo+cut, rows))...)
			}
			same(t, fmt.Sprintf("batches of %d", cut), joined, whole)
		}
	})
	t.Run("another place gives the same bits", func(t *testing.T) {
		for _, lay := range layouts {
			same(t, lay.name, f(t, l.in(lay), 0, rows), whole)
		}
	})
}

// refused checks that err is a shape error.
func refused(t testing.TB, what string, err error) {
	t.Helper()
	if !errors.Is(err, cuda.ErrShape) {
		t.Errorf("%s: error is %v, want one that wraps ErrShape", what, err)
	}
}

// must stops the test on an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// slice is rows lo..hi-1 of values.
func slice(values []float32, cols, lo, hi int) []float32 { return values[lo*cols : hi*cols] }

var (
	nan = float32(math.NaN())
	inf = float32(math.Inf(1))
)
