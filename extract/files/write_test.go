package files

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

func TestWhatIsWrittenReadsBack(t *testing.T) {
	for _, format := range []string{VLLM, Speculators, SpecForge} {
		for _, dtype := range []schemas.DType{schemas.BF16, schemas.F32} {
			t.Run(fmt.Sprint(format, dtype), func(t *testing.T) {
				dir := t.TempDir()
				spec := schemas.CaptureSpec{Run: "r1", Hidden: 3, Layers: 4, States: []int{1, 4}, DType: dtype}
				w, err := NewWriter(format, dir, spec, nil)
				if err != nil {
					t.Fatal(err)
				}
				want := map[string][2][]float32{}
				for n := range 3 {
					var tokens []schemas.Token
					var vals [2][]float32
					for p := range 4 + n {
						tokens = append(tokens, schemas.Token{SeqID: fmt.Sprint("s", n), Pos: int32(p), TokenID: int32(10*n + p), LossMask: p >= 2})
						for i := range vals {
							for j := range 3 {
								vals[i] = append(vals[i], float32(n*64+p*8+i*4+j))
							}
						}
					}
					if err := w.Write(fmt.Sprint("s", n), tokens, [][]byte{dtype.AppendBytes(nil, vals[0]), dtype.AppendBytes(nil, vals[1])}); err != nil {
						t.Fatal(err)
					}
					id := map[string]string{VLLM: fmt.Sprint("s", n), Speculators: fmt.Sprint("hs_", n), SpecForge: fmt.Sprint("rows_0-2000_data_", n)}[format]
					want[id] = vals
				}
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
				tokens, states, faults := all(t, format, os.DirFS(dir), Config{States: spec.States, Layers: 4})
				if len(faults) > 0 || len(tokens) != 3 {
					t.Fatalf("%d sequences, %v", len(tokens), faults)
				}
				for id, vals := range want {
					for i := range vals {
						if fmt.Sprint(states[id][i]) != fmt.Sprint(vals[i]) {
							t.Errorf("%s, state %d: %v, want %v", id, spec.States[i], states[id][i], vals[i])
						}
					}
					for p, tok := range tokens[id] {
						if masked := format != VLLM && p < 2; tok.LossMask == masked || int(tok.TokenID)%10 != p {
							t.Errorf("%s: %+v", id, tok)
						}
					}
				}
				if left, _ := filepath.Glob(filepath.Join(dir, "*", "*.tmp")); len(left) > 0 {
					t.Errorf("left behind: %v", left)
				}
			})
		}
	}
}

func TestMembersOfATorchFileBeginAligned(t *testing.T) {
	w := &Writer{format: SpecForge, spec: schemas.CaptureSpec{Hidden: 2, States: []int{1}, DType: schemas.F32}}
	var out bytes.Buffer
	if err := w.ckpt(&out, sideRow{[]int32{1, 2, 3}, []bool{false, true, true}}, make([]byte, 24), nil); err != nil {
		t.Fatal(err)
	}
	f, err := openTorch(out.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range f.zip.File {
		if off, err := m.DataOffset(); err != nil || off%64 != 0 {
			t.Errorf("%s begins at %d (%v)", m.Name, off, err)
		}
	}
}

func TestAnExportDoesNotMixWithAnother(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	spec := schemas.CaptureSpec{Hidden: 1, Layers: 4, States: []int{1, 2}, DType: schemas.F32}
	for format, dir := range map[string]string{VLLM: dir, Speculators: t.TempDir(), DeepSpec: t.TempDir()} {
		if _, err := NewWriter(format, dir, spec, nil); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v, want ErrConfig", format, err)
		}
	}
}
