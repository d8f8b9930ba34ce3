package files

import (
	"archive/zip"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/extract/safetensors/safetensorstest"
	"github.com/draftscope/draftscope/schemas"
)

// request is a file of vLLM: ids, rows, and three slots of two values.
func request(ids []int64, rows int) []byte {
	var raw []byte
	for _, id := range ids {
		raw = binary.LittleEndian.AppendUint64(raw, uint64(id))
	}
	vals := make([]float32, rows*6)
	for i := range vals {
		vals[i] = float32(i)
	}
	return safetensorstest.File(safetensorstest.F32("hidden_states", vals, rows, 3, 2),
		safetensorstest.Tensor{Name: "token_ids", DType: "I64", Shape: []int{len(ids)}, Data: raw})
}

func file(raw []byte) *fstest.MapFile { return &fstest.MapFile{Data: raw} }

// all reads a source to its end.
func all(t *testing.T, format string, fsys fs.FS, cfg Config) (tokens map[string][]schemas.Token, states map[string][][]float32, faults map[string]schemas.Fault) {
	t.Helper()
	r, err := Open(format, fsys)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	defer mem.AssertSize(t, 0)
	cfg.Run, cfg.Allocator = "r1", mem
	s, err := NewSource(r, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	tokens, states, faults = map[string][]schemas.Token{}, map[string][][]float32{}, map[string]schemas.Fault{}
	for {
		seq, rec, last, err := s.Next(t.Context())
		if errors.Is(err, io.EOF) {
			return tokens, states, faults
		}
		if err != nil {
			t.Fatal(err)
		}
		env, err := schemas.EnvelopeOf(rec)
		if err != nil {
			t.Fatal(err)
		}
		switch env.Table {
		case schemas.TableCapture:
			c, err := schemas.ReadCapture(rec)
			if err != nil {
				t.Fatal(err)
			}
			tokens[seq] = append(tokens[seq], c.Tokens...)
			for i, raw := range c.States {
				if len(states[seq]) <= i {
					states[seq] = append(states[seq], nil)
				}
				states[seq][i] = c.Spec.DType.AppendFloats(states[seq][i], raw)
			}
		case schemas.TableFaults:
			rows, err := schemas.Rows[schemas.Fault](rec)
			if err != nil {
				t.Fatal(err)
			}
			faults[seq] = rows[0]
		case schemas.TableSequences:
			if !last {
				t.Error("a sequence's row is not its last record")
			}
		}
		rec.Release()
	}
}

func TestSlotsComeOutAsTheStatesTheyAre(t *testing.T) {
	fsys := fstest.MapFS{"out/cmpl-1-0.safetensors": file(request([]int64{7, 8}, 2))}
	tokens, states, faults := all(t, VLLM, fsys, Config{States: []int{4, -1, 2}, Layers: 4})
	if len(faults) != 0 || len(tokens["out_cmpl-1-0"]) != 2 {
		t.Fatalf("%v %v", faults, tokens)
	}
	// States ascend: slot 2 is state 2, slot 0 is state 4, slot 1 is left out.
	if got, want := fmt.Sprint(states["out_cmpl-1-0"]), "[[4 5 10 11] [0 1 6 7]]"; got != want {
		t.Errorf("states %s, want %s", got, want)
	}
}

func TestWhatIsWrongWithASampleIsItsFault(t *testing.T) {
	inf := request([]int64{7, 8}, 2)
	copy(inf[len(inf)-16-8:], []byte{0, 0, 0x80, 0x7f}) // row 1, slot 2
	fsys := fstest.MapFS{
		"a.safetensors":      file(request([]int64{7, 8}, 2)),
		"last.safetensors":   file(request([]int64{7, 8, 9}, 2)),
		"prefix.safetensors": file(request([]int64{7, 8, 9, 10}, 2)),
		"more.safetensors":   file(request([]int64{7}, 2)),
		"none.safetensors":   file(request(nil, 0)),
		"cut.safetensors":    file(request([]int64{7, 8}, 2)[:100]),
		"big.safetensors":    file(request([]int64{7, 1 << 40}, 2)),
		"inf.safetensors":    file(inf),
	}
	tokens, _, faults := all(t, VLLM, fsys, Config{States: []int{1, 2, 3}, Layers: 4})
	for id, want := range map[string]string{
		"last": "K3 last row missing", "prefix": "K3 first 2 rows missing (prefix cache?)", "more": "K3 2 rows for 1 tokens",
		"none": "K3 no token", "cut": "K21 ", "big": "K21 token 1099511627776", "inf": "K1 row 1, state 3: 0 NaN, 1 Inf",
	} {
		check, says, _ := strings.Cut(want, " ")
		if f := faults[id]; f.Check != check || !strings.Contains(f.Detail, says) {
			t.Errorf("%s: %+v, want %s", id, f, want)
		}
	}
	if len(tokens) != 1 || len(tokens["a"]) != 2 {
		t.Errorf("stored %v", tokens)
	}
	tokens, _, _ = all(t, VLLM, fsys, Config{States: []int{1, 2, 3}, Layers: 4, AllowMissingLast: true})
	if len(tokens["last"]) != 2 || len(tokens["prefix"]) != 0 {
		t.Errorf("with the last row allowed to be missing: %v", tokens)
	}
}

// sideSet is a data set as the library datasets stores it.
func sideSet(t *testing.T, ids [][]int64, masks [][]int64) []byte {
	t.Helper()
	list := arrow.ListOf(arrow.PrimitiveTypes.Int64)
	schema := arrow.NewSchema([]arrow.Field{{Name: "loss_mask", Type: list}, {Name: "input_ids", Type: list}}, nil)
	b := array.NewRecordBuilder(memory.NewGoAllocator(), schema)
	defer b.Release()
	for i, column := range [][][]int64{masks, ids} {
		for _, row := range column {
			lb := b.Field(i).(*array.ListBuilder)
			lb.Append(true)
			lb.ValueBuilder().(*array.Int64Builder).AppendValues(row, nil)
		}
	}
	rec := b.NewRecord()
	defer rec.Release()
	var out bytes.Buffer
	w := ipc.NewWriter(&out, ipc.WithSchema(schema))
	if err := errors.Join(w.Write(rec), w.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestSpeculatorsMasksAreJoinedByRowAndComparedByIDs(t *testing.T) {
	fsys := fstest.MapFS{
		"data-00000-of-00001.arrow":      file(sideSet(t, [][]int64{{7, 8}, {9, 9}}, [][]int64{{0, 1}, {1, 1}})),
		"hidden_states/hs_0.safetensors": file(request([]int64{7, 8}, 2)),
		"hidden_states/hs_1.safetensors": file(request([]int64{7, 8}, 2)), // of a data set that was filtered again
		"hidden_states/hs_2.safetensors": file(request([]int64{7, 8}, 2)),
	}
	tokens, _, faults := all(t, Speculators, fsys, Config{States: []int{1, 2, 4}, Layers: 4})
	if got := tokens["hs_0"]; len(got) != 2 || got[0].LossMask || !got[1].LossMask {
		t.Errorf("%+v", got)
	}
	if f := faults["hs_1"]; !strings.Contains(f.Detail, "ids differ at 0: ") {
		t.Errorf("%+v", f)
	}
	if f := faults["hs_2"]; !strings.Contains(f.Detail, "has 2 rows") {
		t.Errorf("%+v", f)
	}
}

func TestARowOfTheDataSetWithoutItsFileIsAFault(t *testing.T) {
	fsys := fstest.MapFS{
		"data-00000-of-00001.arrow":      file(sideSet(t, [][]int64{{7, 8}, {9, 9}, {1, 2}}, [][]int64{{0, 1}, {1, 1}, {1, 1}})),
		"hidden_states/hs_0.safetensors": file(request([]int64{7, 8}, 2)),
	}
	tokens, _, faults := all(t, Speculators, fsys, Config{States: []int{1, 2, 4}, Layers: 4})
	if f := faults["hs_1"]; len(tokens) != 1 || len(faults) != 1 || f.Check != "K21" || !strings.Contains(f.Detail, "hs_1.safetensors") || !strings.Contains(f.Detail, "2 of its 3 rows") {
		t.Errorf("%d stored, %+v", len(tokens), faults)
	}
}

func TestLinksAreFollowedAndWhatIsNoFileIsAFault(t *testing.T) {
	dir, cache := t.TempDir(), t.TempDir()
	for name, link := range map[string]string{"a": "good", "cut": "nowhere", "dir": "."} {
		if err := os.Symlink(filepath.Join(cache, link), filepath.Join(dir, name+".safetensors")); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(cache, "good"), request([]int64{7, 8}, 2), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "folder.safetensors"), 0o700); err != nil {
		t.Fatal(err)
	}
	tokens, _, faults := all(t, VLLM, os.DirFS(dir), Config{States: []int{1, 2, 3}, Layers: 4})
	if len(tokens) != 1 || len(tokens["a"]) != 2 {
		t.Errorf("stored %v", tokens)
	}
	for id, want := range map[string]string{"cut": "no such file", "dir": "it is no file", "folder": "it is no file"} {
		if f := faults[id]; f.Check != "K21" || !strings.Contains(f.Detail, want) {
			t.Errorf("%s: %+v", id, f)
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// A few kilobytes may expand to gigabytes.
func TestWhatExpandsWithoutEndIsNoSample(t *testing.T) {
	bomb := func(magic string) []byte {
		var out bytes.Buffer
		z, err := gzip.NewWriterLevel(&out, gzip.BestSpeed)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = z.Write([]byte(magic)); err == nil {
			_, err = io.CopyN(z, zeros{}, 80<<20)
		}
		if err = errors.Join(err, z.Close()); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	var member bytes.Buffer
	z := zip.NewWriter(&member)
	w, err := z.Create("archive/data.pkl")
	if err == nil {
		_, err = io.CopyN(w, zeros{}, 80<<20)
	}
	if err = errors.Join(err, z.Close()); err != nil {
		t.Fatal(err)
	}
	zipped, err := zip.NewReader(bytes.NewReader(member.Bytes()), int64(member.Len()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := (&torchFile{zip: zipped, root: "archive"}).read("data.pkl", maxFile); err == nil || !strings.Contains(err.Error(), "more than 67108864 bytes") {
		t.Errorf("a member of a zip: %v", err)
	}
	for want, raw := range map[string][]byte{
		"is no zip of torch.save": bomb(""), "expands to more than 67108864 bytes": bomb("PK\x03\x04"), "expanding it": bomb("")[:12],
	} {
		if _, err := readCkpt(fstest.MapFS{"data_0.ckpt.gz": file(raw)}, "data_0.ckpt.gz"); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %s", err, want)
		}
	}
}

func TestDeepSpecIsReadByItsManifest(t *testing.T) {
	manifest, err := json.Marshal(map[string]any{
		"version": 2, "num_samples": 2, "target_layer_ids": []int{-1, 2}, "hidden_size": 1, "hidden_dtype": "torch.float32", "index_record_size": 56,
	})
	if err != nil {
		t.Fatal(err)
	}
	shard := []byte{5, 0, 0, 0, 6, 0, 0, 0, 1, 1, 0, 1}
	for i := range 6 { // two rows of two states, and two last states
		shard = binary.LittleEndian.AppendUint32(shard, uint32(0x3f800000+i<<20))
	}
	record := func(id uint64, length uint32, offsets ...uint64) []byte {
		out := binary.LittleEndian.AppendUint64(nil, id)
		out = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(out, 0), length)
		for _, o := range offsets {
			out = binary.LittleEndian.AppendUint64(out, o)
		}
		return out
	}
	fsys := fstest.MapFS{
		"manifest.json":   file(manifest),
		"samples.idx":     file(append(record(3, 2, 0, 8, 10, 12, 28), record(4, 1<<31, 0, 8, 10, 12, 1<<63)...)),
		"shard-00000.bin": file(shard),
	}
	tokens, states, faults := all(t, DeepSpec, fsys, Config{Layers: 4})
	if got := tokens["sample-3"]; len(got) != 2 || got[1].TokenID != 6 || got[0].LossMask || !got[1].LossMask {
		t.Errorf("%+v", got)
	}
	if len(states["sample-3"]) != 2 || len(states["sample-3"][0]) != 2 {
		t.Errorf("%v", states)
	}
	if f := faults["sample-4"]; f.Check != "K21" {
		t.Errorf("%+v", f)
	}
}

func TestWithoutAClaimOrATargetNothingIsGuessed(t *testing.T) {
	r, err := Open(VLLM, fstest.MapFS{"a.safetensors": file(request([]int64{7, 8}, 2))})
	if err != nil {
		t.Fatal(err)
	}
	for name, cfg := range map[string]Config{
		"no claim":          {Layers: 4},
		"a state too many":  {Layers: 4, States: []int{1, 2, 3, 4}},
		"a state too deep":  {Layers: 2, States: []int{1, 2, 3}},
		"a state twice":     {Layers: 4, States: []int{1, 2, 2}},
		"no state is left":  {Layers: 4, States: []int{-1, -1, -1}},
		"a state below all": {Layers: 4, States: []int{-2, 1, 2}},
	} {
		cfg.Run = "r1"
		if _, err := NewSource(r, cfg); !errors.Is(err, ErrConfig) && !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v, want ErrConfig", name, err)
		}
	}
	if _, err := Open("npz", fstest.MapFS{}); !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
}

func TestStatesInEightBitsNeedAScaleAToken(t *testing.T) {
	codes := make([]byte, 2*3*2)
	for i := range codes {
		codes[i] = byte(0x38 + i) // 1, 1.125, ... 1.875, 2, 2.25, ...
	}
	ids := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, 7), 8)
	with := func(scale ...safetensorstest.Tensor) *fstest.MapFile {
		return file(safetensorstest.File(append([]safetensorstest.Tensor{
			{Name: "hidden_states", DType: "F8_E4M3", Shape: []int{2, 3, 2}, Data: codes},
			{Name: "token_ids", DType: "I64", Shape: []int{2}, Data: ids},
		}, scale...)...))
	}
	scales := func(vals []float32, shape ...int) safetensorstest.Tensor {
		return safetensorstest.F32("hidden_states_scale", vals, shape...)
	}
	fsys := fstest.MapFS{
		"a.safetensors":    with(scales([]float32{1, 10}, 2)),
		"slot.safetensors": with(scales([]float32{1, 2, 3, 4, 5, 6}, 2, 3)),
		"none.safetensors": with(),
		"zero.safetensors": with(scales([]float32{1, 0}, 2)),
		"one.safetensors":  with(scales([]float32{1}, 1)),
	}
	_, states, faults := all(t, VLLM, fsys, Config{States: []int{1, 2, 3}, Layers: 4})
	if got, want := fmt.Sprint(states["a"]), "[[1 1.125 17.5 18.75] [1.25 1.375 20 22.5] [1.5 1.625 25 27.5]]"; got != want {
		t.Errorf("states %s, want %s", got, want)
	}
	if got, want := fmt.Sprint(states["slot"][2]), "[4.5 4.875 15 16.5]"; got != want {
		t.Errorf("with a scale a slot: %s, want %s", got, want)
	}
	for id, want := range map[string]string{"none": "F8_E4M3 without hidden_states_scale", "zero": "hidden_states_scale[1] is 0", "one": "hidden_states_scale has shape [1]; want a scale a token"} {
		if f := faults[id]; !strings.Contains(f.Detail, want) {
			t.Errorf("%s: %+v, want %s", id, f, want)
		}
	}
	for code, want := range map[byte]float32{0: 0, 1: 1.0 / 512, 7: 7.0 / 512, 8: 1.0 / 64, 0x7e: 448, 0xfe: -448} {
		if got := e4m3(code); got != want {
			t.Errorf("code %#x: %v, want %v", code, got, want)
		}
	}
}
