package statefile

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/draftscope/draftscope/data/statefile/statefiletest"
	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/compress"
)

var _ compress.Codec = (*PlaneCodec)(nil)

// split is the byte-stream split of vals.
func split(vals []float32) []byte {
	n := len(vals)
	out := make([]byte, 4*n)
	for i, v := range vals {
		b := math.Float32bits(v)
		out[i], out[n+i], out[2*n+i], out[3*n+i] = byte(b), byte(b>>8), byte(b>>16), byte(b>>24)
	}
	return out
}

func randomBytes(rng *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

func TestAnyBytesComeBack(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	skewed := make([]byte, 300_001)
	for i := range skewed {
		skewed[i] = byte(rng.ExpFloat64() * 3)
	}
	inputs := map[string][]byte{
		"empty":              {},
		"states of bf16":     split(statefiletest.Like(rng, 80*5120, true)),
		"states of f32":      split(statefiletest.Like(rng, 3*5120, false)),
		"all zero":           make([]byte, 4*maxBlock+3),
		"skewed, odd":        skewed,
		"noise":              randomBytes(rng, 700_003),
		"two symbols":        bytes.Repeat([]byte{1, 2}, 100_000),
		"exactly one block":  split(statefiletest.Like(rng, maxBlock, true)),
		"one past the block": split(statefiletest.Like(rng, maxBlock+1, true)),
	}
	for n := range 80 {
		inputs[fmt.Sprintf("%d random bytes", n)] = randomBytes(rng, n)
		inputs[fmt.Sprintf("%d skewed bytes", n*17)] = skewed[:n*17]
	}
	dec, err := zstd.NewReader(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer dec.Close()
	var codec PlaneCodec
	for name, in := range inputs {
		frame, err := codec.Encode(nil, in)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if want := len(in) + 9 + 3*(4+len(in)/maxBlock); len(frame) > want {
			t.Errorf("%s: %d bytes grew to %d, want at most %d", name, len(in), len(frame), want)
		}
		for reader, decode := range map[string]func() ([]byte, error){
			"klauspost": func() ([]byte, error) { return dec.DecodeAll(frame, nil) },
			"ours":      func() ([]byte, error) { return codec.Decode(nil, frame) },
			"parquet":   func() ([]byte, error) { return parquet.Zstd.Decode(nil, frame) },
		} {
			out, err := decode()
			if err != nil || !bytes.Equal(out, in) {
				t.Errorf("%s: %s reads %d bytes, %v; want the %d of the input", name, reader, len(out), err, len(in))
			}
		}
	}
}

func TestDecodeFillsTheBufferItIsGiven(t *testing.T) {
	var codec PlaneCodec
	in := split(statefiletest.Like(rand.New(rand.NewPCG(3, 4)), 5000, true))
	frame, err := codec.Encode(nil, in)
	if err != nil {
		t.Fatal(err)
	}
	for _, extra := range []int{0, 1, 4096} {
		dst := make([]byte, len(in)+extra)
		out, err := codec.Decode(dst, frame)
		if err != nil {
			t.Fatal(err)
		}
		if &out[0] != &dst[0] || !bytes.Equal(dst[:len(in)], in) {
			t.Errorf("with %d spare bytes the page was decoded elsewhere", extra)
		}
	}
}

func TestBf16PagesReachTheirEntropy(t *testing.T) {
	vals := statefiletest.Like(rand.New(rand.NewPCG(5, 6)), 80*5120, true)
	page := split(vals)
	var codec PlaneCodec
	frame, err := codec.Encode(nil, page)
	if err != nil {
		t.Fatal(err)
	}
	n := len(vals)
	floor := float64(n) * (statefiletest.Entropy(page[2*n:3*n]) + statefiletest.Entropy(page[3*n:])) / 8
	if got := float64(len(frame)) / floor; got > 1.02 {
		t.Errorf("the frame is %.4f of the order-0 entropy, want at most 1.02", got)
	}
}

func FuzzFramesComeBack(f *testing.F) {
	rng := rand.New(rand.NewPCG(7, 8))
	f.Add([]byte{})
	f.Add([]byte{0, 0, 0, 0, 0})
	f.Add(split(statefiletest.Like(rng, 300, true)))
	f.Add(bytes.Repeat([]byte("ab"), 4000))
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1))
	if err != nil {
		f.Fatal(err)
	}
	var codec PlaneCodec
	f.Fuzz(func(t *testing.T, in []byte) {
		frame, err := codec.Encode(nil, in)
		if err != nil {
			t.Fatal(err)
		}
		out, err := dec.DecodeAll(frame, nil)
		if err != nil || !bytes.Equal(out, in) {
			t.Fatalf("%d bytes came back as %d: %v", len(in), len(out), err)
		}
	})
}

func FuzzDecodeNeverPanics(f *testing.F) {
	var codec PlaneCodec
	for _, n := range []int{0, 1, 100, 5000} {
		frame, err := codec.Encode(nil, split(statefiletest.Like(rand.New(rand.NewPCG(9, 9)), n, true)))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(frame)
	}
	f.Add(binary.LittleEndian.AppendUint32([]byte{0x28, 0xb5, 0x2f, 0xfd, 0xa0}, 1<<31-1))
	f.Fuzz(func(t *testing.T, frame []byte) {
		// A frame may stand for 32,768 times its size; keep the fuzzer's
		// memory for the fuzzer.
		if len(frame) > 4096 {
			return
		}
		out, err := codec.Decode(nil, frame)
		if err != nil && out != nil {
			t.Fatalf("an error and %d bytes", len(out))
		}
	})
}

func BenchmarkPlaneCodec(b *testing.B) {
	vals := statefiletest.Like(rand.New(rand.NewPCG(1, 1)), 80*5120, true)
	page := split(vals)
	raw := float64(2 * len(vals)) // bf16 bytes
	b.Run("encode/ours", func(b *testing.B) { benchEncode(b, &PlaneCodec{}, page, raw) })
	b.Run("encode/general", func(b *testing.B) { benchEncode(b, &parquet.Zstd, page, raw) })
	b.Run("decode/ours", func(b *testing.B) {
		var codec PlaneCodec
		frame, err := codec.Encode(nil, page)
		if err != nil {
			b.Fatal(err)
		}
		dst := make([]byte, len(page))
		for b.Loop() {
			if _, err := codec.Decode(dst, frame); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(raw*float64(b.N)/1e6/b.Elapsed().Seconds(), "rawMB/s")
	})
}

func benchEncode(b *testing.B, codec compress.Codec, page []byte, raw float64) {
	var dst []byte
	for b.Loop() {
		var err error
		if dst, err = codec.Encode(dst, page); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(raw*float64(b.N)/1e6/b.Elapsed().Seconds(), "rawMB/s")
	b.ReportMetric(float64(len(dst))/raw, "ratio")
}
