package schemas

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
)

// DType is how the values of a captured state are stored.
type DType string

// The state dtypes of the stream. Parquet holds both as FLOAT, bit for bit.
const (
	F32  DType = "f32"
	BF16 DType = "bf16"
)

// Size is the number of bytes a value takes, 0 for an unknown dtype.
func (d DType) Size() int {
	switch d {
	case F32:
		return 4
	case BF16:
		return 2
	}
	return 0
}

// CaptureSpec describes the states of a capture.
type CaptureSpec struct {
	Run    string
	Hidden int   // width H of a state
	Layers int   // n, the depth of the target
	States []int // which c, ascending
	DType  DType
}

// Capture is one batch of a capture: tokens at consecutive positions and, for
// each recorded state, Rows*Hidden little-endian values.
type Capture struct {
	Spec   CaptureSpec
	Tokens []Token
	States [][]byte // by index into Spec.States; a view of the record
}

const (
	keyHidden   = "draftscope.hidden"
	keyLayers   = "draftscope.layers"
	keyState    = "draftscope.state"
	keyDType    = "draftscope.dtype"
	statePrefix = "state_"
)

// CaptureSchema is the token columns followed by one FixedSizeBinary column a
// state, whose metadata names the state and its dtype.
func CaptureSchema(spec CaptureSpec) *arrow.Schema {
	keys, values := Envelope{Table: TableCapture, Run: spec.Run}.metadata()
	keys = append(keys, keyHidden, keyLayers)
	values = append(values, strconv.Itoa(spec.Hidden), strconv.Itoa(spec.Layers))
	fields := fieldsOf(reflect.TypeFor[Token]())
	for _, c := range spec.States {
		fields = append(fields, arrow.Field{
			Name:     statePrefix + strconv.Itoa(c),
			Type:     &arrow.FixedSizeBinaryType{ByteWidth: spec.Hidden * spec.DType.Size()},
			Metadata: arrow.NewMetadata([]string{keyState, keyDType}, []string{strconv.Itoa(c), string(spec.DType)}),
		})
	}
	md := arrow.NewMetadata(keys, values)
	return arrow.NewSchema(fields, &md)
}

// CaptureRecord builds the record of one batch; states are copied. The caller
// releases it.
func CaptureRecord(mem memory.Allocator, c Capture) (arrow.Record, error) {
	states := make([]*memory.Buffer, len(c.States))
	for i, raw := range c.States {
		states[i] = memory.NewResizableBuffer(mem)
		defer states[i].Release()
		states[i].Resize(len(raw))
		copy(states[i].Bytes(), raw)
	}
	return CaptureRecordOf(mem, c.Spec, c.Tokens, states)
}

// CaptureRecordOf is CaptureRecord over states that lie in Arrow's buffers
// already, which the record retains.
func CaptureRecordOf(mem memory.Allocator, spec CaptureSpec, rows []Token, states []*memory.Buffer) (arrow.Record, error) {
	tokens := Record(mem, Envelope{Table: TableTokens, Run: spec.Run}, rows)
	defer tokens.Release()
	cols := slices.Clone(tokens.Columns())
	width := spec.Hidden * spec.DType.Size()
	if len(states) != len(spec.States) || width == 0 {
		return nil, fmt.Errorf("%w: %d states of %d bytes, the capture records %v", ErrRecord, len(states), width, spec.States)
	}
	for i, buf := range states {
		if buf.Len() != len(rows)*width {
			return nil, fmt.Errorf("%w: state %d has %d bytes for %d tokens of %d", ErrRecord, spec.States[i], buf.Len(), len(rows), width)
		}
		data := array.NewData(&arrow.FixedSizeBinaryType{ByteWidth: width}, len(rows), []*memory.Buffer{nil, buf}, nil, 0, 0)
		col := array.NewFixedSizeBinaryData(data)
		data.Release()
		defer col.Release()
		cols = append(cols, col)
	}
	return array.NewRecord(CaptureSchema(spec), cols, int64(len(rows))), nil
}

// ReadCapture reads a capture record. The states are views that live as long
// as the record.
func ReadCapture(rec arrow.Record) (Capture, error) {
	var c Capture
	env, err := EnvelopeOf(rec)
	if err != nil {
		return c, err
	}
	if env.Table != TableCapture {
		return c, fmt.Errorf("%w: table %s, want %s", ErrRecord, env.Table, TableCapture)
	}
	c.Spec.Run = env.Run
	fields := rec.Schema().Fields()
	if c.Tokens, err = leadingRows[Token](rec); err != nil {
		return c, err
	}
	md := rec.Schema().Metadata()
	for _, kv := range []struct {
		key string
		dst *int
	}{{keyHidden, &c.Spec.Hidden}, {keyLayers, &c.Spec.Layers}} {
		v, _ := md.GetValue(kv.key)
		if *kv.dst, err = strconv.Atoi(v); err != nil || *kv.dst < 1 {
			return c, fmt.Errorf("%w: %s is %q", ErrRecord, kv.key, v)
		}
	}
	for i := reflect.TypeFor[Token]().NumField(); i < len(fields); i++ {
		v, _ := fields[i].Metadata.GetValue(keyState)
		state, err := strconv.Atoi(v)
		d, _ := fields[i].Metadata.GetValue(keyDType)
		col, ok := rec.Column(i).(*array.FixedSizeBinary)
		if err != nil || !ok || DType(d).Size() == 0 {
			return c, fmt.Errorf("%w: column %s is no state", ErrRecord, fields[i].Name)
		}
		width := c.Spec.Hidden * DType(d).Size()
		if got := col.DataType().(*arrow.FixedSizeBinaryType).ByteWidth; got != width || col.NullN() > 0 {
			return c, fmt.Errorf("%w: column %s has %d bytes a row, want %d", ErrRecord, fields[i].Name, got, width)
		}
		if c.Spec.DType != "" && c.Spec.DType != DType(d) {
			return c, fmt.Errorf("%w: states of dtype %s and %s in one record", ErrRecord, c.Spec.DType, d)
		}
		c.Spec.DType = DType(d)
		c.Spec.States = append(c.Spec.States, state)
		off := col.Data().Offset() * width
		var raw []byte
		if n := col.Len() * width; n > 0 {
			raw = col.Data().Buffers()[1].Bytes()[off : off+n]
		}
		c.States = append(c.States, raw)
	}
	return c, nil
}

// AppendFloats appends the values of raw, which are of dtype d, to dst.
func (d DType) AppendFloats(dst []float32, raw []byte) []float32 {
	at, n := len(dst), len(raw)/d.Size()
	dst = slices.Grow(dst, n)[:at+n]
	out := dst[at:]
	if d != BF16 {
		for i := range out {
			out[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
		}
		return dst
	}
	for len(out) >= 4 && len(raw) >= 8 {
		v := binary.LittleEndian.Uint64(raw)
		out[0] = math.Float32frombits(uint32(v) << 16)
		out[1] = math.Float32frombits(uint32(v) & 0xffff0000)
		out[2] = math.Float32frombits(uint32(v>>32) << 16)
		out[3] = math.Float32frombits(uint32(v>>32) & 0xffff0000)
		out, raw = out[4:], raw[8:]
	}
	for i := range out {
		out[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(raw[2*i:])) << 16)
	}
	return dst
}

// AppendBytes appends vals to dst in dtype d. To bf16 it rounds to nearest,
// ties to even; NaN stays NaN.
func (d DType) AppendBytes(dst []byte, vals []float32) []byte {
	for _, v := range vals {
		bits := math.Float32bits(v)
		if d == F32 {
			dst = binary.LittleEndian.AppendUint32(dst, bits)
			continue
		}
		if v != v {
			bits |= 1 << 22
		} else {
			bits += 0x7fff + bits>>16&1
		}
		dst = binary.LittleEndian.AppendUint16(dst, uint16(bits>>16))
	}
	return dst
}

func sortedKeys(m map[string]string) []string {
	return slices.Sorted(maps.Keys(m))
}
