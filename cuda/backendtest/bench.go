package backendtest

import (
	"errors"
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

// BenchDeltaNet measures the linear layer of Qwen3.6-27B: 16 key heads and 48
// value heads of 128, 5120 wide. It reports the time of a call, 20 of which are
// under way at once. No operation reads what it wrote, so that values stay as
// they are however often it is repeated.
func BenchDeltaNet(b *testing.B, open Opener) {
	const hidden, hk, hv, dim, most = 5120, 16, 48, 128, 8192
	const keys, values, channels = hk * dim, hv * dim, 2*hk*dim + hv*dim
	d := open(b)
	b.Cleanup(func() {
		if err := d.Close(); err != nil {
			b.Errorf("closing the device: %v", err)
		}
	})
	l := &lab{d: d}
	// draw repeats random rows, which takes less time than drawing all.
	draw := func(seed uint64, rows, cols int, scale float32) cuda.Tensor {
		some := random(seed, min(rows, 509), cols)
		for i := range some {
			some[i] *= scale
		}
		buf, err := d.New(rows * cols)
		must(b, err)
		b.Cleanup(buf.Close)
		m := cuda.Matrix(buf, rows, cols)
		for lo := 0; lo < rows; lo += len(some) / cols {
			hi := min(lo+len(some)/cols, rows)
			must(b, d.Upload(m.RowRange(lo, hi), some[:(hi-lo)*cols]))
		}
		return m
	}
	u, e, z := draw(1, most, hidden, 1), draw(2, most, channels, 1), draw(3, most, values, 1)
	y, o := draw(4, most, channels, 1), draw(5, most, values, 1)
	alpha, beta := draw(6, most, hv, 1), draw(7, most, hv, 1)
	qkv, gate, out := draw(8, channels, hidden, .01), draw(9, values, hidden, .01), draw(10, hidden, values, .01)
	small, taps, norm := draw(11, hv, hidden, .01), draw(12, channels, 4, .5), draw(13, 1, dim, 1)
	history := draw(14, 3, channels, 1)
	r := newDelta(1, hk, hv, dim, dim, .97)
	aLog, dtBias, state := l.put(b, r.aLog, hv), l.put(b, r.dtBias, hv), l.put(b, r.state, dim)
	one := make([]float32, 1)

	for _, rows := range []int{512, 2048, most} {
		rule := func(chunk int) func() error {
			y := y.RowRange(0, rows)
			return func() error {
				return d.DeltaRule(o.RowRange(0, rows), cuda.DeltaArgs{
					Q: y.ColRange(0, keys), K: y.ColRange(keys, 2*keys), V: y.ColRange(2*keys, channels),
					A: alpha.RowRange(0, rows), B: beta.RowRange(0, rows), ALog: aLog, DTBias: dtBias, State: state,
					KeyHeads: hk, ValHeads: hv, KeyDim: dim, ValDim: dim, Chunk: chunk,
				})
			}
		}
		for _, part := range []struct {
			name string
			call func() error
		}{
			{"recurrence", rule(1)},
			{"chunks", rule(64)},
			{"conv", func() error { return d.Conv(y.RowRange(0, rows), e.RowRange(0, rows), taps, history) }},
			{"in", func() error {
				return errors.Join(d.Gemm(e.RowRange(0, rows), u.RowRange(0, rows), qkv, false), d.Gemm(z.RowRange(0, rows), u.RowRange(0, rows), gate, false),
					d.Gemm(alpha.RowRange(0, rows), u.RowRange(0, rows), small, false), d.Gemm(beta.RowRange(0, rows), u.RowRange(0, rows), small, false))
			}},
			{"norm", func() error {
				return d.RMSNorm(cuda.Matrix(e.Buf, rows, values).Heads(dim), o.RowRange(0, rows).Heads(dim), norm, 1e-6, 0)
			}},
			{"gate", func() error {
				return d.GateMul(cuda.Matrix(e.Buf, rows, values), z.RowRange(0, rows), o.RowRange(0, rows), cuda.SiLU)
			}},
			{"out", func() error { return d.Gemm(u.RowRange(0, rows), o.RowRange(0, rows), out, false) }},
		} {
			b.Run(fmt.Sprintf("%d/%s", rows, part.name), func(b *testing.B) {
				const calls = 20
				wait := func() { must(b, d.Download(one, state.RowRange(0, 1).ColRange(0, 1))) }
				must(b, part.call())
				wait()
				for b.Loop() {
					for range calls {
						must(b, part.call())
					}
					wait()
				}
				b.ReportMetric(b.Elapsed().Seconds()*1e6/float64(b.N)/calls, "µs/call")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
