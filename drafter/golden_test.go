package drafter_test

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"slices"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
)

// tensor is one array of a safetensors file, of whichever kind it is.
type tensor struct {
	shape []int
	f     []float32
	i     []int32
}

// tensors is a file of arrays; it is a drafter.Weights as well.
type tensors map[string]tensor

func readTensors(tb testing.TB, name string) tensors {
	tb.Helper()
	raw := demotest.Read(tb, name)
	n := binary.LittleEndian.Uint64(raw)
	var header map[string]struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	head := map[string]json.RawMessage{}
	if err := json.Unmarshal(raw[8:8+n], &head); err != nil {
		tb.Fatal(err)
	}
	delete(head, "__metadata__")
	trimmed, err := json.Marshal(head)
	if err != nil {
		tb.Fatal(err)
	}
	if err := json.Unmarshal(trimmed, &header); err != nil {
		tb.Fatal(err)
	}
	out := tensors{}
	for key, h := range header {
		data := raw[8+int(n):][h.Offsets[0]:h.Offsets[1]]
		t := tensor{shape: h.Shape}
		switch h.DType {
		case "F32":
			for i := 0; i < len(data); i += 4 {
				t.f = append(t.f, math.Float32frombits(binary.LittleEndian.Uint32(data[i:])))
			}
		case "BF16":
			for i := 0; i < len(data); i += 2 {
				t.f = append(t.f, math.Float32frombits(uint32(binary.LittleEndian.Uint16(data[i:]))<<16))
			}
		case "I32":
			for i := 0; i < len(data); i += 4 {
				t.i = append(t.i, int32(binary.LittleEndian.Uint32(data[i:])))
			}
		default:
			tb.Fatalf("%s: %s has dtype %s", name, key, h.DType)
		}
		out[key] = t
	}
	return out
}

func (t tensors) Names() []string {
	var names []string
	for name := range t {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (t tensors) Shape(name string) ([]int, bool) {
	x, ok := t[name]
	return x.shape, ok
}

func (t tensors) Float32s(name string) ([]float32, error) { return t[name].f, nil }
