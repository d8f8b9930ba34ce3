package bench

import (
	"testing"

	"github.com/draftscope/draftscope/pipeline"
	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
)

// BenchmarkCompression says what compressing messages would gain and cost:
// the reason why they are sent as they are.
func BenchmarkCompression(b *testing.B) {
	shape, err := ShapeOf("qwen3.6-27b")
	if err != nil {
		b.Fatal(err)
	}
	p, err := newPool(shape)
	if err != nil {
		b.Fatal(err)
	}
	rec := p.record("0", 0, 1)
	defer rec.Release()
	fastest, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
	if err != nil {
		b.Fatal(err)
	}
	standard, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		b.Fatal(err)
	}
	err = pipeline.NewFramer(nil).Encode(rec, 2*messageBytes, func(f pipeline.Frame) error {
		// What a codec for bf16 would see: the bytes of each half together.
		split := make([]byte, 0, len(f.Payload))
		for h := range 2 {
			for i := h; i < len(f.Payload); i += 2 {
				split = append(split, f.Payload[i])
			}
		}
		for name, in := range map[string][]byte{"as they are": f.Payload, "halves apart": split} {
			for codec, encode := range map[string]func(dst, src []byte) []byte{
				"s2":           func(dst, src []byte) []byte { return s2.Encode(dst[:cap(dst)], src) },
				"zstd fastest": func(dst, src []byte) []byte { return fastest.EncodeAll(src, dst[:0]) },
				"zstd":         func(dst, src []byte) []byte { return standard.EncodeAll(src, dst[:0]) },
			} {
				b.Run(codec+"/"+name, func(b *testing.B) {
					dst := make([]byte, 0, s2.MaxEncodedLen(len(in)))
					var out []byte
					b.SetBytes(int64(len(in)))
					for b.Loop() {
						out = encode(dst, in)
					}
					b.ReportMetric(float64(len(out))/float64(len(in)), "of-raw")
				})
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}
