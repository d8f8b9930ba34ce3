package pipeline

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/apache/arrow/go/v17/arrow/memory"
)

// decoder turns payloads into records whose buffers are the payload's own
// bytes: nothing is copied but buffers that do not start on eight bytes, which
// a message's do. A record keeps its message in memory for as long as it
// lives. It belongs to one goroutine.
//
// Arrow's reader would copy every buffer once or twice. It reads the schemas
// here, and is what the tests hold the rest against.
type decoder struct {
	mem   memory.Allocator
	known map[string]knownSchema // by the bytes of the schema message
}

// knownSchema is a schema message that was checked and read.
type knownSchema struct {
	schema      *arrow.Schema
	fields      []arrow.Field // of schema, which copies them each time it is asked
	fingerprint string
	parts       batchParts // what a batch of it lists
}

// A decoder remembers a few schemas; a run has a handful, of a kilobyte each.
const (
	maxKnown     = 16
	maxKnownSize = 64 << 10
)

func newDecoder(mem memory.Allocator) *decoder {
	return &decoder{mem: mem, known: map[string]knownSchema{}}
}

// decode reads the payload of a data message whose header is h. Every length
// and offset is checked before anything is allocated or reached by it;
// whatever the bytes, the answer is a sound record or an error wrapping
// ErrFrame. The payload must not be changed afterwards. The caller releases
// the record.
func (d *decoder) decode(h header, data []byte) (rec arrow.Record, err error) {
	if got := digestOf(data); got != h.digest {
		return nil, fmt.Errorf("%w: digest of the %d bytes is %016x, its header says %016x", ErrFrame, len(data), got, h.digest)
	}
	return d.record(h, data)
}

// record is decode without the digest.
func (d *decoder) record(h header, data []byte) (rec arrow.Record, err error) {
	defer func() {
		if p := recover(); p != nil {
			rec, err = nil, fmt.Errorf("%w: %v", ErrFrame, p)
		}
	}()
	known, rest, err := d.schema(data)
	if err != nil {
		return nil, err
	}
	b, rest, err := checkMessage(rest, typeRecordBatch)
	if err != nil {
		return nil, err
	}
	if len(rest) != 8 || binary.LittleEndian.Uint32(rest) != 0xffffffff || binary.LittleEndian.Uint32(rest[4:]) != 0 {
		return nil, fmt.Errorf("%w: no end marker after the record batch (%d bytes left)", ErrFrame, len(rest))
	}
	limit := 8 * int64(len(data)) // of rows: each takes a bit at least
	switch {
	case known.parts != b.parts:
		return nil, fmt.Errorf("%w: its columns need %d arrays of %d buffers, the batch lists %d of %d",
			ErrFrame, known.parts.nodes, known.parts.buffers, b.parts.nodes, b.parts.buffers)
	case known.fingerprint != h.schema:
		return nil, fmt.Errorf("%w: schema fingerprint is %s, its header says %s", ErrFrame, known.fingerprint, h.schema)
	case b.rows != h.rows || h.rows > limit:
		return nil, fmt.Errorf("%w: %d rows, its header says %d", ErrFrame, b.rows, h.rows)
	}
	p := newParts(len(known.fields), b.parts)
	l := loader{batch: b, parts: p}
	for i := range known.fields {
		f := &known.fields[i]
		data := l.array(f.Type)
		if err := checkColumn(f.Name, data, h.rows, limit); err != nil {
			return nil, err
		}
		p.cols[i] = array.MakeFromData(data)
		data.Release()
	}
	r := &p.record
	r.schema, r.rows, r.cols = known.schema, h.rows, p.cols
	r.Retain()
	return r, nil
}

// schema reads the message that a payload starts with.
func (d *decoder) schema(data []byte) (known knownSchema, rest []byte, err error) {
	var size int64
	if len(data) >= 8 {
		size = 8 + int64(binary.LittleEndian.Uint32(data[4:]))
	}
	if size <= int64(len(data)) {
		if known, ok := d.known[string(data[:size])]; ok {
			return known, data[size:], nil
		}
	}
	_, rest, err = checkMessage(data, typeSchema)
	if err != nil {
		return known, nil, err
	}
	message := data[:len(data)-len(rest)]
	r, err := ipc.NewReader(bytes.NewReader(message), ipc.WithAllocator(d.mem), ipc.WithEnsureNativeEndian(false))
	if err != nil {
		return known, nil, fmt.Errorf("%w: %w", ErrFrame, err)
	}
	defer r.Release()
	known.schema = r.Schema()
	if err := carries(known.schema); err != nil {
		return known, nil, fmt.Errorf("%w: %w", ErrFrame, err)
	}
	if !known.schema.IsNativeEndian() {
		return known, nil, fmt.Errorf("%w: its values are %s", ErrFrame, known.schema.Endianness())
	}
	known.fingerprint = fingerprint(known.schema)
	known.fields = known.schema.Fields()
	known.parts.addFields(known.fields)
	if len(d.known) >= maxKnown {
		clear(d.known)
	}
	if int64(len(message)) == size && size <= maxKnownSize { // no body, which a schema does not need
		d.known[string(message)] = known
	}
	return known, rest, nil
}

// checkColumn checks an array's data before anything looks into it.
func checkColumn(name string, data arrow.ArrayData, rows, limit int64) error {
	if int64(data.Len()) != rows {
		return fmt.Errorf("%w: column %s has %d rows of %d", ErrFrame, name, data.Len(), rows)
	}
	if err := checkArray(data, int(limit), 0); err != nil {
		return fmt.Errorf("%w: column %s: %w", ErrFrame, name, err)
	}
	return nil
}

// loader takes the arrays of a checked batch in the order in which it lists
// them: a column's own, then its children's. It panics where the list is too
// short, which the comparison of [batchParts] rules out.
type loader struct {
	*parts
	batch        batch
	node, buffer int
	used         int // of parts.space
}

// array takes one column of type t. The caller releases it.
func (l *loader) array(t arrow.DataType) arrow.ArrayData {
	rows, nulls := l.batch.node(l.node)
	data := &l.arrays[l.node]
	data.Retain()
	l.node++
	n, fields := layout(t)
	from := l.buffer
	for i := range n {
		if i > 0 || nulls != 0 { // the first says which values are there
			l.list[l.buffer] = l.next()
		}
		l.buffer++
	}
	var kids []arrow.ArrayData
	for _, f := range fields {
		kids = append(kids, l.array(f.Type))
	}
	data.Reset(t, rows, l.list[from:from+n:from+n], kids, nulls, 0)
	for _, k := range kids {
		k.Release()
	}
	return data
}

// next wraps the next buffer of the body. Values of any type may be read where
// they lie if that is on eight bytes; others move.
func (l *loader) next() *memory.Buffer {
	data := l.batch.buffer(l.buffer)
	if uintptr(unsafe.Pointer(unsafe.SliceData(data)))%8 != 0 {
		moved := make([]byte, len(data), max(len(data), 16)) // less than 16 may start anywhere
		copy(moved, data)
		data = moved
	}
	if l.used == len(l.space) {
		l.space, l.used = make([]memory.Buffer, len(l.list)-l.buffer), 0
	}
	b := &l.space[l.used]
	l.used++
	b.Reset(data)
	return b
}
