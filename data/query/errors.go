package query

import (
	"errors"

	"github.com/draftscope/draftscope/data"
)

var (
	// ErrNoDuckDB marks a program that was built without DuckDB.
	ErrNoDuckDB = errors.New("built without cgo; DuckDB needs a C compiler: rebuild with CGO_ENABLED=1")
	// ErrNotDataset marks a directory that holds no dataset, or one whose
	// dataset.json cannot be read.
	ErrNotDataset = data.ErrNotDataset
	// ErrNoTemp marks a machine without a folder for temporary files. It says
	// nothing about the dataset.
	ErrNoTemp = errors.New("making a folder for temporary files; set TMPDIR to a folder that can be written")
	// ErrStatement marks SQL that is no single reading statement.
	ErrStatement = errors.New("only one reading statement at a time")
)
