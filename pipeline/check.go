package pipeline

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/apache/arrow/go/v17/arrow"
	flatbuffers "github.com/google/flatbuffers/go"
)

// The parts of Arrow's flatbuffers that a frame's check reads. A slot is the
// place of a field in its table's vtable.
const (
	msgHeaderType, msgHeader, msgBodyLength   = 6, 8, 10
	typeSchema, typeRecordBatch               = 1, 3
	schemaFields, schemaMetadata              = 6, 8
	fieldName, fieldDictionary, fieldChildren = 4, 12, 14
	fieldMetadata                             = 16
	batchRows, batchNodes, batchBuffers       = 4, 6, 8
	batchCompression, batchVariadic           = 10, 12
	maxDepth                                  = 16
)

// batchParts is how many arrays and buffers a record batch lists.
type batchParts struct{ nodes, buffers int }

// add counts what a column of type t lists: one array, its buffers, its
// children's.
func (p *batchParts) add(t arrow.DataType) {
	p.nodes++
	n, fields := layout(t)
	p.buffers += n
	p.addFields(fields)
}

// layout is how many buffers an array of type t has of its own, the one that
// says which values are there first, and its children.
func layout(t arrow.DataType) (buffers int, children []arrow.Field) {
	switch t := t.(type) {
	case *arrow.NullType:
		return 0, nil
	case *arrow.StringType, *arrow.BinaryType, *arrow.LargeStringType, *arrow.LargeBinaryType:
		return 3, nil
	case *arrow.FixedSizeListType, *arrow.StructType:
		return 1, t.(arrow.NestedType).Fields()
	case arrow.NestedType:
		return 2, t.Fields()
	}
	return 2, nil
}

func (p *batchParts) addFields(fields []arrow.Field) {
	for _, f := range fields {
		p.add(f.Type)
	}
}

// batch is a record batch of which every vector and buffer is known to lie
// within the bytes that are there. Arrow's reader does not look before it
// allocates.
type batch struct {
	meta, body     []byte
	rows           int64
	parts          batchParts
	nodes, buffers flatbuffers.UOffsetT // where their vectors start in meta
}

// node is the length and the null count of an array.
func (b *batch) node(i int) (rows, nulls int) {
	at := b.nodes + flatbuffers.UOffsetT(16*i)
	return int(flatbuffers.GetInt64(b.meta[at:])), int(flatbuffers.GetInt64(b.meta[at+8:]))
}

func (b *batch) offset(i int) int64 {
	return flatbuffers.GetInt64(b.meta[b.buffers+flatbuffers.UOffsetT(16*i):])
}

// buffer is a part of the body, whose capacity ends with it.
func (b *batch) buffer(i int) []byte {
	off := b.offset(i)
	end := off + flatbuffers.GetInt64(b.meta[b.buffers+flatbuffers.UOffsetT(16*i+8):])
	return b.body[off:end:end]
}

// checkMessage takes one message off data, which has to be of the wanted
// type, and returns what follows it. It may panic on a damaged flatbuffer;
// [decoder.record] recovers.
func checkMessage(data []byte, want byte) (b batch, rest []byte, err error) {
	if len(data) < 8 || binary.LittleEndian.Uint32(data) != 0xffffffff {
		return b, nil, fmt.Errorf("%w: %d bytes left where a message should start", ErrFrame, len(data))
	}
	n := int64(binary.LittleEndian.Uint32(data[4:]))
	data = data[8:]
	if n < 8 || n > int64(len(data)) {
		return b, nil, fmt.Errorf("%w: message header of %d bytes, %d are left", ErrFrame, n, len(data))
	}
	meta, body := data[:n], data[n:]
	msg := root(meta)
	if o := msg.Offset(msgHeaderType); o == 0 || msg.GetByte(msg.Pos+flatbuffers.UOffsetT(o)) != want {
		return b, nil, fmt.Errorf("%w: message is of another type than %d", ErrFrame, want)
	}
	size := int64At(msg, msgBodyLength)
	if size < 0 || size > int64(len(body)) {
		return b, nil, fmt.Errorf("%w: body of %d bytes, %d are left", ErrFrame, size, len(body))
	}
	head, ok := child(msg, msgHeader)
	if !ok {
		return b, nil, fmt.Errorf("%w: message without a header", ErrFrame)
	}
	if want == typeSchema {
		err = checkSchema(head)
	} else {
		b, err = checkBatch(head, body[:size])
	}
	return b, body[size:], err
}

// int64At is a table's field, 0 when it is not there.
func int64At(t *flatbuffers.Table, slot flatbuffers.VOffsetT) int64 {
	o := t.Offset(slot)
	if o == 0 {
		return 0
	}
	return t.GetInt64(t.Pos + flatbuffers.UOffsetT(o))
}

func root(b []byte) *flatbuffers.Table {
	return &flatbuffers.Table{Bytes: b, Pos: flatbuffers.GetUOffsetT(b)}
}

// child follows a table field.
func child(t *flatbuffers.Table, slot flatbuffers.VOffsetT) (*flatbuffers.Table, bool) {
	o := t.Offset(slot)
	if o == 0 {
		return nil, false
	}
	return &flatbuffers.Table{Bytes: t.Bytes, Pos: t.Indirect(t.Pos + flatbuffers.UOffsetT(o))}, true
}

// vector finds a vector of elements of the given size and checks its length.
func vector(t *flatbuffers.Table, slot flatbuffers.VOffsetT, size int64) (start flatbuffers.UOffsetT, n int, err error) {
	o := flatbuffers.UOffsetT(t.Offset(slot))
	if o == 0 {
		return 0, 0, nil
	}
	start, n = t.Vector(o), t.VectorLen(o)
	if n < 0 || int64(start)+int64(n)*size > int64(len(t.Bytes)) {
		return 0, 0, fmt.Errorf("%w: vector of %d elements in %d bytes", ErrFrame, n, len(t.Bytes))
	}
	return start, n, nil
}

// checkSchema bounds the vectors of a schema; budget bounds the tables, since
// offsets may point at one table many times.
func checkSchema(schema *flatbuffers.Table) error {
	if _, _, err := vector(schema, schemaMetadata, 4); err != nil {
		return err
	}
	budget := len(schema.Bytes)
	return checkFields(schema, schemaFields, 0, &budget)
}

func checkFields(t *flatbuffers.Table, slot flatbuffers.VOffsetT, depth int, budget *int) error {
	start, n, err := vector(t, slot, 4)
	if err != nil {
		return err
	}
	if *budget -= 8 * n; depth > maxDepth || *budget < 0 {
		return fmt.Errorf("%w: schema of too many columns", ErrFrame)
	}
	for i := range n {
		f := &flatbuffers.Table{Bytes: t.Bytes, Pos: t.Indirect(start + flatbuffers.UOffsetT(4*i))}
		_, _, err := vector(f, fieldMetadata, 4)
		if err == nil {
			_, _, err = vector(f, fieldName, 1)
		}
		if err == nil && f.Offset(fieldDictionary) != 0 {
			err = fmt.Errorf("%w: dictionary column", ErrFrame)
		}
		if err == nil {
			err = checkFields(f, fieldChildren, depth+1, budget)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// checkBatch holds the buffers of a record batch against its body.
func checkBatch(head *flatbuffers.Table, body []byte) (b batch, err error) {
	if head.Offset(batchCompression) != 0 || head.Offset(batchVariadic) != 0 {
		return b, fmt.Errorf("%w: compressed or variadic record batch", ErrFrame)
	}
	b = batch{meta: head.Bytes, body: body, rows: int64At(head, batchRows)}
	if b.nodes, b.parts.nodes, err = vector(head, batchNodes, 16); err != nil {
		return b, err
	}
	if b.buffers, b.parts.buffers, err = vector(head, batchBuffers, 16); err != nil {
		return b, err
	}
	have := int64(len(body))
	for i := range b.parts.buffers {
		at := b.buffers + flatbuffers.UOffsetT(16*i)
		off, size := head.GetInt64(at), head.GetInt64(at+8)
		if off < 0 || size < 0 || off > have || size > have-off {
			return b, fmt.Errorf("%w: buffer %d is bytes %d+%d of %d", ErrFrame, i, off, size, have)
		}
	}
	return b, nil
}

var errBounds = errors.New("values point outside of their buffers")

// checkArray holds lengths and offsets of an array against its buffers, so
// that reading any of its values cannot leave them. No array may have more
// than limit rows, whatever its type: some take no bytes.
func checkArray(d arrow.ArrayData, limit, depth int) error {
	n := d.Offset() + d.Len()
	if depth > maxDepth || d.Offset() < 0 || d.Len() < 0 || n > limit || d.NullN() < 0 || d.NullN() > d.Len() {
		return errBounds
	}
	bufs := d.Buffers()
	size := func(i int) int {
		if i >= len(bufs) || bufs[i] == nil {
			return 0
		}
		return bufs[i].Len()
	}
	if d.DataType().ID() != arrow.NULL && (d.NullN() > 0 || size(0) > 0) && size(0) < (n+7)/8 {
		return errBounds
	}
	kids := d.Children()
	switch t := d.DataType().(type) {
	case *arrow.NullType:
		return nil
	case *arrow.StringType, *arrow.BinaryType:
		return checkOffsets(n, size(1)/4, size(2), func(i int) int64 { return int64(int32(binary.LittleEndian.Uint32(bufs[1].Bytes()[4*i:]))) })
	case *arrow.LargeStringType, *arrow.LargeBinaryType:
		return checkOffsets(n, size(1)/8, size(2), func(i int) int64 { return int64(binary.LittleEndian.Uint64(bufs[1].Bytes()[8*i:])) })
	case *arrow.ListType, *arrow.MapType:
		if err := checkOffsets(n, size(1)/4, kids[0].Len(), func(i int) int64 { return int64(int32(binary.LittleEndian.Uint32(bufs[1].Bytes()[4*i:]))) }); err != nil {
			return err
		}
		return checkArray(kids[0], limit, depth+1)
	case *arrow.LargeListType:
		if err := checkOffsets(n, size(1)/8, kids[0].Len(), func(i int) int64 { return int64(binary.LittleEndian.Uint64(bufs[1].Bytes()[8*i:])) }); err != nil {
			return err
		}
		return checkArray(kids[0], limit, depth+1)
	case *arrow.FixedSizeListType:
		if t.Len() < 0 || t.Len() > 0 && n > kids[0].Len()/int(t.Len()) {
			return errBounds
		}
		return checkArray(kids[0], limit, depth+1)
	case *arrow.StructType:
		for _, k := range kids {
			if k.Len() < n {
				return errBounds
			}
			if err := checkArray(k, limit, depth+1); err != nil {
				return err
			}
		}
		return nil
	case arrow.FixedWidthDataType:
		if w := t.BitWidth(); w < 0 || w%8 == 0 && w > 0 && n > size(1)/(w/8) || w%8 != 0 && n > size(1)*8/w {
			return errBounds
		}
		return nil
	}
	return fmt.Errorf("columns of type %s do not travel", d.DataType())
}

// checkOffsets checks n+1 offsets into limit values; an empty array may have
// none.
func checkOffsets(n, have, limit int, at func(int) int64) error {
	if n == 0 && have == 0 {
		return nil
	}
	if have < n+1 {
		return errBounds
	}
	last := at(0)
	for i := range n + 1 {
		o := at(i)
		if o < 0 || o < last || o > int64(limit) {
			return errBounds
		}
		last = o
	}
	return nil
}

// carries refuses a schema that a frame cannot carry, before it is sent.
func carries(s *arrow.Schema) error {
	for _, f := range s.Fields() {
		if err := carriesType(f.Type, 0); err != nil {
			return fmt.Errorf("column %s: %w", f.Name, err)
		}
	}
	return nil
}

func carriesType(t arrow.DataType, depth int) error {
	switch t := t.(type) {
	case *arrow.DictionaryType, arrow.ExtensionType:
	case *arrow.ListType, *arrow.MapType, *arrow.LargeListType, *arrow.FixedSizeListType, *arrow.StructType:
		if depth == maxDepth {
			return fmt.Errorf("nested deeper than %d", maxDepth)
		}
		for _, f := range t.(arrow.NestedType).Fields() {
			if err := carriesType(f.Type, depth+1); err != nil {
				return err
			}
		}
		return nil
	case *arrow.NullType, *arrow.StringType, *arrow.BinaryType, *arrow.LargeStringType, *arrow.LargeBinaryType, arrow.FixedWidthDataType:
		return nil
	}
	return fmt.Errorf("columns of type %s do not travel", t)
}
