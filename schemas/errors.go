package schemas

import "errors"

var (
	// ErrRecord marks a record that is not what its reader asked for.
	ErrRecord = errors.New("not a record of this table")
	// ErrFormat marks data of a newer format version.
	ErrFormat = errors.New("newer format version")
)
