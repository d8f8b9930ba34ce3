package statefile

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/data/statefile/statefiletest"
	"github.com/draftscope/draftscope/schemas"
)

// TestRealStatesTakeTheirEntropy stores the states that the demo's target
// gives, cast to bf16.
func TestRealStatesTakeTheirEntropy(t *testing.T) {
	const width = 256
	byState := map[int][]byte{}
	for p := range 4 {
		for state, raw := range golden(t, "golden/p000"+strconv.Itoa(p)+".safetensors") {
			byState[state] = append(byState[state], schemas.BF16.AppendBytes(nil, schemas.F32.AppendFloats(nil, raw))...)
		}
	}
	var out bytes.Buffer
	w, err := NewWriter(&out, Config{DType: schemas.BF16, Hidden: width})
	if err != nil {
		t.Fatal(err)
	}
	var all [][]byte
	var raw, floors float64
	for state := range len(byState) {
		st := byState[state]
		before := out.Len()
		if err := w.Write(Rows{SeqID: "p", State: int32(state), Norms: AppendNorms(nil, schemas.BF16, width, st), Raw: st}); err != nil {
			t.Fatal(err)
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		floor, low, high := statefiletest.Floor(st)
		t.Logf("state %d: %d rows, entropy %.3f + %.3f bits = %.4f of raw; stored %.4f of raw, narrow columns included", state, len(st)/2/width, low, high, floor/float64(len(st)), float64(out.Len()-before)/float64(len(st)))
		all, raw, floors = append(all, st), raw+float64(len(st)), floors+floor
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	joint, low, high := statefiletest.Floor(all...)
	t.Logf("all states together: entropy %.3f + %.3f bits = %.4f of raw, state by state %.4f; the file takes %.4f", low, high, joint/raw, floors/raw, float64(out.Len())/raw)
	// A row has 8 bytes of position and norm beside its 512; on them and the
	// footer no entropy of vectors has a say.
	rows := raw / 2 / width
	if got := (float64(out.Len()) - 8*rows - 8192) / joint; got > 1.02 {
		t.Errorf("vectors take %.4f of their entropy, want at most 1.02", got)
	}
}

// golden reads the tensors hidden_states.C, float32, of a file of safetensors.
func golden(t *testing.T, name string) map[int][]byte {
	b := demotest.Read(t, name)
	n := binary.LittleEndian.Uint64(b)
	var header map[string]struct {
		Offsets [2]int `json:"data_offsets"`
	}
	if err := json.Unmarshal(b[8:8+n], &header); err != nil {
		t.Fatal(err)
	}
	out := map[int][]byte{}
	for tensor, at := range header {
		if c, ok := strings.CutPrefix(tensor, "hidden_states."); ok {
			state, err := strconv.Atoi(c)
			if err != nil {
				t.Fatal(err)
			}
			out[state] = b[8+int(n):][at.Offsets[0]:at.Offsets[1]]
		}
	}
	return out
}
