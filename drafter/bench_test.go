package drafter_test

import (
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/schemas"
)

// The shape of the fixtures' drafters.
const (
	block   = 16
	inter   = 640
	wide    = 256 // 4 query heads
	narrow  = 128 // 2 key/value heads
	tapN    = 4
	depth   = 2
	perPass = 64
)

// benchSequence is 1,000 anchors of real tokens, 3 of prompt before them.
func benchSequence(b *testing.B, w *world) captured {
	c := captured{id: "bench", promptLen: 3}
	for _, s := range sequences(b) {
		c.ids = append(c.ids, s.ids...)
	}
	c.ids = c.ids[:c.promptLen+1001]
	return w.run(c)
}

// BenchmarkDraft1000Anchors drafts and scores every anchor of a sequence with
// every measure (or with kl alone, beside ce) and four methods of rounds, from capture record to emitted
// rows, and compares that with the same matrix products on their own.
func BenchmarkDraft1000Anchors(b *testing.B) {
	b.Run("kl", func(b *testing.B) { benchmarkDraft(b, cuda.KL) })
	b.Run("all", func(b *testing.B) { benchmarkDraft(b, cuda.KL|cuda.RKL|cuda.JSD|cuda.TV) })
}

func benchmarkDraft(b *testing.B, losses cuda.Losses) {
	w := newWorld(b)
	c := benchSequence(b, w)
	stage, err := drafter.NewStage(drafter.Config{
		Drafters: []*drafter.Drafter{w.drafter("good")}, Host: w.host, Device: w.dev,
		Budgets: []int{8, 16, 64}, Losses: losses,
	})
	w.must(err)
	defer stage.Close()
	rec, err := schemas.CaptureRecord(memory.DefaultAllocator, c.record(b, w, 0, len(c.ids)))
	w.must(err)
	defer rec.Release()
	products := newProducts(w)
	rows := int64(0)
	var alone time.Duration
	for b.Loop() {
		rows = 0
		w.must(stage.Process(b.Context(), c.id, rec, nil))
		w.must(stage.End(b.Context(), c.id, func(r arrow.Record) error {
			if env, err := schemas.EnvelopeOf(r); err != nil || env.Table == schemas.TableSlots {
				rows += r.NumRows()
			}
			return nil
		}))
		// In turns, so that a busy machine slows both.
		b.StopTimer()
		start := time.Now()
		products.run(len(c.ids), 1000)
		alone += time.Since(start)
		b.StartTimer()
	}
	if rows != 1000*(block-1) {
		b.Fatalf("%d slots, want %d", rows, 1000*(block-1))
	}
	b.ReportMetric(float64(b.Elapsed())/float64(alone), "x-products")
	b.ReportMetric(1000*float64(b.N)/b.Elapsed().Seconds(), "anchors/s")
}

// BenchmarkProductsOf1000Anchors is the yardstick of the above.
func BenchmarkProductsOf1000Anchors(b *testing.B) {
	p := newProducts(newWorld(b))
	for b.Loop() {
		p.run(1004, 1000)
	}
}

// products are the matrix products that drafting needs, and nothing else.
type products struct {
	w                             *world
	x, mixed, mlp, logits         cuda.Tensor
	square, toNarrow, toMLP, down cuda.Tensor
	q, kv                         cuda.Tensor
}

func newProducts(w *world) *products {
	rows := perPass * block
	return &products{
		w: w, x: w.alloc(rows, hidden), mixed: w.alloc(rows, wide), mlp: w.alloc(rows, inter),
		logits: w.alloc(rows, vocab), square: w.alloc(wide, hidden), toNarrow: w.alloc(narrow, hidden),
		toMLP: w.alloc(inter, hidden), down: w.alloc(hidden, inter), q: w.alloc(rows, wide), kv: w.alloc(rows, narrow),
	}
}

func (p *products) gemm(dst, a, weight cuda.Tensor, rows int) {
	p.w.must(p.w.dev.Gemm(dst.RowRange(0, rows), a.RowRange(0, rows), weight, false))
}

func (p *products) run(length, anchors int) {
	for lo := 0; lo < length; lo += 512 {
		n := min(512, length-lo)
		for range tapN {
			p.gemm(p.x, p.x, p.square, n)
		}
		for range depth {
			p.gemm(p.kv, p.x, p.toNarrow, n)
			p.gemm(p.kv, p.x, p.toNarrow, n)
		}
		p.gemm(p.logits, p.x, p.w.host.Head, n) // labels
	}
	for lo := 0; lo < anchors; lo += perPass {
		blocks := min(perPass, anchors-lo)
		n := blocks * block
		for layer := range depth {
			first := n
			if layer == 0 {
				first = blocks + 1 // distinct inputs only
			}
			p.gemm(p.q, p.x, p.square, first)
			p.gemm(p.kv, p.x, p.toNarrow, first)
			p.gemm(p.kv, p.x, p.toNarrow, first)
			p.gemm(p.x, p.mixed, p.square, n)
			p.gemm(p.mlp, p.x, p.toMLP, n)
			p.gemm(p.mlp, p.x, p.toMLP, n)
			p.gemm(p.x, p.mlp, p.down, n)
		}
		p.gemm(p.logits, p.x, p.w.host.Head, blocks*(block-1))
		p.gemm(p.logits, p.x, p.w.host.Head, blocks+block-2) // the target's distributions
	}
}
