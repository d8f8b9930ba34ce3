package pipeline

import (
	"sync/atomic"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
)

// record is an [arrow.Record] whose columns were made from its own schema.
// Arrow's own compares the types of both again, by reflection, which is a
// quarter of what reading a message takes.
type record struct {
	refs   atomic.Int64
	schema *arrow.Schema
	rows   int64
	cols   []arrow.Array
}

func (r *record) Retain() { r.refs.Add(1) }

func (r *record) Release() {
	if r.refs.Add(-1) == 0 {
		for _, c := range r.cols {
			c.Release()
		}
		r.cols = nil
	}
}

func (r *record) Schema() *arrow.Schema    { return r.schema }
func (r *record) NumRows() int64           { return r.rows }
func (r *record) NumCols() int64           { return int64(len(r.cols)) }
func (r *record) Columns() []arrow.Array   { return r.cols }
func (r *record) Column(i int) arrow.Array { return r.cols[i] }
func (r *record) ColumnName(i int) string  { return r.schema.Field(i).Name }

// plain is the same columns in a record of Arrow's, for what is rare.
func (r *record) plain() arrow.Record { return array.NewRecord(r.schema, r.cols, r.rows) }

func (r *record) SetColumn(i int, col arrow.Array) (arrow.Record, error) {
	p := r.plain()
	defer p.Release()
	return p.SetColumn(i, col)
}

func (r *record) NewSlice(i, j int64) arrow.Record {
	p := r.plain()
	defer p.Release()
	return p.NewSlice(i, j)
}

func (r *record) MarshalJSON() ([]byte, error) {
	p := r.plain()
	defer p.Release()
	return p.MarshalJSON()
}

func (r *record) String() string {
	p := r.plain()
	defer p.Release()
	return p.(interface{ String() string }).String()
}

// parts is what a record is put together from. It lives as long as any of
// them, and is nothing beside the message that they all keep.
type parts struct {
	record record
	cols   []arrow.Array
	arrays []array.Data     // one a column and child
	space  []memory.Buffer  // those that are there
	list   []*memory.Buffer // one a buffer listed, nil for those left out
}

// slab holds the parts of most records, in one allocation.
type slab struct {
	parts
	cols   [16]arrow.Array
	arrays [16]array.Data
	space  [24]memory.Buffer
	list   [40]*memory.Buffer
}

// newParts makes room for cols columns, and for the arrays and buffers that
// a batch lists.
func newParts(cols int, n batchParts) *parts {
	s := new(slab)
	p := &s.parts
	p.cols, p.arrays, p.space, p.list = s.cols[:], s.arrays[:], s.space[:], s.list[:]
	if cols > len(p.cols) {
		p.cols = make([]arrow.Array, cols)
	}
	if n.nodes > len(p.arrays) {
		p.arrays = make([]array.Data, n.nodes)
	}
	if n.buffers > len(p.list) {
		p.list = make([]*memory.Buffer, n.buffers)
	}
	p.cols, p.list = p.cols[:cols:cols], p.list[:n.buffers]
	return p
}
