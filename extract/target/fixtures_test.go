package target_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io/fs"
	"math"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/backendtest"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/extract/tokenizer"
)

func device(tb testing.TB) cuda.Device {
	tb.Helper()
	dev := backendtest.Open(tb)
	tb.Cleanup(func() {
		if err := dev.Close(); err != nil {
			tb.Error(err)
		}
	})
	return dev
}

func open(tb testing.TB, fsys fs.FS, dir string) *target.Model {
	tb.Helper()
	m, err := target.Open(fsys, dir, device(tb))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := m.Close(); err != nil {
			tb.Error(err)
		}
	})
	return m
}

func demoTokenizer(tb testing.TB) *tokenizer.Tokenizer {
	tb.Helper()
	tok, err := tokenizer.Load(demotest.FS(tb), "target")
	if err != nil {
		tb.Fatal(err)
	}
	return tok
}

// reference is one line of sequences.jsonl.
type reference struct {
	ID        string  `json:"id"`
	Prompt    string  `json:"prompt"`
	PromptLen int     `json:"prompt_len"`
	InputIDs  []int32 `json:"input_ids"`
}

func references(tb testing.TB) []reference {
	tb.Helper()
	var out []reference
	lines := bufio.NewScanner(bytes.NewReader(demotest.Read(tb, "sequences.jsonl")))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r reference
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			tb.Fatal(err)
		}
		out = append(out, r)
	}
	return out
}

// golden is a file of the reference's states.
func golden(tb testing.TB, name string) *safetensors.Checkpoint {
	tb.Helper()
	c, err := safetensors.OpenFile(demotest.FS(tb), name)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	return c
}

func floats(tb testing.TB, c *safetensors.Checkpoint, name string) []float32 {
	tb.Helper()
	vals, err := c.Float32s(name)
	if err != nil {
		tb.Fatal(err)
	}
	return vals
}

// integers reads a tensor of 32- or 64-bit integers.
func integers(tb testing.TB, c *safetensors.Checkpoint, name string) []int32 {
	tb.Helper()
	raw, err := c.Raw(name)
	if err != nil {
		tb.Fatal(err)
	}
	info, _ := c.Info(name)
	size := info.DType.Size()
	out := make([]int32, len(raw)/size)
	for i := range out {
		out[i] = int32(binary.LittleEndian.Uint32(raw[i*size:]))
	}
	return out
}

// relative is |got-want| / |want|, and the same for the worst single row.
func relative(got, want []float32, width int) (all, worst float64) {
	var num, den float64
	for r := 0; r < len(want); r += width {
		var n, d float64
		for i := r; i < r+width; i++ {
			diff := float64(got[i]) - float64(want[i])
			n += diff * diff
			d += float64(want[i]) * float64(want[i])
		}
		worst = max(worst, math.Sqrt(n/d))
		num, den = num+n, den+d
	}
	return math.Sqrt(num / den), worst
}

// bitsEqual reports the first place where two slices differ in any bit, -1
// for none.
func bitsEqual(a, b []float32) int {
	if len(a) != len(b) {
		return min(len(a), len(b))
	}
	for i := range a {
		if math.Float32bits(a[i]) != math.Float32bits(b[i]) {
			return i
		}
	}
	return -1
}

func allStates(m *target.Model) []int {
	states := make([]int, m.Config().Layers+1)
	for i := range states {
		states[i] = i
	}
	return states
}

// forward runs ids in pieces of the given sizes, the last repeated until the
// ids are spent, and returns every state of every row.
func forward(tb testing.TB, m *target.Model, ids []int32, sizes ...int) [][]float32 {
	tb.Helper()
	seq, err := m.NewSequence()
	if err != nil {
		tb.Fatal(err)
	}
	defer seq.Close()
	states := allStates(m)
	all := make([][]float32, len(states))
	for i := 0; len(ids) > 0; i++ {
		n := min(sizes[min(i, len(sizes)-1)], len(ids))
		out, err := m.Forward([]*target.Sequence{seq}, [][]int32{ids[:n]}, states)
		if err != nil {
			tb.Fatal(err)
		}
		for c := range states {
			all[c] = append(all[c], out.States[c]...)
		}
		ids = ids[n:]
	}
	return all
}

// head norms state n and multiplies it with the head.
func head(tb testing.TB, m *target.Model, final []float32) (normed []float32, res cuda.HeadResult) {
	tb.Helper()
	h := m.Config().Hidden
	buf, err := m.Device().New(len(final))
	if err != nil {
		tb.Fatal(err)
	}
	defer buf.Close()
	x := cuda.Matrix(buf, len(final)/h, h)
	if err := m.Device().Upload(x, final); err != nil {
		tb.Fatal(err)
	}
	y, err := m.Normed(x)
	if err != nil {
		tb.Fatal(err)
	}
	normed = make([]float32, len(final))
	if err := m.Device().Download(normed, y); err != nil {
		tb.Fatal(err)
	}
	if res, err = m.Device().Head(cuda.HeadArgs{Hidden: y, Weight: m.Head(), K: 1}); err != nil {
		tb.Fatal(err)
	}
	return normed, res
}
