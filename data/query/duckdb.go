//go:build cgo

package query

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/big"
	"slices"
	"strings"
	"time"

	"github.com/duckdb/duckdb-go/v2"
)

// duck is one in-memory database. Every statement has a connection of its
// own, so that queries may run side by side.
type duck struct{ connector *duckdb.Connector }

func openEngine(ctx context.Context) (engine, error) {
	c, err := duckdb.NewConnector("", nil)
	if err != nil {
		return nil, fmt.Errorf("starting DuckDB: %w", err)
	}
	return &duck{c}, nil
}

func (d *duck) close() error { return d.connector.Close() }

func (d *duck) connect(ctx context.Context) (*duckdb.Conn, error) {
	c, err := d.connector.Connect(ctx)
	if err != nil {
		return nil, fmt.Errorf("connecting to DuckDB: %w", err)
	}
	return c.(*duckdb.Conn), nil
}

func (d *duck) exec(ctx context.Context, sql string) error {
	conn, err := d.connect(ctx)
	if err != nil {
		return err
	}
	_, err = conn.ExecContext(ctx, sql, nil)
	return errors.Join(clean(err), conn.Close())
}

func (d *duck) query(ctx context.Context, sql string) (_ *Rows, err error) {
	conn, err := d.connect(ctx)
	if err != nil {
		return nil, err
	}
	stmt, err := prepare(conn, sql)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	res, err := stmt.QueryContext(ctx, nil)
	if err != nil {
		return nil, errors.Join(clean(err), stmt.Close(), conn.Close())
	}
	names := res.Columns()
	raw := make([]driver.Value, len(names))
	r := &Rows{
		next: func(dst []any) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := res.Next(raw); err != nil {
				return clean(err)
			}
			for i, v := range raw {
				dst[i] = plain(v)
			}
			return nil
		},
		close: func() error { return errors.Join(res.Close(), stmt.Close(), conn.Close()) },
	}
	types := res.(driver.RowsColumnTypeDatabaseTypeName)
	for i, name := range names {
		r.Columns = append(r.Columns, Column{Name: name, Type: types.ColumnTypeDatabaseTypeName(i)})
	}
	return r, nil
}

// prepare accepts one statement that reads. Its first word is looked at before
// DuckDB sees it, since binding alone can have effects (an EXPORT makes its
// folder); its kind afterwards, since WITH may lead to anything.
func prepare(conn *duckdb.Conn, sql string) (*duckdb.Stmt, error) {
	if err := reads(sql); err != nil {
		return nil, err
	}
	s, err := conn.Prepare(sql)
	if err != nil {
		if strings.Contains(err.Error(), "multi-statement") { // the driver exports no sentinel
			return nil, fmt.Errorf("%w: this is several (a PIVOT without IN counts as such)", ErrStatement)
		}
		return nil, clean(err)
	}
	stmt := s.(*duckdb.Stmt)
	kind, err := stmt.StatementType()
	if err == nil && kind != duckdb.STATEMENT_TYPE_SELECT && kind != duckdb.STATEMENT_TYPE_EXPLAIN {
		err = fmt.Errorf("%w: the dataset is read-only here", ErrStatement)
	}
	if err != nil {
		return nil, errors.Join(err, stmt.Close())
	}
	return stmt, nil
}

// clean makes one line of an error of DuckDB.
func clean(err error) error {
	if err == nil || err == io.EOF { //nolint:errorlint // the driver returns io.EOF itself
		return err
	}
	return &lineError{err}
}

// lineError is an error whose text is one line; see [oneLine].
type lineError struct{ err error }

func (e *lineError) Error() string { return oneLine(e.err.Error()) }
func (e *lineError) Unwrap() error { return e.err }

// plain turns a value of the driver into one of those that [Rows.Values]
// promises.
func plain(v any) any {
	switch v := v.(type) {
	case int8:
		return int64(v)
	case int16:
		return int64(v)
	case int32:
		return int64(v)
	case uint8:
		return int64(v)
	case uint16:
		return int64(v)
	case uint32:
		return int64(v)
	case uint64:
		if v <= math.MaxInt64 {
			return int64(v)
		}
		return new(big.Int).SetUint64(v)
	case *big.Int:
		if v.IsInt64() {
			return v.Int64()
		}
	case duckdb.Decimal:
		return Decimal(v.String())
	case duckdb.UUID:
		return v.String()
	case duckdb.Interval:
		return fmt.Sprintf("%d months %d days %s", v.Months, v.Days, time.Duration(v.Micros)*time.Microsecond)
	case duckdb.Bit:
		return v.String()
	case duckdb.Union:
		return plain(v.Value)
	case []any:
		out := make([]any, len(v))
		for i := range v {
			out[i] = plain(v[i])
		}
		return out
	case map[string]any: // a STRUCT; the driver forgets the order of its fields
		m := make(Map, 0, len(v))
		for _, k := range slices.Sorted(maps.Keys(v)) {
			m = append(m, Entry{k, plain(v[k])})
		}
		return m
	case duckdb.OrderedMap:
		values := v.Values()
		m := make(Map, 0, len(values))
		for i, k := range v.Keys() {
			m = append(m, Entry{plain(k), plain(values[i])})
		}
		return m
	}
	return v
}
