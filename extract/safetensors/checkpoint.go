// Package safetensors reads the weights of a model directory: one
// safetensors file, or the shards that an index names. Files of the operating
// system are mapped into memory, so that opening a checkpoint costs its
// header alone.
//
// A damaged file gives an error that names the file and the tensor, in time
// and memory bounded by the header, never a panic.
package safetensors

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
)

const (
	singleName = "model.safetensors"
	indexName  = "model.safetensors.index.json"
)

// Checkpoint is the open weights of one model. Reading from several
// goroutines is allowed; Close must come after all of them.
type Checkpoint struct {
	files   []*file
	index   []byte
	tensors map[string]*file
	names   []string
}

// named is a directory in a message. "." says nothing to who does not know what
// it is the root of.
func named(dir string) string {
	if dir == "." {
		return ""
	}
	return " " + dir
}

// Open opens the weights in directory dir of fsys: model.safetensors, else the
// shards of model.safetensors.index.json, else the one *.safetensors file
// there is. The error wraps [ErrMissing] when there are none and [ErrDamaged]
// when a file breaks the format.
func Open(fsys fs.FS, dir string) (*Checkpoint, error) {
	_, err := fs.Stat(fsys, path.Join(dir, singleName))
	if err == nil {
		return OpenFile(fsys, path.Join(dir, singleName))
	}
	index, err := fs.ReadFile(fsys, path.Join(dir, indexName))
	if err == nil {
		return openShards(fsys, dir, index)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("opening checkpoint%s: %w", named(dir), err)
	}
	entries, err := fs.ReadDir(fsys, dir)
	if err != nil {
		return nil, fmt.Errorf("opening checkpoint%s: %w: there is no %s or %s; give the directory of a downloaded model: %w", named(dir), ErrMissing, singleName, indexName, err)
	}
	var found []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".safetensors") && !e.IsDir() {
			found = append(found, e.Name())
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("opening checkpoint%s: %w: there is no %s or %s, and %d other *.safetensors files; give the directory of a downloaded model", named(dir), ErrMissing, singleName, indexName, len(found))
	}
	return OpenFile(fsys, path.Join(dir, found[0]))
}

// OpenFile opens one safetensors file as a checkpoint of its own.
func OpenFile(fsys fs.FS, name string) (*Checkpoint, error) {
	f, err := openFile(fsys, name)
	if err != nil {
		return nil, err
	}
	return newCheckpoint([]*file{f}, nil)
}

func openShards(fsys fs.FS, dir string, index []byte) (*Checkpoint, error) {
	label := path.Join(dir, indexName)
	var doc struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(index, &doc); err != nil {
		return nil, fmt.Errorf("reading %s: %w: %w", label, ErrDamaged, err)
	}
	if len(doc.WeightMap) == 0 {
		return nil, fmt.Errorf("reading %s: %w: its weight_map is empty", label, ErrDamaged)
	}
	var shards []string
	for name, shard := range doc.WeightMap {
		if path.Base(shard) != shard || !fs.ValidPath(shard) {
			return nil, fmt.Errorf("reading %s: %w: tensor %q lies in %q, which is not a file beside the index", label, ErrDamaged, name, shard)
		}
		shards = append(shards, shard)
	}
	slices.Sort(shards)
	shards = slices.Compact(shards)
	c := &Checkpoint{}
	byName := map[string]*file{}
	for _, shard := range shards {
		f, err := openFile(fsys, path.Join(dir, shard))
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		c.files = append(c.files, f)
		byName[shard] = f
	}
	for _, name := range sortedNames(doc.WeightMap) {
		if _, ok := byName[doc.WeightMap[name]].tensors[name]; !ok {
			return nil, errors.Join(fmt.Errorf("reading %s: %w: tensor %q is not in %s; download the model again", label, ErrMissing, name, doc.WeightMap[name]), c.Close())
		}
	}
	return newCheckpoint(c.files, index)
}

func sortedNames(m map[string]string) []string {
	names := make([]string, 0, len(m))
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func newCheckpoint(files []*file, index []byte) (*Checkpoint, error) {
	c := &Checkpoint{files: files, index: index, tensors: map[string]*file{}}
	for _, f := range files {
		for _, name := range f.names {
			if other, twice := c.tensors[name]; twice {
				return nil, errors.Join(fmt.Errorf("%w: tensor %q is in both %s and %s", ErrDamaged, name, other.label, f.label), c.Close())
			}
			c.tensors[name] = f
			c.names = append(c.names, name)
		}
	}
	slices.Sort(c.names)
	return c, nil
}

// openFile maps or reads one file and parses its header.
func openFile(fsys fs.FS, name string) (*file, error) {
	src, err := fsys.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s does not exist; download the model again: %w", ErrMissing, name, err)
	}
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", name, err)
	}
	label, release := name, func() error { return nil }
	var raw []byte
	switch s := src.(type) {
	case *os.File:
		label = s.Name()
		raw, release, err = mapFile(s)
	case interface{ Bytes() []byte }:
		raw = s.Bytes()
	default:
		raw, err = io.ReadAll(src)
	}
	if err := errors.Join(err, src.Close()); err != nil {
		return nil, fmt.Errorf("reading %s: %w", label, err)
	}
	f, err := parse(label, raw)
	if err != nil {
		return nil, errors.Join(err, release())
	}
	f.release = release
	return f, nil
}

// Names lists the tensors in alphabetical order.
func (c *Checkpoint) Names() []string { return slices.Clone(c.names) }

// Info describes a tensor, false when there is none of that name.
func (c *Checkpoint) Info(name string) (Info, bool) {
	f, ok := c.tensors[name]
	if !ok {
		return Info{}, false
	}
	return f.tensors[name].Info, true
}

// Shape is the shape of a tensor, false when there is none of that name.
func (c *Checkpoint) Shape(name string) ([]int, bool) {
	info, ok := c.Info(name)
	return info.Shape, ok
}

// Raw is a tensor's data as the file holds it. It is valid until Close and
// must not be written.
func (c *Checkpoint) Raw(name string) ([]byte, error) {
	f, ok := c.tensors[name]
	if !ok {
		return nil, fmt.Errorf("reading tensor %q: %w: no file of the checkpoint holds it", name, ErrMissing)
	}
	t := f.tensors[name]
	return f.raw[t.lo:t.hi:t.hi], nil
}

// Float32s converts a tensor of dtype F32, BF16 or F16 to float32, exactly.
func (c *Checkpoint) Float32s(name string) ([]float32, error) {
	raw, err := c.Raw(name)
	if err != nil {
		return nil, err
	}
	info, _ := c.Info(name)
	dst := make([]float32, len(raw)/info.DType.Size())
	if err := floats(dst, raw, info.DType); err != nil {
		return nil, fmt.Errorf("reading tensor %q of %s: %w", name, info.File, err)
	}
	return dst, nil
}

// Ints reads a tensor of whole numbers or bits: I64 to I8, U32 to U8, or BOOL.
func (c *Checkpoint) Ints(name string) ([]int64, error) {
	raw, err := c.Raw(name)
	if err != nil {
		return nil, err
	}
	info, _ := c.Info(name)
	size := info.DType.Size()
	dst := make([]int64, len(raw)/size)
	for i := range dst {
		switch at := raw[i*size:]; info.DType {
		case "I64":
			dst[i] = int64(binary.LittleEndian.Uint64(at))
		case "I32":
			dst[i] = int64(int32(binary.LittleEndian.Uint32(at)))
		case "I16":
			dst[i] = int64(int16(binary.LittleEndian.Uint16(at)))
		case "U32":
			dst[i] = int64(binary.LittleEndian.Uint32(at))
		case "U16":
			dst[i] = int64(binary.LittleEndian.Uint16(at))
		case "I8":
			dst[i] = int64(int8(at[0]))
		case "U8", "BOOL":
			dst[i] = int64(at[0])
		default:
			return nil, fmt.Errorf("reading tensor %q of %s: %w: %s, want whole numbers", name, info.File, ErrDType, info.DType)
		}
	}
	return dst, nil
}

const (
	samples     = 16
	sampleBytes = 256
)

// Fingerprint is a hash of the index, the headers, and sixteen evenly spaced
// pieces of every tensor: cheap on any size, and different for two trainings
// of one architecture, whose headers are equal.
func (c *Checkpoint) Fingerprint() string {
	h := sha256.New()
	h.Write(c.index)
	for _, f := range c.files {
		h.Write(f.header)
		for _, name := range f.names {
			t := f.tensors[name]
			data := f.raw[t.lo:t.hi]
			for i := range samples {
				lo := len(data) / samples * i
				h.Write(data[lo:min(lo+sampleBytes, len(data))])
			}
			h.Write(data[max(0, len(data)-sampleBytes):])
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Close unmaps the files. What Raw returned is invalid from then on.
func (c *Checkpoint) Close() error {
	var errs []error
	for _, f := range c.files {
		errs = append(errs, f.release())
	}
	c.files, c.tensors, c.names = nil, nil, nil
	return errors.Join(errs...)
}
