package drafter_test

import (
	"encoding/binary"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/extract/safetensors"
)

// tensor is one array of a golden file: floats or whole numbers.
type tensor struct {
	shape []int
	f     []float32
	i     []int32
}

// readTensors reads a whole golden file.
func readTensors(tb testing.TB, name string) map[string]tensor {
	tb.Helper()
	c, err := safetensors.OpenFile(demotest.FS(tb), name)
	if err != nil {
		tb.Fatal(err)
	}
	defer c.Close()
	out := map[string]tensor{}
	for _, key := range c.Names() {
		info, _ := c.Info(key)
		t := tensor{shape: info.Shape}
		if info.DType == "I32" {
			raw, err := c.Raw(key)
			if err != nil {
				tb.Fatal(err)
			}
			for i := 0; i < len(raw); i += 4 {
				t.i = append(t.i, int32(binary.LittleEndian.Uint32(raw[i:])))
			}
		} else if t.f, err = c.Float32s(key); err != nil {
			tb.Fatal(err)
		}
		out[key] = t
	}
	return out
}
