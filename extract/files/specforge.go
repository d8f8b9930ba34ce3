package files

import (
	"archive/zip"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/extract/probe"
)

// SpecForge stores torch.save of a dict, one file a sample: input_ids and
// loss_mask [S], and hidden_states [1, S, L*H] (DFlash, Domino, DSpark) or
// aux_hidden_state [1, S, 3H] (EAGLE3). Its layer id v is the output of the
// 0-based layer v: state v+1; which ones they are is not in the file. The last
// hidden state, where there is one, is stored after the final norm.

func openSpecForge(fsys fs.FS) (*Reader, error) {
	names, err := find(fsys, func(name string) bool {
		return strings.HasSuffix(name, ".ckpt") || strings.HasSuffix(name, ".ckpt.gz")
	})
	if err != nil {
		return nil, fmt.Errorf("looking for *.ckpt: %w", err)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%w: there is no *.ckpt or *.ckpt.gz", ErrFormat)
	}
	r := &Reader{}
	for _, name := range names {
		r.samples = append(r.samples, lazy{idOf(name), name, func() (*Sample, error) {
			s, err := readCkpt(fsys, name)
			if err != nil {
				return nil, fmt.Errorf("reading %s: %w", name, err)
			}
			s.ID, s.File = idOf(name), name
			return s, s.check()
		}})
	}
	return r, nil
}

// What one compressed sample may expand to: so many bytes at most, and, beyond
// some, so many times its size. States hardly compress; what does is no sample.
const (
	maxFile  = 8 << 30
	maxTimes = 100
	expanded = 64 << 20
)

func readCkpt(fsys fs.FS, name string) (*Sample, error) {
	raw, err := readFile(fsys, name)
	if err != nil {
		return nil, err
	}
	if strings.HasSuffix(name, ".gz") {
		z, err := gzip.NewReader(bytes.NewReader(raw))
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrFormat, err)
		}
		if raw, err = expand(z, bound(int64(len(raw)))); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrFormat, err)
		}
	}
	t, err := openTorch(raw)
	if err != nil {
		return nil, err
	}
	return t.sample()
}

// bound is what so many compressed bytes may expand to.
func bound(compressed int64) int64 { return min(maxFile, max(expanded, maxTimes*compressed)) }

// expand reads a zip of at most so many bytes.
func expand(z io.Reader, most int64) ([]byte, error) {
	magic := make([]byte, 4)
	if _, err := io.ReadFull(z, magic); err != nil {
		return nil, fmt.Errorf("expanding it: %w", err)
	}
	if string(magic) != "PK\x03\x04" {
		return nil, fmt.Errorf("what is compressed begins with %q, and is no zip of torch.save", magic)
	}
	var out bytes.Buffer
	out.Write(magic)
	if _, err := io.Copy(&out, io.LimitReader(z, most)); err != nil {
		return nil, fmt.Errorf("expanding it: %w", err)
	}
	if int64(out.Len()) > most {
		return nil, fmt.Errorf("it expands to more than %d bytes", most)
	}
	return out.Bytes(), nil
}

// torchFile is a zip that torch.save wrote.
type torchFile struct {
	zip    *zip.Reader
	root   string
	values map[string]any
}

func openTorch(raw []byte) (*torchFile, error) {
	z, err := zip.NewReader(bytes.NewReader(raw), int64(len(raw)))
	if err != nil {
		return nil, fmt.Errorf("%w: it is no zip of torch.save (torch before 1.6 wrote others): %w", ErrFormat, err)
	}
	t := &torchFile{zip: z}
	for _, f := range z.File {
		if path.Base(f.Name) == "data.pkl" {
			t.root = path.Dir(f.Name)
		}
	}
	order, err := t.read("byteorder", 16)
	if err == nil && strings.TrimSpace(string(order)) != "little" {
		return nil, fmt.Errorf("%w: its bytes are in the order %q", ErrFormat, order)
	}
	program, err := t.read("data.pkl", maxPickle)
	if err != nil {
		return nil, err
	}
	v, err := unpickle(program)
	if err != nil {
		return nil, err
	}
	var ok bool
	if t.values, ok = v.(map[string]any); !ok {
		return nil, fmt.Errorf("%w: it holds a %T, want a dict", ErrFormat, v)
	}
	return t, nil
}

// read reads a member of at most so many bytes.
func (t *torchFile) read(name string, most int64) ([]byte, error) {
	name = path.Join(t.root, name)
	i := slices.IndexFunc(t.zip.File, func(f *zip.File) bool { return f.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("%w: there is no %s in it", ErrFormat, name)
	}
	most = min(most, bound(int64(min(t.zip.File[i].CompressedSize64, maxFile)))) // torch.save does not compress
	f, err := t.zip.File[i].Open()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(raw)) > most {
		err = fmt.Errorf("more than %d bytes", most)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: reading %s: %w", ErrFormat, name, err)
	}
	return raw, nil
}

// sizes of a value of torch's storages.
var storageSizes = map[string]int64{
	"torch FloatStorage": 4, "torch HalfStorage": 2, "torch BFloat16Storage": 2, "torch LongStorage": 8, "torch IntStorage": 4,
	"torch ShortStorage": 2, "torch CharStorage": 1, "torch ByteStorage": 1, "torch BoolStorage": 1,
}

// bytes are a tensor's values, which must lie without gaps.
func (t *torchFile) bytes(name string) (raw []byte, dtype string, shape []int64, err error) {
	v, ok := t.values[name].(tensor)
	if !ok {
		return nil, "", nil, fmt.Errorf("%w: it has no tensor %s", ErrFormat, name)
	}
	size, n := storageSizes[v.storage.dtype], int64(1)
	for i, d := range slices.Backward(v.shape) {
		if d < 0 || d > 1<<40 || n > 1<<40 || d != 1 && v.stride[i] != n {
			return nil, "", nil, fmt.Errorf("%w: %s has shape %v and strides %v; it must lie without gaps", ErrFormat, name, v.shape, v.stride)
		}
		n *= d
	}
	if v.offset < 0 || n > v.storage.size-v.offset || v.storage.size > maxFile/size {
		return nil, "", nil, fmt.Errorf("%w: %s has %d values from %d in a storage of %d", ErrFormat, name, n, v.offset, v.storage.size)
	}
	if !fs.ValidPath(v.storage.key) {
		return nil, "", nil, fmt.Errorf("%w: a storage called %.50q", ErrFormat, v.storage.key)
	}
	if raw, err = t.read("data/"+v.storage.key, v.storage.size*size); err != nil {
		return nil, "", nil, err
	}
	if int64(len(raw)) != v.storage.size*size {
		return nil, "", nil, fmt.Errorf("%w: the storage of %s has %d bytes, want %d", ErrFormat, name, len(raw), v.storage.size*size)
	}
	return raw[v.offset*size : (v.offset+n)*size], v.storage.dtype, v.shape, nil
}

// whole reads a list of whole numbers.
func (t *torchFile) whole(name string) ([]int32, error) {
	raw, dtype, shape, err := t.bytes(name)
	if err != nil {
		return nil, err
	}
	if len(shape) == 2 && shape[0] == 1 {
		shape = shape[1:]
	}
	if len(shape) != 1 {
		return nil, fmt.Errorf("%w: %s has the shape %v, want one dimension", ErrFormat, name, shape)
	}
	switch dtype {
	case "torch LongStorage":
		return readIDs("I64", raw)
	case "torch IntStorage":
		return readIDs("I32", raw)
	case "torch BoolStorage", "torch ByteStorage", "torch CharStorage":
		out := make([]int32, len(raw))
		for i, b := range raw {
			out[i] = int32(b)
		}
		return out, nil
	}
	return nil, fmt.Errorf("%w: %s is a %s", ErrFormat, name, dtype)
}

var storageFormats = map[string]string{"torch FloatStorage": "f32", "torch HalfStorage": "f16", "torch BFloat16Storage": "bf16"}

// floats are rows of values: [S, W] or [1, S, W].
func (t *torchFile) floats(name string) (raw []byte, format probe.Format, rows, width int, err error) {
	raw, dtype, shape, err := t.bytes(name)
	if err != nil {
		return nil, format, 0, 0, err
	}
	if len(shape) == 3 && shape[0] == 1 {
		shape = shape[1:]
	}
	format, ok := probe.FormatOf(storageFormats[dtype])
	if len(shape) != 2 || !ok {
		return nil, format, 0, 0, fmt.Errorf("%w: %s is a %s of shape %v; want [1, tokens, values] in bf16, f16 or f32", ErrFormat, name, dtype, shape)
	}
	return raw, format, int(shape[0]), int(shape[1]), nil
}

func (t *torchFile) sample() (*Sample, error) {
	s := &Sample{}
	var err error
	if s.IDs, err = t.whole("input_ids"); err != nil {
		return nil, err
	}
	mask, err := t.whole("loss_mask")
	if err != nil {
		return nil, err
	}
	for i, bit := range mask {
		if bit != 0 && bit != 1 {
			return nil, fmt.Errorf("%w: loss_mask[%d] is %d; want 0 or 1", ErrFormat, i, bit)
		}
		s.Mask = append(s.Mask, bit == 1)
	}
	if t.values["attention_mask"] != nil {
		if s.Attended, err = t.whole("attention_mask"); err != nil {
			return nil, err
		}
	}
	name, last := "hidden_states", "target_last_hidden_states"
	if t.values["aux_hidden_state"] != nil {
		name, last = "aux_hidden_state", "hidden_state"
	}
	var width int
	if s.States, s.Format, s.Rows, width, err = t.floats(name); err != nil {
		return nil, err
	}
	if t.values[last] == nil {
		// Nothing in the file says how wide a state is.
		s.Hidden, s.Slots = width, 1
		return s, nil
	}
	normed, format, rows, hidden, err := t.floats(last)
	if err != nil {
		return nil, err
	}
	if format.Name != s.Format.Name || rows != s.Rows || hidden == 0 || width%hidden != 0 {
		return nil, errors.Join(ErrFormat, fmt.Errorf("%s has %d rows of %d %s values, %s %d rows of %d %s", name, s.Rows, width, s.Format.Name, last, rows, hidden, format.Name))
	}
	s.Normed, s.Hidden, s.Slots = normed, hidden, width/hidden
	return s, nil
}
