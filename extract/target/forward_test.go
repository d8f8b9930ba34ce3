package target_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/target"
)

// compare holds states against a golden file, whose last state is normed,
// and then argmax and logsumexp.
func compare(t *testing.T, m *target.Model, gold *safetensors.Checkpoint, states [][]float32, argmax, lse string, tolerance float64) {
	t.Helper()
	width, last := m.Config().Hidden, m.Config().Layers
	normed, res := head(t, m, states[last])
	largest, row := 0.0, 0.0
	for c := range states {
		got := states[c]
		if c == last {
			got = normed
		}
		want := floats(t, gold, fmt.Sprintf("hidden_states.%d", c))
		if len(got) != len(want) {
			t.Fatalf("state %d has %d values, want %d", c, len(got), len(want))
		}
		rel, worst := relative(got, want, width)
		if !(rel <= tolerance) {
			t.Errorf("state %d is off by %.2g, allowed %.2g", c, rel, tolerance)
		}
		largest, row = max(largest, rel), max(row, worst)
	}
	for i, want := range integers(t, gold, argmax) {
		if res.TopIDs[i] != want {
			t.Errorf("argmax of row %d is %d, want %d", i, res.TopIDs[i], want)
		}
	}
	far := 0.0
	for i, want := range floats(t, gold, lse) {
		far = max(far, math.Abs(float64(res.LSE[i]-want)))
	}
	if !(far <= 1e-4) {
		t.Errorf("logsumexp is off by %.2g", far)
	}
	t.Logf("states within %.2g (worst row %.2g), logsumexp within %.2g", largest, row, far)
}

func TestDenseStatesEqualTheReference(t *testing.T) {
	m := open(t, demotest.FS(t), "target")
	for i, ref := range references(t)[:3] {
		t.Run(ref.ID, func(t *testing.T) {
			gold := golden(t, fmt.Sprintf("golden/p%04d.safetensors", i))
			compare(t, m, gold, forward(t, m, ref.InputIDs, len(ref.InputIDs)), "target_argmax", "target_logsumexp", 1e-5)
		})
	}
}

func TestHybridStatesEqualTheReference(t *testing.T) {
	m := open(t, demotest.FS(t), "hybrid")
	gold := golden(t, "hybrid/golden.safetensors")
	ids := integers(t, gold, "input_ids")
	pieces := []int{70, 1, 2, 40, 3, 1}
	for _, tc := range []struct {
		name  string
		chunk int
		sizes []int
	}{
		{"recurrent", 1, []int{len(ids)}},
		{"chunked", 64, []int{len(ids)}},
		{"chunked by 17", 17, []int{len(ids)}},
		{"the backend's choice", 0, []int{len(ids)}},
		{"recurrent in pieces, then row by row", 1, pieces},
		{"chunked in pieces, then row by row", 64, pieces},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m.Chunk = tc.chunk
			compare(t, m, gold, forward(t, m, ids, tc.sizes...), "argmax", "logsumexp", 2e-5)
		})
	}
}

// TestStatesDoNotDependOnHowRowsWereCut asks for equal bits of one pass,
// pieces, decoding row by row, and a batch with others.
func TestStatesDoNotDependOnHowRowsWereCut(t *testing.T) {
	refs := references(t)
	dense := open(t, demotest.FS(t), "target")
	mixed := open(t, demotest.FS(t), "hybrid")
	gold := golden(t, "hybrid/golden.safetensors")
	hybridIDs := integers(t, gold, "input_ids")
	for _, tc := range []struct {
		name   string
		m      *target.Model
		ids    []int32
		others [][]int32
	}{
		{"dense", dense, refs[0].InputIDs, [][]int32{refs[1].InputIDs[:50], refs[2].InputIDs[:9]}},
		{"hybrid", mixed, hybridIDs, [][]int32{hybridIDs[3:60], hybridIDs[100:101]}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			want := forward(t, tc.m, tc.ids, len(tc.ids))
			same := func(how string, got [][]float32) {
				t.Helper()
				for c := range want {
					if at := bitsEqual(got[c], want[c]); at >= 0 {
						t.Errorf("%s: state %d differs at row %d", how, c, at/tc.m.Config().Hidden)
					}
				}
			}
			same("pieces", forward(t, tc.m, tc.ids, 33, 1, 2, 17))
			same("row by row", forward(t, tc.m, tc.ids, 1))

			var seqs []*target.Sequence
			for range 1 + len(tc.others) {
				s, err := tc.m.NewSequence()
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				seqs = append(seqs, s)
			}
			batch := append([][]int32{tc.others[0], tc.ids}, tc.others[1:]...)
			out, err := tc.m.Forward(seqs, batch, allStates(tc.m))
			if err != nil {
				t.Fatal(err)
			}
			h := tc.m.Config().Hidden
			lo := len(tc.others[0]) * h
			for c := range out.States {
				out.States[c] = out.States[c][lo : lo+len(tc.ids)*h]
			}
			same("batched", out.States)
		})
	}
}

// TestChunksThatEndWhereCallsEndGiveTheSameBits is what lets a Source prefill in
// chunks.
func TestChunksThatEndWhereCallsEndGiveTheSameBits(t *testing.T) {
	m := open(t, demotest.FS(t), "hybrid")
	m.Chunk = 64
	ids := integers(t, golden(t, "hybrid/golden.safetensors"), "input_ids")
	want := forward(t, m, ids, len(ids))
	for _, sizes := range [][]int{{64}, {128, len(ids) - 128}, {64, len(ids) - 64}} {
		got := forward(t, m, ids, sizes...)
		for c := range want {
			if at := bitsEqual(got[c], want[c]); at >= 0 {
				t.Errorf("in pieces of %v, state %d differs at row %d", sizes, c, at/m.Config().Hidden)
			}
		}
	}
}

func BenchmarkPrefill(b *testing.B) {
	for _, tc := range []struct{ name, dir string }{{"dense", "target"}, {"hybrid", "hybrid"}} {
		b.Run(tc.name, func(b *testing.B) {
			m := open(b, demotest.FS(b), tc.dir)
			ids := make([]int32, 256)
			for i := range ids {
				ids[i] = int32(i)
			}
			for b.Loop() {
				seq, err := m.NewSequence()
				if err != nil {
					b.Fatal(err)
				}
				if _, err := m.Forward([]*target.Sequence{seq}, [][]int32{ids}, nil); err != nil {
					b.Fatal(err)
				}
				seq.Close()
			}
			b.ReportMetric(float64(len(ids)*b.N)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	for _, tc := range []struct {
		name, dir string
		batch     int
	}{{"dense/batch=1", "target", 1}, {"dense/batch=8", "target", 8}, {"hybrid/batch=8", "hybrid", 8}} {
		b.Run(tc.name, func(b *testing.B) {
			m := open(b, demotest.FS(b), tc.dir)
			seqs := make([]*target.Sequence, tc.batch)
			ids := make([][]int32, tc.batch)
			fill := func() {
				for i := range seqs {
					s, err := m.NewSequence()
					if err != nil {
						b.Fatal(err)
					}
					seqs[i], ids[i] = s, []int32{5}
				}
			}
			fill()
			for b.Loop() {
				if seqs[0].Len() == 200 {
					for _, s := range seqs {
						s.Close()
					}
					fill()
				}
				if _, err := m.Forward(seqs, ids, nil); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(tc.batch*b.N)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}
