package pipeline

import (
	"bytes"
	"fmt"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/cespare/xxhash/v2"
)

// frame is the payload of one data message: an Arrow IPC stream of the schema
// and one record batch, readable on its own.
type frame struct {
	buf    *bytes.Buffer
	rows   int64
	schema string
	digest uint64
}

// encoder cuts records into frames. It may be used from several goroutines.
type encoder struct {
	mem  memory.Allocator
	free chan *bytes.Buffer // buffers to use again: five times faster than new ones
}

func newEncoder(mem memory.Allocator, buffers int) *encoder {
	return &encoder{mem: mem, free: make(chan *bytes.Buffer, buffers)}
}

func (e *encoder) buffer() *bytes.Buffer {
	select {
	case b := <-e.free:
		b.Reset()
		return b
	default:
		return new(bytes.Buffer)
	}
}

func (e *encoder) release(f frame) {
	if f.buf == nil {
		return
	}
	select {
	case e.free <- f.buf:
	default:
	}
}

// byteCounter is a Writer that only measures.
type byteCounter int

func (c *byteCounter) Write(p []byte) (int, error) {
	*c += byteCounter(len(p))
	return len(p), nil
}

func (e *encoder) writeStream(w interface{ Write([]byte) (int, error) }, rec arrow.Record) error {
	iw := ipc.NewWriter(w, ipc.WithSchema(rec.Schema()), ipc.WithAllocator(e.mem))
	if err := iw.Write(rec); err != nil {
		return fmt.Errorf("encoding a record: %w", err)
	}
	if err := iw.Close(); err != nil {
		return fmt.Errorf("encoding a record: %w", err)
	}
	return nil
}

// size is the length of rec's frame.
func (e *encoder) size(rec arrow.Record) (int, error) {
	var n byteCounter
	err := e.writeStream(&n, rec)
	return int(n), err
}

// split cuts rec at row boundaries into frames of at most limit bytes, as
// even as the rows allow, and gives them to yield in order. Who gets a frame
// releases it.
func (e *encoder) split(rec arrow.Record, limit int, yield func(frame) error) error {
	if err := carries(rec.Schema()); err != nil {
		return err
	}
	return e.cut(rec, limit, fingerprint(rec.Schema()), yield)
}

func (e *encoder) cut(rec arrow.Record, limit int, schema string, yield func(frame) error) error {
	size, err := e.size(rec)
	if err != nil {
		return err
	}
	rows := rec.NumRows()
	if size > limit {
		if rows <= 1 {
			return fmt.Errorf("%w: one row of %d columns takes %d bytes, %d are allowed; raise the server's max_payload (64 MB at most) or record fewer columns",
				ErrRowTooLarge, rec.NumCols(), size, limit)
		}
		pieces := min(int64((size+limit-1)/limit), rows)
		for i := range pieces {
			if err := e.cutSlice(rec, rows*i/pieces, rows*(i+1)/pieces, limit, schema, yield); err != nil {
				return err
			}
		}
		return nil
	}
	f := frame{buf: e.buffer(), rows: rows, schema: schema}
	f.buf.Grow(size)
	if err := e.writeStream(f.buf, rec); err != nil {
		e.release(f)
		return err
	}
	f.digest = digestOf(f.buf.Bytes())
	return yield(f)
}

func (e *encoder) cutSlice(rec arrow.Record, from, to int64, limit int, schema string, yield func(frame) error) error {
	part := rec.NewSlice(from, to)
	defer part.Release()
	return e.cut(part, limit, schema, yield)
}

// fingerprint is the xxhash64 of a schema's columns: name, type, nullability
// and metadata, in order. The schema's own metadata does not enter it.
func fingerprint(s *arrow.Schema) string {
	h := xxhash.New()
	for _, f := range s.Fields() {
		fmt.Fprintf(h, "%q %s %t", f.Name, f.Type, f.Nullable)
		for i, k := range f.Metadata.Keys() {
			fmt.Fprintf(h, " %q=%q", k, f.Metadata.Values()[i])
		}
		fmt.Fprintln(h)
	}
	return fmt.Sprintf("%016x", h.Sum64())
}
