package schemas

import (
	"encoding/binary"
	"errors"
	"math"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/google/go-cmp/cmp"
)

// testCapture is a capture of n tokens in which every byte differs from its
// neighbours.
func testCapture(d DType, n int) Capture {
	c := Capture{Spec: CaptureSpec{Run: "r1", Hidden: 3, Layers: 4, States: []int{0, 2, 4}, DType: d}}
	for i := range n {
		c.Tokens = append(c.Tokens, Token{SeqID: "p0", Pos: int32(i), TokenID: int32(100 + i), TargetArgmax: new(int32(i))})
	}
	for s := range c.Spec.States {
		raw := make([]byte, n*3*d.Size())
		for i := range raw {
			raw[i] = byte(s*101 + i*7)
		}
		c.States = append(c.States, raw)
	}
	return c
}

func TestACaptureComesBackWholeAndSliced(t *testing.T) {
	for _, d := range []DType{BF16, F32} {
		want := testCapture(d, 5)
		rec, err := CaptureRecord(checked(t), want)
		if err != nil {
			t.Fatal(err)
		}
		defer rec.Release()
		for lo := range 5 {
			for hi := lo; hi <= 5; hi++ {
				slice := rec.NewSlice(int64(lo), int64(hi))
				got, err := ReadCapture(slice)
				if err != nil {
					t.Fatal(err)
				}
				part := Capture{Spec: want.Spec, Tokens: want.Tokens[lo:hi]}
				for _, raw := range want.States {
					part.States = append(part.States, raw[lo*3*d.Size():hi*3*d.Size()])
				}
				if hi == lo {
					part.Tokens, part.States = []Token{}, make([][]byte, 3)
				}
				if diff := cmp.Diff(part, got); diff != "" {
					t.Errorf("%s rows %d to %d (-want +got):\n%s", d, lo, hi, diff)
				}
				slice.Release()
			}
		}
	}
}

func TestTheStatesOfARecordAreCopies(t *testing.T) {
	c := testCapture(F32, 2)
	rec, err := CaptureRecord(checked(t), c)
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Release()
	want := c.States[0][5]
	c.States[0][5]++
	if got, err := ReadCapture(rec); err != nil || got.States[0][5] != want {
		t.Errorf("the record changed with the caller's buffer (%v)", err)
	}
}

func TestACaptureOfAnotherShapeIsNotBuilt(t *testing.T) {
	for name, spoil := range map[string]func(*Capture){
		"a state missing":  func(c *Capture) { c.States = c.States[:2] },
		"a row missing":    func(c *Capture) { c.States[1] = c.States[1][6:] },
		"a byte too many":  func(c *Capture) { c.States[1] = append(c.States[1], 0) },
		"an unknown dtype": func(c *Capture) { c.Spec.DType = "fp8" },
		"a width of zero":  func(c *Capture) { c.Spec.Hidden = 0 },
	} {
		c := testCapture(BF16, 4)
		spoil(&c)
		if _, err := CaptureRecord(checked(t), c); !errors.Is(err, ErrRecord) {
			t.Errorf("%s: %v, want ErrRecord", name, err)
		}
	}
}

func TestARecordThatIsNoCaptureIsRefused(t *testing.T) {
	tokens := Record(checked(t), Envelope{Table: TableTokens, Run: "r"}, []Token{{}})
	defer tokens.Release()
	if _, err := ReadCapture(tokens); !errors.Is(err, ErrRecord) {
		t.Errorf("tokens: %v, want ErrRecord", err)
	}
	good, err := CaptureRecord(checked(t), testCapture(BF16, 2))
	if err != nil {
		t.Fatal(err)
	}
	defer good.Release()
	last := int(good.NumCols()) - 1
	for name, spoil := range map[string]func(fields []arrow.Field, md map[string]string){
		"a state without a number": func(f []arrow.Field, _ map[string]string) {
			f[last].Metadata = arrow.NewMetadata([]string{keyDType}, []string{"bf16"})
		},
		"a state of an unknown dtype": func(f []arrow.Field, _ map[string]string) {
			f[last].Metadata = arrow.NewMetadata([]string{keyState, keyDType}, []string{"4", "fp8"})
		},
		"states of two dtypes": func(f []arrow.Field, md map[string]string) {
			f[last].Metadata = arrow.NewMetadata([]string{keyState, keyDType}, []string{"4", "f32"})
		},
		"another width":           func(_ []arrow.Field, md map[string]string) { md[keyHidden] = "4" },
		"a negative width":        func(_ []arrow.Field, md map[string]string) { md[keyHidden] = "-3" },
		"no depth":                func(_ []arrow.Field, md map[string]string) { delete(md, keyLayers) },
		"tokens by another name":  func(f []arrow.Field, _ map[string]string) { f[2].Name = "token" },
		"another table's columns": func(_ []arrow.Field, md map[string]string) { md[keyTable] = TableSlots },
	} {
		fields := good.Schema().Fields()
		md := map[string]string{}
		for i, k := range good.Schema().Metadata().Keys() {
			md[k] = good.Schema().Metadata().Values()[i]
		}
		spoil(fields, md)
		meta := arrow.MetadataFrom(md)
		rec := array.NewRecord(arrow.NewSchema(fields, &meta), good.Columns(), good.NumRows())
		if _, err := ReadCapture(rec); !errors.Is(err, ErrRecord) {
			t.Errorf("%s: %v, want ErrRecord", name, err)
		}
		rec.Release()
	}
}

func TestEveryBf16CodeSurvivesFloat32(t *testing.T) {
	raw := make([]byte, 0, 2<<16)
	for code := range 1 << 16 {
		raw = binary.LittleEndian.AppendUint16(raw, uint16(code))
	}
	vals := BF16.AppendFloats(nil, raw)
	back := BF16.AppendBytes(nil, vals)
	for code := range 1 << 16 {
		got := binary.LittleEndian.Uint16(back[2*code:])
		want := uint16(code)
		if math.Float32bits(vals[code]) != uint32(code)<<16 {
			t.Fatalf("code %04x became %08x", code, math.Float32bits(vals[code]))
		}
		if vals[code] != vals[code] {
			want |= 0x40 // a signalling NaN becomes a quiet one
		}
		if got != want {
			t.Fatalf("code %04x came back as %04x", code, got)
		}
	}
}

func TestBf16RoundsToNearestEven(t *testing.T) {
	for _, tt := range []struct{ in, want uint32 }{
		{0x3f800000, 0x3f80}, // 1
		{0x3f807fff, 0x3f80}, // just below the middle
		{0x3f808000, 0x3f80}, // a tie, even is below
		{0x3f818000, 0x3f82}, // a tie, even is above
		{0x3f808001, 0x3f81}, // just above the middle
		{0xbf818000, 0xbf82},
		{0x7f7fffff, 0x7f80}, // past the largest
		{0x7f800000, 0x7f80}, // Inf
		{0xff800000, 0xff80},
		{0x7f800001, 0x7fc0}, // NaN whose payload bf16 cannot hold
		{0x80000000, 0x8000}, // -0
		{0x00000001, 0x0000}, // the smallest denormal
		{0x00018000, 0x0002}, // a tie between denormals
	} {
		got := binary.LittleEndian.Uint16(BF16.AppendBytes(nil, []float32{math.Float32frombits(tt.in)}))
		if uint32(got) != tt.want {
			t.Errorf("%08x became %04x, want %04x", tt.in, got, tt.want)
		}
	}
}

func TestFloat32KeepsItsBits(t *testing.T) {
	raw := []byte{1, 2, 3, 4, 0xff, 0xff, 0x7f, 0x7f, 0, 0, 0, 0x80}
	if got := F32.AppendBytes(nil, F32.AppendFloats(nil, raw)); string(got) != string(raw) {
		t.Errorf("%v came back as %v", raw, got)
	}
	if DType("fp8").Size() != 0 {
		t.Error("an unknown dtype has a size")
	}
}
