package query

import (
	"errors"
	"io"
	"strings"
)

// Column is one column of an answer.
type Column struct {
	Name string
	Type string // as DuckDB spells it, such as "FLOAT[]"
}

// Decimal is an exact decimal number, such as "1.50".
type Decimal string

// Entry is one key of a MAP, or one field of a STRUCT.
type Entry struct {
	Key   any
	Value any
}

// Map is a MAP in its own order, or a STRUCT by field name.
type Map []Entry

// Rows is the answer to a query, read row by row:
//
//	for rows.Next() {
//		use(rows.Values())
//	}
//	err := rows.Err()
//
// It belongs to one goroutine.
type Rows struct {
	Columns []Column

	next   func(dst []any) error
	close  func() error
	row    []any
	err    error
	closed bool
}

// Next reads the next row. It closes the rows after the last one.
func (r *Rows) Next() bool {
	if r.closed || r.err != nil {
		return false
	}
	r.row = make([]any, len(r.Columns))
	err := r.next(r.row)
	if err == nil {
		return true
	}
	if !errors.Is(err, io.EOF) {
		r.err = err
	}
	r.err = errors.Join(r.err, r.Close())
	return false
}

// Values is the row that Next has read; the caller may keep it. A value is
// nil (NULL), bool, int64, *big.Int (where int64 is too narrow), float32,
// float64, [Decimal], string, []byte, time.Time, []any or [Map].
func (r *Rows) Values() []any { return r.row }

// Err is the error that ended Next early, or nil.
func (r *Rows) Err() error { return r.err }

// Close releases the answer. It may be called twice.
func (r *Rows) Close() error {
	if r.closed {
		return nil
	}
	r.closed = true
	return r.close()
}

// All reads every row that is left, and closes.
func (r *Rows) All() ([][]any, error) {
	var all [][]any
	for r.Next() {
		all = append(all, r.Values())
	}
	return all, r.Err()
}

// oneLine cuts the part in which DuckDB repeats the statement and points into
// it, and joins what is left.
func oneLine(s string) string {
	if i := strings.Index(s, "\n\nLINE "); i >= 0 {
		s = s[:i]
	}
	return strings.Join(strings.Fields(s), " ")
}
