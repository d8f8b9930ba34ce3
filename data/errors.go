package data

import "errors"

var (
	// ErrNotDataset marks a folder without a dataset.json, or with one that
	// cannot be read.
	ErrNotDataset = errors.New("not a draftscope dataset")
	// ErrNewer marks a dataset or a file of a newer format version. Nothing of
	// it was touched.
	ErrNewer = errors.New("newer format version")
	// ErrLocked says that another process writes to the dataset.
	ErrLocked = errors.New("another process is writing to this dataset")
	// ErrGone says that the folder of an open dataset was removed, or another
	// one put in its place.
	ErrGone = errors.New("the dataset is gone")
	// ErrMismatch says that a run or a drafter of this name exists and is
	// another one: other weights, tokenizer, template, states or options.
	ErrMismatch = errors.New("does not match what is stored")
	// ErrUnknownRun says that the dataset has no run, or no drafter, of this
	// name.
	ErrUnknownRun = errors.New("no such run")
	// ErrDamaged marks a file whose content is not what was written.
	ErrDamaged = errors.New("damaged file")
	// ErrName marks a name that cannot stand in a path of the dataset.
	ErrName = errors.New("unusable name")
	// ErrReadOnly says that the dataset was opened for reading.
	ErrReadOnly = errors.New("dataset is open for reading only")
	// ErrRecord marks a record that the sink did not expect: of another run,
	// table or shape.
	ErrRecord = errors.New("unexpected record")
)
