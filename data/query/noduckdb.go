//go:build !cgo

package query

import "context"

// openEngine fails: without cgo there is no DuckDB to open.
func openEngine(context.Context) (engine, error) { return nil, ErrNoDuckDB }
