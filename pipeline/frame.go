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
	f.digest = xxhash.Sum64(f.buf.Bytes())
	return yield(f)
}

func (e *encoder) cutSlice(rec arrow.Record, from, to int64, limit int, schema string, yield func(frame) error) error {
	part := rec.NewSlice(from, to)
	defer part.Release()
	return e.cut(part, limit, schema, yield)
}

// decode reads the payload of a data message whose header is h. Every length
// and offset is checked before anything is allocated by it; whatever the
// bytes, the answer is a sound record or an error wrapping ErrFrame. The
// caller releases the record.
func decode(mem memory.Allocator, h header, data []byte) (rec arrow.Record, err error) {
	defer func() {
		if p := recover(); p != nil {
			if rec != nil {
				rec.Release()
			}
			rec, err = nil, fmt.Errorf("%w: %v", ErrFrame, p)
		}
	}()
	if got := xxhash.Sum64(data); got != h.digest {
		return nil, fmt.Errorf("%w: digest of the %d bytes is %016x, its header says %016x", ErrFrame, len(data), got, h.digest)
	}
	have, err := checkStream(data)
	if err != nil {
		return nil, err
	}
	r, err := ipc.NewReader(bytes.NewReader(data), ipc.WithAllocator(mem))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFrame, err)
	}
	defer r.Release()
	if err := carries(r.Schema()); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFrame, err)
	}
	var need batchParts
	if need.addFields(r.Schema().Fields()); need != have {
		return nil, fmt.Errorf("%w: its columns need %d arrays of %d buffers, the batch lists %d of %d", ErrFrame, need.nodes, need.buffers, have.nodes, have.buffers)
	}
	if !r.Next() {
		return nil, fmt.Errorf("%w: no record batch: %w", ErrFrame, r.Err())
	}
	got := r.Record()
	limit := 8 * int64(len(data)) // of rows: each takes a bit at least
	switch fp := fingerprint(got.Schema()); {
	case fp != h.schema:
		return nil, fmt.Errorf("%w: schema fingerprint is %s, its header says %s", ErrFrame, fp, h.schema)
	case got.NumRows() != h.rows || h.rows > limit:
		return nil, fmt.Errorf("%w: %d rows, its header says %d", ErrFrame, got.NumRows(), h.rows)
	}
	for i, col := range got.Columns() {
		if int64(col.Len()) != h.rows {
			return nil, fmt.Errorf("%w: column %s has %d rows of %d", ErrFrame, got.ColumnName(i), col.Len(), h.rows)
		}
		if err := checkArray(col.Data(), int(limit), 0); err != nil {
			return nil, fmt.Errorf("%w: column %s: %w", ErrFrame, got.ColumnName(i), err)
		}
	}
	got.Retain()
	return got, nil
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
