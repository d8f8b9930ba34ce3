package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
)

// DType is the dtype of a tensor as the file spells it.
type DType string

// The dtypes that Float32s converts. Files may hold others; they are listed
// but not converted.
const (
	F32  DType = "F32"
	F16  DType = "F16"
	BF16 DType = "BF16"
)

var sizes = map[DType]int{
	F32: 4, F16: 2, BF16: 2, "F64": 8,
	"I64": 8, "I32": 4, "I16": 2, "I8": 1,
	"U64": 8, "U32": 4, "U16": 2, "U8": 1,
	"BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}

// Size is the number of bytes of a value, 0 for a dtype that is not known.
func (d DType) Size() int { return sizes[d] }

// Info describes a tensor.
type Info struct {
	DType DType
	Shape []int  // empty for a scalar
	File  string // the file that holds it
	Bytes int    // the length of its data
}

const (
	prefixLen = 8
	// maxHeader bounds the memory that a hostile header can cost. A real one
	// takes about 130 bytes a tensor, 3 MB for the largest models.
	maxHeader = 16 << 20
	maxEntry  = 4 << 10 // bytes of JSON that describe one tensor
	maxRank   = 16
)

// tensor is where a tensor lies within its file's data.
type tensor struct {
	Info
	lo, hi int // offsets into file.raw
}

// file is one parsed safetensors file.
type file struct {
	label   string // for errors
	raw     []byte
	header  []byte
	tensors map[string]tensor
	names   []string // by offset
	release func() error
}

// parse reads the header of raw and checks that the tensors it declares cover
// the data exactly: no gap, no overlap, no byte beyond. Its cost is bounded by
// the header's own length, whatever the header says.
func parse(label string, raw []byte) (*file, error) {
	f := &file{label: label, raw: raw, tensors: map[string]tensor{}}
	if len(raw) < prefixLen {
		return nil, f.damaged("it has %d bytes, the header's length alone takes %d", len(raw), prefixLen)
	}
	if bytes.HasPrefix(raw, []byte("version https://git-lfs")) {
		return nil, f.damaged("it is a Git LFS pointer, not the weights; run git lfs pull")
	}
	n := binary.LittleEndian.Uint64(raw)
	if n > uint64(len(raw)-prefixLen) {
		return nil, f.damaged("its header claims %d bytes, the file has %d; download it again", n, len(raw))
	}
	if n > maxHeader {
		return nil, f.damaged("its header takes %d bytes, the limit is %d", n, maxHeader)
	}
	f.header = raw[prefixLen : prefixLen+int(n)]
	if err := f.readHeader(); err != nil {
		return nil, err
	}
	return f, f.checkCover()
}

func (f *file) damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s: %s", ErrDamaged, f.label, fmt.Sprintf(format, args...))
}

// readHeader walks the header key by key, because a map would hide a name
// that appears twice.
func (f *file) readHeader() error {
	dec := json.NewDecoder(bytes.NewReader(f.header))
	if tok, err := dec.Token(); err != nil || tok != json.Delim('{') {
		return f.damaged("its header is not a JSON object")
	}
	data := len(f.raw) - prefixLen - len(f.header)
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return f.damaged("its header is not JSON: %v", err)
		}
		name, ok := tok.(string)
		if !ok {
			return f.damaged("its header holds %v where a name is due", tok)
		}
		if name == "__metadata__" {
			var skip map[string]string
			if err := dec.Decode(&skip); err != nil {
				return f.damaged("__metadata__ is not a map of strings: %v", err)
			}
			continue
		}
		t, err := f.readTensor(dec, name, data)
		if err != nil {
			return err
		}
		if _, twice := f.tensors[name]; twice {
			return f.damaged("tensor %q is declared twice", name)
		}
		f.tensors[name] = t
		f.names = append(f.names, name)
	}
	if _, err := dec.Token(); err != nil {
		return f.damaged("its header is cut: %v", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return f.damaged("its header goes on after its closing brace")
	}
	return nil
}

func (f *file) readTensor(dec *json.Decoder, name string, data int) (tensor, error) {
	var e struct {
		DType   DType   `json:"dtype"`
		Shape   []int64 `json:"shape"`
		Offsets []int64 `json:"data_offsets"`
	}
	var entry json.RawMessage
	if err := dec.Decode(&entry); err != nil {
		return tensor{}, f.damaged("tensor %q: %v", name, err)
	}
	if len(entry) > maxEntry {
		return tensor{}, f.damaged("the entry of tensor %q takes %d bytes, the limit is %d", name, len(entry), maxEntry)
	}
	strict := json.NewDecoder(bytes.NewReader(entry))
	strict.DisallowUnknownFields()
	if err := strict.Decode(&e); err != nil {
		return tensor{}, f.damaged("tensor %q: %v", name, err)
	}
	if e.DType.Size() == 0 {
		return tensor{}, f.damaged("tensor %q has the unknown dtype %q", name, e.DType)
	}
	if len(e.Offsets) != 2 || e.Offsets[0] < 0 || e.Offsets[1] < e.Offsets[0] || e.Offsets[1] > int64(data) {
		return tensor{}, f.damaged("tensor %q lies at %v, the data has %d bytes", name, e.Offsets, data)
	}
	if len(e.Shape) > maxRank {
		return tensor{}, f.damaged("tensor %q has %d dimensions, the limit is %d", name, len(e.Shape), maxRank)
	}
	size := int64(e.DType.Size())
	shape := make([]int, len(e.Shape))
	for i, d := range e.Shape {
		if d < 0 || d > 0 && size > math.MaxInt64/d {
			return tensor{}, f.damaged("tensor %q has the shape %v, which no file can hold", name, e.Shape)
		}
		size *= d
		shape[i] = int(d)
	}
	if size != e.Offsets[1]-e.Offsets[0] {
		return tensor{}, f.damaged("tensor %q of shape %v and dtype %s takes %d bytes, its range has %d",
			name, e.Shape, e.DType, size, e.Offsets[1]-e.Offsets[0])
	}
	base := prefixLen + len(f.header)
	return tensor{
		Info: Info{DType: e.DType, Shape: shape, File: f.label, Bytes: int(size)},
		lo:   base + int(e.Offsets[0]), hi: base + int(e.Offsets[1]),
	}, nil
}

func (f *file) checkCover() error {
	slices.SortFunc(f.names, func(a, b string) int {
		x, y := f.tensors[a], f.tensors[b]
		if c := x.lo - y.lo; c != 0 {
			return c
		}
		return x.hi - y.hi
	})
	base := prefixLen + len(f.header)
	at := base
	for i, name := range f.names {
		t := f.tensors[name]
		switch {
		case t.lo < at:
			return f.damaged("tensors %q and %q overlap", f.names[i-1], name)
		case t.lo > at:
			return f.damaged("%d bytes before tensor %q belong to none", t.lo-at, name)
		}
		at = t.hi
	}
	if at != len(f.raw) {
		return f.damaged("%d bytes follow the last tensor", len(f.raw)-at)
	}
	return nil
}
