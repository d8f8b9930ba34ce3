package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/data/similar"
	"github.com/draftscope/draftscope/schemas"
)

// capture writes a run of sequences in the given order, with states that
// differ from run to run a little, and gives its reference.
func capture(t testing.TB, run string, tokens, hidden, states int, ids ...string) captureRef {
	t.Helper()
	dir := t.TempDir()
	ds, err := data.Create(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer ds.Close()
	r := data.Run{Name: run, Hidden: hidden, Layers: states, DType: schemas.BF16, FinalNorm: "pre", Engine: "test"}
	for c := range states {
		r.States = append(r.States, c)
	}
	if err := ds.AddRun(r); err != nil {
		t.Fatal(err)
	}
	sink, err := ds.CaptureSink(run, 0, data.SinkConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for n, id := range ids {
		rng, noise := rand.New(rand.NewPCG(1, uint64(len(id)))), rand.New(rand.NewPCG(uint64(run[0]), uint64(n)))
		c := schemas.Capture{Spec: schemas.CaptureSpec{Run: run, Hidden: hidden, Layers: states, States: r.States, DType: schemas.BF16}}
		for pos := range tokens {
			c.Tokens = append(c.Tokens, schemas.Token{SeqID: id, Pos: int32(pos), TokenID: int32(pos)})
		}
		for range states {
			raw := make([]float32, tokens*hidden)
			for i := range raw {
				raw[i] = float32(rng.NormFloat64() + 0.01*noise.NormFloat64())
			}
			c.States = append(c.States, schemas.BF16.AppendBytes(nil, raw))
		}
		rec, err := schemas.CaptureRecord(memory.DefaultAllocator, c)
		if err != nil {
			t.Fatal(err)
		}
		own := schemas.Record(memory.DefaultAllocator, schemas.Envelope{Table: schemas.TableSequences, Run: run},
			[]schemas.Sequence{{SeqID: id, PromptLen: 1, Length: int32(tokens), FinishReason: "stop"}})
		for _, r := range []arrow.Record{rec, own} {
			if err := sink.Write(t.Context(), id, r); err != nil {
				t.Fatal(err)
			}
		}
		if err := sink.End(t.Context(), id, uint64(n+1)); err != nil {
			t.Fatal(err)
		}
		rec.Release()
		own.Release()
	}
	if err := sink.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	sink.Close()
	return captureRef{dir, r, run}
}

func TestPairsMeetInAnyOrderAndWithLittleMemory(t *testing.T) {
	var ids []string
	for i := range 9 {
		ids = append(ids, fmt.Sprintf("s%d", i))
	}
	back := slices.Clone(ids)
	slices.Reverse(back)
	a, b := capture(t, "a", 8, 4, 2, append(ids, "mine")...), capture(t, "b", 8, 4, 2, append([]string{"yours", "other"}, back...)...)
	const size = 2 * 8 * 4 * 4 // bytes of a sequence's states
	for _, limit := range []int64{1, size, 3 * size, 1 << 30} {
		var met []string
		onlyA, onlyB, err := eachPair(t.Context(), a, b, limit, func(x, y similar.Sequence) error {
			if x.ID != y.ID || len(x.Tokens) != 8 || len(x.States[1]) != 32 || len(y.States[0]) != 32 || slices.Equal(x.States[0], y.States[0]) {
				t.Errorf("%s met %s: %d tokens", x.ID, y.ID, len(x.Tokens))
			}
			met = append(met, x.ID)
			return nil
		})
		slices.Sort(met)
		if err != nil || onlyA != 1 || onlyB != 2 || !slices.Equal(met, ids) {
			t.Errorf("limit %d: met %q, %d and %d alone, %v", limit, met, onlyA, onlyB, err)
		}
	}
}

func TestAPairThatFailsEndsTheComparison(t *testing.T) {
	a, b := capture(t, "a", 8, 4, 2, "s0", "s1", "s2", "s3", "s4"), capture(t, "b", 8, 4, 2, "s0", "s1", "s2", "s3", "s4")
	stop := errors.New("stop")
	n := 0
	_, _, err := eachPair(t.Context(), a, b, 1<<20, func(similar.Sequence, similar.Sequence) error { n++; return stop })
	if !errors.Is(err, stop) || n != 1 {
		t.Errorf("%d pairs, %v", n, err)
	}
}
