package pipeline

import (
	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"
)

// Frame is the payload of one data message and what its header says of it.
type Frame struct {
	Payload []byte
	Rows    int64
	Schema  string // fingerprint of the columns
	Digest  uint64 // XXH3 of the payload
}

// Framer makes and reads the payloads of data messages without a server, for
// programs that measure them. It serves one goroutine.
type Framer struct {
	enc *encoder
	dec *decoder
}

// NewFramer makes a framer; mem is for what has to be copied, nil for the Go
// heap.
func NewFramer(mem memory.Allocator) *Framer {
	if mem == nil {
		mem = memory.NewGoAllocator()
	}
	return &Framer{enc: newEncoder(mem, 1), dec: newDecoder(mem)}
}

// Encode cuts rec at row boundaries into frames of at most limit bytes. A
// payload is valid until yield returns.
func (f *Framer) Encode(rec arrow.Record, limit int, yield func(Frame) error) error {
	return f.enc.split(rec, limit, func(fr frame) error {
		defer f.enc.release(fr)
		return yield(Frame{Payload: fr.buf.Bytes(), Rows: fr.rows, Schema: fr.schema, Digest: fr.digest})
	})
}

// Decode reads a frame as a reader of the stream does. The record's buffers
// are the payload's bytes, which must stay as they are while it lives; the
// caller releases it. An error wraps [ErrFrame].
func (f *Framer) Decode(fr Frame) (arrow.Record, error) {
	return f.dec.decode(header{kind: kindData, rows: fr.Rows, schema: fr.Schema, digest: fr.Digest}, fr.Payload)
}

// Parse is Decode without comparing the digest.
func (f *Framer) Parse(fr Frame) (arrow.Record, error) {
	return f.dec.record(header{kind: kindData, rows: fr.Rows, schema: fr.Schema}, fr.Payload)
}
