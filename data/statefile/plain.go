package statefile

import (
	"fmt"
	"io"

	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go"
)

// PlainWriter writes the same files as [Writer] by way of parquet-go's own
// writer, on one goroutine.
type PlainWriter struct {
	*parquet.GenericWriter[schemas.State]
	cfg   Config
	rows  []schemas.State
	vals  []float32
	group int // rows of the row group so far
	state int32
	total int64
}

// NewPlainWriter makes a plain writer of a new file.
func NewPlainWriter(out io.Writer, cfg Config) (*PlainWriter, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("writing states: %w", err)
	}
	cfg = cfg.withDefaults()
	return &PlainWriter{GenericWriter: parquet.NewGenericWriter[schemas.State](out, plainOptions(cfg)...), cfg: cfg}, nil
}

// Write adds rows.
func (w *PlainWriter) Write(r Rows) error {
	if err := w.cfg.check(r); err != nil {
		return fmt.Errorf("writing states of %s: %w", r.SeqID, err)
	}
	for lo := 0; lo < len(r.Norms); {
		if w.group > 0 && (w.state != r.State || w.group == w.cfg.groupRows()) {
			if err := w.Flush(); err != nil {
				return err
			}
		}
		// A small batch at a time: its float32 should stay in the cache.
		n := min(len(r.Norms)-lo, w.cfg.groupRows()-w.group, max(1, defaultPage/(8*w.cfg.Hidden)))
		b := w.cfg.slice(r, lo, lo+n)
		w.vals = w.cfg.DType.AppendFloats(w.vals[:0], b.Raw)
		w.rows = w.rows[:0]
		for i, norm := range b.Norms {
			w.rows = append(w.rows, schemas.State{
				SeqID: b.SeqID, Pos: b.Pos + int32(i), State: b.State, Norm: norm,
				Vec: w.vals[i*w.cfg.Hidden : (i+1)*w.cfg.Hidden],
			})
		}
		if _, err := w.GenericWriter.Write(w.rows); err != nil {
			return err
		}
		lo += n
		w.group += n
		w.total += int64(n)
		w.state = r.State
	}
	return nil
}

// Flush ends the row group.
func (w *PlainWriter) Flush() error {
	w.group = 0
	return w.GenericWriter.Flush()
}

// NumRows is how many rows were written so far.
func (w *PlainWriter) NumRows() int64 { return w.total }
