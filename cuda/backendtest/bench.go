package backendtest

import (
	"fmt"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// Bench measures the operations that take the time: products at the shapes
// of drafting and of decoding, the vocabulary head with and without its
// reductions, attention over blocks of many anchors, and their trees.
func Bench(b *testing.B, open Opener) {
	for _, part := range []struct {
		name  string
		bench func(*testing.B, *lab)
	}{{"Gemm", benchGemm}, {"Head", benchHead}, {"Attention", benchAttention}, {"DeltaRule", benchDelta}, {"Trees", benchTrees}, {"Similarity", benchSimilarity}} {
		b.Run(part.name, func(b *testing.B) {
			d := open(b)
			b.Cleanup(func() {
				if err := d.Close(); err != nil {
					b.Errorf("closing the device: %v", err)
				}
			})
			part.bench(b, &lab{d: d})
		})
	}
}

// gflops reports the rate of flops floating point operations an iteration.
func gflops(b *testing.B, flops float64) {
	b.ReportMetric(flops*float64(b.N)/1e9/b.Elapsed().Seconds(), "GFLOP/s")
}

func benchGemm(b *testing.B, l *lab) {
	for _, s := range []struct{ m, n, k int }{{4096, 768, 256}, {4096, 256, 768}, {1, 4096, 256}, {16, 768, 256}} {
		b.Run(fmt.Sprintf("%dx%dx%d", s.m, s.n, s.k), func(b *testing.B) {
			dst := l.room(b, s.m, s.n)
			x, w := l.put(b, random(1, s.m, s.k), s.k), l.put(b, random(2, s.n, s.k), s.k)
			for b.Loop() {
				must(b, l.d.Gemm(dst, x, w, false))
			}
			gflops(b, 2*float64(s.m)*float64(s.n)*float64(s.k))
		})
	}
}

func benchHead(b *testing.B, l *lab) {
	const anchors, slots, width, vocab, targets = 200, 15, 256, 4096, 215
	h := newHeading(anchors*slots, width, vocab, targets, 16)
	for i := range h.targetRow {
		h.targetRow[i] = int32(i/slots + i%slots)
		h.labels[i] = int32(i * 7 % vocab)
	}
	hidden, weight := l.put(b, h.hidden, width), l.put(b, h.weight, width)
	target := l.put(b, h.target, width)
	flops := 2 * float64(anchors*slots) * width * vocab
	b.Run("product", func(b *testing.B) {
		dst := l.room(b, 256, vocab)
		for b.Loop() {
			for lo := 0; lo < anchors*slots; lo += 256 {
				hi := min(lo+256, anchors*slots)
				must(b, l.d.Gemm(dst.RowRange(0, hi-lo), hidden.RowRange(lo, hi), weight, false))
			}
		}
		gflops(b, flops)
	})
	for _, what := range []struct {
		name string
		args cuda.HeadArgs
	}{
		{"lse", cuda.HeadArgs{}},
		{"top16", cuda.HeadArgs{K: 16, Labels: h.labels}},
		{"top16+kl", cuda.HeadArgs{K: 16, Labels: h.labels, Losses: cuda.KL}},
		{"top16+kl+tv", cuda.HeadArgs{K: 16, Labels: h.labels, Losses: cuda.KL | cuda.TV}},
		{"top16+all", cuda.HeadArgs{K: 16, Labels: h.labels, Losses: allLosses}},
	} {
		b.Run(what.name, func(b *testing.B) {
			args := what.args
			args.Hidden, args.Weight, args.Target, args.TargetRow = hidden, weight, target, h.targetRow
			for b.Loop() {
				_, err := l.d.Head(args)
				must(b, err)
			}
			gflops(b, flops)
		})
	}
}

func benchAttention(b *testing.B, l *lab) {
	const context = 300
	bench := func(name string, span func(i int) cuda.Span) {
		b.Run(name, func(b *testing.B) {
			a := newAttending(context*16, context, context*16, 4, 2, 64)
			keys := 0
			for i := range a.spans {
				s := span(i)
				a.spans[i] = s
				keys += int(s.CtxHi - s.CtxLo + s.BlkHi - s.BlkLo)
			}
			args := cuda.AttentionArgs{
				Q:    l.put(b, a.q, 256),
				CtxK: l.put(b, a.ctxK, 128), CtxV: l.put(b, a.ctxV, 128), BlkK: l.put(b, a.blkK, 128), BlkV: l.put(b, a.blkV, 128),
				Spans: a.spans, QHeads: 4, KVHeads: 2, HeadDim: 64, Scale: .125,
			}
			dst := l.room(b, len(a.spans), 256)
			for b.Loop() {
				must(b, l.d.Attention(dst, args))
			}
			gflops(b, 4*256*float64(keys))
		})
	}
	bench("blocks", func(i int) cuda.Span {
		block := int32(i / 16)
		return cuda.Span{CtxHi: block, BlkLo: block * 16, BlkHi: block*16 + 16}
	})
	bench("sliding", func(i int) cuda.Span {
		block := int32(i / 16)
		return cuda.Span{CtxLo: max(0, min(int32(i)-64, block)), CtxHi: block, BlkLo: block * 16, BlkHi: int32(i) + 1}
	})
	bench("causal", func(i int) cuda.Span { return cuda.Span{CtxHi: int32(i%context) + 1} })
}

func benchDelta(b *testing.B, l *lab) {
	for _, chunk := range []int{1, 64} {
		b.Run(fmt.Sprintf("chunk%d", chunk), func(b *testing.B) {
			const rows, hk, hv, dim = 512, 2, 4, 64
			r := newDelta(rows, hk, hv, dim, dim, .97)
			args := cuda.DeltaArgs{
				Q: l.put(b, r.q, hk*dim), K: l.put(b, r.k, hk*dim), V: l.put(b, r.v, hv*dim),
				A: l.put(b, r.a, hv), B: l.put(b, r.b, hv), ALog: l.put(b, r.aLog, hv), DTBias: l.put(b, r.dtBias, hv),
				State: l.put(b, r.state, dim), KeyHeads: hk, ValHeads: hv, KeyDim: dim, ValDim: dim, Chunk: chunk,
			}
			dst := l.room(b, rows, hv*dim)
			for b.Loop() {
				must(b, l.d.DeltaRule(dst, args))
			}
			b.ReportMetric(rows*float64(b.N)/b.Elapsed().Seconds(), "rows/s")
		})
	}
}
