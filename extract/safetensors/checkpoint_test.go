package safetensors_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/safetensors/safetensorstest"
	"github.com/google/go-cmp/cmp"
)

func open(t *testing.T, fsys fs.FS, dir string) *safetensors.Checkpoint {
	t.Helper()
	c, err := safetensors.Open(fsys, dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func TestAllThreeDtypesReadTheSameValues(t *testing.T) {
	vals := []float32{0, 1, -2, 0.5, 1.5, 0.25}
	file := safetensorstest.File(
		safetensorstest.F32("a", vals, 2, 3),
		safetensorstest.U16("b", "BF16", []uint16{0, 0x3f80, 0xc000, 0x3f00, 0x3fc0, 0x3e80}, 2, 3),
		safetensorstest.U16("c", "F16", []uint16{0, 0x3c00, 0xc000, 0x3800, 0x3e00, 0x3400}, 6),
		safetensorstest.Tensor{Name: "ids", DType: "I64", Shape: []int{1}, Data: make([]byte, 8)},
	)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "model.safetensors"), file, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, fsys := range map[string]fs.FS{
		"mapped": os.DirFS(dir),
		"read":   fstest.MapFS{"model.safetensors": {Data: file}},
	} {
		t.Run(name, func(t *testing.T) {
			c := open(t, fsys, ".")
			if diff := cmp.Diff([]string{"a", "b", "c", "ids"}, c.Names()); diff != "" {
				t.Error(diff)
			}
			for _, tensor := range []string{"a", "b", "c"} {
				got, err := c.Float32s(tensor)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(vals, got); diff != "" {
					t.Errorf("%s: %s", tensor, diff)
				}
			}
			if shape, ok := c.Shape("b"); !ok || !cmp.Equal(shape, []int{2, 3}) {
				t.Errorf("shape of b is %v, %t", shape, ok)
			}
			if _, err := c.Float32s("ids"); !errors.Is(err, safetensors.ErrDType) {
				t.Errorf("reading integers as floats: %v", err)
			}
			if _, err := c.Float32s("none"); !errors.Is(err, safetensors.ErrMissing) {
				t.Errorf("reading a tensor that is not there: %v", err)
			}
		})
	}
}

func TestShardsReadAsOneCheckpoint(t *testing.T) {
	one := safetensorstest.File(safetensorstest.F32("a", []float32{1}, 1), safetensorstest.F32("b", []float32{2}, 1))
	two := safetensorstest.File(safetensorstest.F32("c", []float32{3}, 1))
	index := `{"metadata":{"total_size":12},"weight_map":{"a":"m-1.safetensors","b":"m-1.safetensors","c":"m-2.safetensors"}}`
	whole := func() fstest.MapFS {
		return fstest.MapFS{
			"d/model.safetensors.index.json": {Data: []byte(index)},
			"d/m-1.safetensors":              {Data: one},
			"d/m-2.safetensors":              {Data: two},
		}
	}
	c := open(t, whole(), "d")
	for i, name := range []string{"a", "b", "c"} {
		if got, err := c.Float32s(name); err != nil || got[0] != float32(i+1) {
			t.Errorf("%s = %v, %v", name, got, err)
		}
	}
	for name, tc := range map[string]struct {
		change func(fstest.MapFS)
		want   string
	}{
		"shard missing":  {func(m fstest.MapFS) { delete(m, "d/m-2.safetensors") }, "m-2.safetensors does not exist"},
		"tensor missing": {func(m fstest.MapFS) { m["d/m-2.safetensors"].Data = one }, `tensor "c" is not in m-2.safetensors`},
		"tensor twice": {func(m fstest.MapFS) {
			m["d/m-2.safetensors"].Data = safetensorstest.File(safetensorstest.F32("c", []float32{3}, 1), safetensorstest.F32("a", []float32{3}, 1))
		}, `tensor "a" is in both`},
		"index not JSON":  {func(m fstest.MapFS) { m["d/model.safetensors.index.json"].Data = []byte("{") }, "index.json"},
		"index empty":     {func(m fstest.MapFS) { m["d/model.safetensors.index.json"].Data = []byte("{}") }, "weight_map is empty"},
		"shard elsewhere": {func(m fstest.MapFS) { m["d/model.safetensors.index.json"].Data = []byte(`{"weight_map":{"a":"../x"}}`) }, "not a file beside the index"},
	} {
		t.Run(name, func(t *testing.T) {
			m := whole()
			tc.change(m)
			_, err := safetensors.Open(m, "d")
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestADirectoryWithoutWeightsNamesTheRemedy(t *testing.T) {
	for name, fsys := range map[string]fs.FS{
		"no directory": fstest.MapFS{},
		"no file":      fstest.MapFS{"d/config.json": {}},
		"two files":    fstest.MapFS{"d/a.safetensors": {}, "d/b.safetensors": {}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := safetensors.Open(fsys, "d")
			if !errors.Is(err, safetensors.ErrMissing) || !strings.Contains(err.Error(), "checkpoint d:") || !strings.Contains(err.Error(), "give the directory") {
				t.Errorf("error is %v", err)
			}
		})
	}
}

func TestDamagedFilesAreRefusedQuicklyAndByName(t *testing.T) {
	const f32 = `"dtype":"F32","shape":[2],`
	long := binary.LittleEndian.AppendUint64(nil, 1<<40)
	good := safetensorstest.File(safetensorstest.F32("w", []float32{1, 2}, 2))
	for name, tc := range map[string]struct {
		file []byte
		want string
	}{
		"empty":                     {nil, "0 bytes"},
		"shorter than the prefix":   {good[:5], "5 bytes"},
		"header of 2^40 bytes":      {append(long, good[8:]...), "claims 1099511627776 bytes"},
		"header cut":                {good[:30], "claims"},
		"header beyond the limit":   {append(binary.LittleEndian.AppendUint64(nil, 17<<20), make([]byte, 17<<20)...), "the limit is"},
		"one byte short":            {good[:len(good)-1], `"w"`},
		"four trailing bytes":       {append(bytes.Clone(good), 0, 0, 0, 0), "4 bytes follow the last tensor"},
		"overlapping":               {safetensorstest.Raw(`{"w":{`+f32+`"data_offsets":[0,8]},"v":{`+f32+`"data_offsets":[4,12]}}`, make([]byte, 12)), `tensors "w" and "v" overlap`},
		"a gap":                     {safetensorstest.Raw(`{"w":{`+f32+`"data_offsets":[4,12]}}`, make([]byte, 12)), `4 bytes before tensor "w"`},
		"shape against range":       {safetensorstest.Raw(`{"w":{`+f32+`"data_offsets":[0,4]}}`, make([]byte, 4)), `takes 8 bytes, its range has 4`},
		"the same name twice":       {safetensorstest.Raw(`{"w":{`+f32+`"data_offsets":[0,8]},"w":{`+f32+`"data_offsets":[8,16]}}`, make([]byte, 16)), `"w" is declared twice`},
		"a shape that overflows":    {safetensorstest.Raw(`{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, nil), "which no file can hold"},
		"a shape wrapping to zero":  {safetensorstest.Raw(`{"w":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,8]}}`, make([]byte, 8)), "which no file can hold"},
		"a negative shape":          {safetensorstest.Raw(`{"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}`, make([]byte, 8)), "no file can hold"},
		"offsets turned round":      {safetensorstest.Raw(`{"w":{`+f32+`"data_offsets":[8,0]}}`, make([]byte, 8)), `tensor "w" lies at [8 0]`},
		"offsets past the end":      {safetensorstest.Raw(`{"w":{`+f32+`"data_offsets":[0,800]}}`, make([]byte, 8)), `the data has 8 bytes`},
		"a dtype nobody knows":      {safetensorstest.Raw(`{"w":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}`, make([]byte, 8)), `dtype "F33"`},
		"a header that is no JSON":  {safetensorstest.Raw(`hello`, nil), "not a JSON object"},
		"a header that goes on":     {safetensorstest.Raw(`{} {}`, nil), "goes on"},
		"a pointer instead of data": {[]byte("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"), "git lfs pull"},
		"a header of shapes only":   {safetensorstest.Raw(`{"w":{"dtype":"F32","shape":[`+strings.Repeat("0,", 8<<20-100)+`0],"data_offsets":[0,0]}}`, nil), "the limit is 4096"},
		"seventeen dimensions":      {safetensorstest.Raw(`{"w":{"dtype":"F32","shape":[0`+strings.Repeat(",0", 16)+`],"data_offsets":[0,0]}}`, nil), "17 dimensions"},
		"a header of nesting":       {safetensorstest.Raw(`{"w":`+strings.Repeat("[", 1<<20), nil), `"w"`},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			start := processTime(t)
			_, err := safetensors.Open(fstest.MapFS{"d/model.safetensors": {Data: tc.file}}, "d")
			elapsed := processTime(t) - start
			runtime.ReadMemStats(&after)
			if !errors.Is(err, safetensors.ErrDamaged) {
				t.Fatalf("error is %v, want ErrDamaged", err)
			}
			if !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "d/model.safetensors") {
				t.Errorf("error is %v, want it to name the file and say %q", err, tc.want)
			}
			if grown := after.TotalAlloc - before.TotalAlloc; grown > 256<<20 {
				t.Errorf("allocated %d MiB", grown>>20)
			}
			if elapsed > 5*time.Second { // a second without the race detector
				t.Errorf("took %v", elapsed)
			}
		})
	}
}

func TestTheFixturesOpen(t *testing.T) {
	c := open(t, demotest.FS(t), "target")
	if shape, _ := c.Shape("model.embed_tokens.weight"); !cmp.Equal(shape, []int{4096, 256}) {
		t.Errorf("embedding has shape %v", shape)
	}
	prints := map[string]string{c.Fingerprint(): "target"}
	for _, dir := range []string{"hybrid", "drafters/good", "drafters/early", "drafters/shift"} {
		p := open(t, demotest.FS(t), dir).Fingerprint()
		if other, same := prints[p]; same {
			t.Errorf("%s and %s have the same fingerprint", dir, other)
		}
		prints[p] = dir
	}
	again := open(t, demotest.FS(t), "target")
	if again.Fingerprint() != c.Fingerprint() {
		t.Error("the fingerprint differs between two opens")
	}
	golden, err := safetensors.OpenFile(demotest.FS(t), "golden/p0000.safetensors")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := golden.Float32s("hidden_states.8"); err != nil {
		t.Error(err)
	}
}

func FuzzOpen(f *testing.F) {
	f.Add(safetensorstest.File(safetensorstest.F32("w", []float32{1, 2}, 2), safetensorstest.U16("h", "F16", []uint16{1}, 1)))
	f.Add(safetensorstest.Raw(`{"w":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}`, make([]byte, 4)))
	f.Add(safetensorstest.Raw(`{"w":{"dtype":"BF16","shape":[0,9],"data_offsets":[0,0]}}`, nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := safetensors.Open(fstest.MapFS{"model.safetensors": {Data: data}}, ".")
		if err != nil {
			if !errors.Is(err, safetensors.ErrDamaged) {
				t.Errorf("error is %v, want ErrDamaged", err)
			}
			return
		}
		total := 0
		for _, name := range c.Names() {
			info, _ := c.Info(name)
			total += info.Bytes
			if vals, err := c.Float32s(name); err == nil && len(vals)*info.DType.Size() != info.Bytes {
				t.Errorf("%s has %d values in %d bytes", name, len(vals), info.Bytes)
			}
		}
		if total > len(data) {
			t.Errorf("%d bytes of tensors in a file of %d", total, len(data))
		}
		c.Fingerprint()
	})
}

func BenchmarkFloat32s(b *testing.B) {
	c, err := safetensors.Open(demotest.FS(b), "target")
	if err != nil {
		b.Fatal(err)
	}
	info, _ := c.Info("model.embed_tokens.weight")
	b.SetBytes(int64(info.Bytes))
	for b.Loop() {
		if _, err := c.Float32s("model.embed_tokens.weight"); err != nil {
			b.Fatal(err)
		}
	}
}
