package target_test

import (
	"bytes"
	"testing"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/backendtest"
	"github.com/draftscope/draftscope/cuda/gpu"
	"github.com/draftscope/draftscope/extract/target"
)

// statesOf is every state of a sequence, in bf16, run in pieces of the given
// sizes, the last repeated, beside others that are run as far as they go.
func statesOf(t *testing.T, m *target.Model, ids []int32, others [][]int32, sizes ...int) [][]byte {
	t.Helper()
	dev, width := m.Device(), m.Config().Hidden*2
	out := make([][]byte, m.Config().Layers+1)
	for i := range out {
		mem, err := dev.HostAlloc(len(ids) * width)
		must(t, err)
		defer dev.HostFree(mem)
		out[i] = mem
	}
	all := append([][]int32{ids}, others...)
	var seqs []*target.Sequence
	for range all {
		s, err := m.NewSequence()
		must(t, err)
		defer s.Close()
		seqs = append(seqs, s)
	}
	for i := 0; seqs[0].Len() < len(ids); i++ {
		var now []*target.Sequence
		var pieces [][]int32
		taps := make([]target.Tap, len(out))
		for c := range taps {
			taps[c] = target.Tap{State: c, As: cuda.BF16}
		}
		for k, s := range seqs {
			n := min(s.Len()+sizes[min(i, len(sizes)-1)], len(all[k]))
			if s.Len() == n {
				continue
			}
			now, pieces = append(now, s), append(pieces, all[k][s.Len():n])
			for c := range taps {
				to := make([]byte, (n-s.Len())*width)
				if k == 0 {
					to = out[c][s.Len()*width : n*width]
				}
				taps[c].To = append(taps[c].To, to)
			}
		}
		_, flights, err := m.Capture(now, pieces, taps)
		must(t, err)
		for _, f := range flights {
			_, err := f.Wait()
			must(t, err)
		}
	}
	for i := range out {
		out[i] = bytes.Clone(out[i])
	}
	return out
}

// TestBF16StatesDoNotDependOnHowRowsWereCut is the promise on a GPU in bf16, at
// a shape that its fast kernels take.
func TestBF16StatesDoNotDependOnHowRowsWereCut(t *testing.T) {
	dev := backendtest.OpenGPU(t, gpu.Config{Precision: gpu.BF16})
	defer func() { must(t, dev.Close()) }()
	s := shape{layers: 3, hidden: 1024, inter: 2048, heads: 8, kv: 2, dim: 128, vocab: 1000}
	m, err := target.OpenWeights(s.config(), newMadeUp(s), dev)
	must(t, err)
	defer func() { must(t, m.Close()) }()
	draw := func(n, by int) []int32 {
		ids := make([]int32, n)
		for i := range ids {
			ids[i] = int32((i*i + by*i + by) % s.vocab)
		}
		return ids
	}
	ids, others := draw(300, 7), [][]int32{draw(70, 11), draw(500, 13), draw(1, 17)}
	want := statesOf(t, m, ids, nil, len(ids))
	for _, tc := range []struct {
		name   string
		others [][]int32
		sizes  []int
	}{
		{"again", nil, []int{300}},
		{"pieces", nil, []int{33, 1, 2, 100}},
		{"token by token", nil, []int{1}},
		{"beside others", others, []int{300}},
		{"beside others in pieces", others, []int{65, 64, 3, 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for c, got := range statesOf(t, m, ids, tc.others, tc.sizes...) {
				if !bytes.Equal(got, want[c]) {
					at := 0
					for got[at] == want[c][at] {
						at++
					}
					t.Errorf("state %d differs at row %d", c, at/(2*s.hidden))
				}
			}
		})
	}
}
