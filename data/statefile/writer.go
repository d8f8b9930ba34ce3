package statefile

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/parquet-go/parquet-go/encoding/thrift"
	"github.com/parquet-go/parquet-go/format"
)

// Writer writes one file of the table states, row group by row group. It
// serves one goroutine; it may start others, which end before Flush returns.
// After an error all its methods return that error.
type Writer struct {
	file
	cfg     Config
	current *group
	pending []*group // being encoded, in the order of the file
	free    []*group
	slots   chan struct{} // one for each goroutine that encodes
}

// NewWriter makes a writer of a new file. Out gets large writes: it needs no
// buffer of its own.
func NewWriter(out io.Writer, cfg Config) (*Writer, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("writing states: %w", err)
	}
	cfg = cfg.withDefaults()
	return &Writer{file: file{out: out}, cfg: cfg, slots: make(chan struct{}, cfg.Workers)}, nil
}

// Write adds rows. A row group ends when it is full or the state changes. The
// rows' bytes and norms must not change before Flush returns.
func (w *Writer) Write(r Rows) error {
	if err := w.cfg.check(r); err != nil {
		return fmt.Errorf("writing states of %s: %w", r.SeqID, err)
	}
	for n := len(r.Norms); n > 0; n = len(r.Norms) {
		if g := w.current; g != nil && (g.rows[0].State != r.State || g.n == w.cfg.groupRows()) {
			w.submit()
		}
		if w.current == nil {
			w.current = w.newGroup()
		}
		g := w.current
		n = min(n, w.cfg.groupRows()-g.n)
		g.rows = append(g.rows, w.cfg.slice(r, 0, n))
		g.n += n
		r = w.cfg.slice(r, n, len(r.Norms))
	}
	return w.err
}

// Flush ends the row group and writes all that is not written.
func (w *Writer) Flush() error {
	if w.current != nil {
		w.submit()
	}
	for len(w.pending) > 0 {
		w.emit()
	}
	return w.err
}

// Close writes what is left and the footer. It does not close what the writer
// writes to.
func (w *Writer) Close() error {
	if err := w.Flush(); err != nil {
		return err
	}
	if w.err = w.finish(); w.err != nil {
		return w.err
	}
	w.err = errors.New("writing states: the file is finished")
	return nil
}

func (w *Writer) newGroup() *group {
	if n := len(w.free); n > 0 {
		g := w.free[n-1]
		w.free = w.free[:n-1]
		return g
	}
	return &group{cfg: w.cfg, done: make(chan error, 1)}
}

// submit has the current row group encoded.
func (w *Writer) submit() {
	g := w.current
	w.current = nil
	w.pending = append(w.pending, g)
	if w.cfg.Workers == 1 {
		g.done <- g.run()
		w.emit()
		return
	}
	// Finished groups wait for an earlier one that is slow; no more of them
	// than there are workers.
	if len(w.pending) > 2*w.cfg.Workers {
		w.emit()
	}
	w.slots <- struct{}{}
	go func() {
		g.done <- g.run()
		<-w.slots
	}()
}

// run encodes the group with an encoder of the pool.
func (g *group) run() error {
	e, err := getEncoder()
	if err != nil {
		return err
	}
	defer encoders.Put(e)
	return g.encode(e)
}

// emit waits for the oldest row group and writes it.
func (w *Writer) emit() {
	g := w.pending[0]
	w.pending = append(w.pending[:0], w.pending[1:]...)
	if err := <-g.done; err != nil && w.err == nil {
		w.err = fmt.Errorf("encoding states: %w", err)
	}
	if w.err == nil {
		w.err = w.place(g)
	}
	clear(g.rows)
	g.rows, g.n = g.rows[:0], 0
	w.free = append(w.free, g)
}

// place writes an encoded row group and enters it into the footer.
func (w *Writer) place(g *group) error {
	w.begin()
	start := w.offset
	for _, p := range g.parts {
		w.write(g.buf[p.lo:p.hi])
	}
	rg := format.RowGroup{NumRows: int64(g.n), TotalCompressedSize: g.size}
	var indexes [numColumns]pageIndex
	for i, c := range g.chunks {
		rg.TotalByteSize += c.meta.TotalUncompressedSize
		rg.Columns = append(rg.Columns, format.ColumnChunk{MetaData: c.meta})
		indexes[i].pages.PageLocations = c.pages
		if c.index == nil {
			continue
		}
		var buf bytes.Buffer
		if err := thrift.NewEncoder(new(thrift.CompactProtocol).NewWriter(&buf)).Encode(c.index); err != nil {
			return err
		}
		indexes[i].bounds = buf.Bytes()
	}
	w.add(rg, indexes, start, 0)
	return w.err
}
