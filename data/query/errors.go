package query

import "errors"

var (
	// ErrNoDuckDB marks a program that was built without DuckDB.
	ErrNoDuckDB = errors.New("built without cgo; DuckDB needs a C compiler: rebuild with CGO_ENABLED=1")
	// ErrNotDataset marks a directory that holds no dataset.
	ErrNotDataset = errors.New("not a dataset")
	// ErrStatement marks SQL that is no single reading statement.
	ErrStatement = errors.New("only one reading statement at a time")
)
