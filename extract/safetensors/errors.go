package safetensors

import "errors"

var (
	// ErrDamaged marks a file that breaks the format: cut, padded,
	// overlapping, or declaring what it does not hold.
	ErrDamaged = errors.New("damaged safetensors file")
	// ErrMissing marks a directory without weights, a shard that the index
	// names and the directory lacks, or a tensor that no file holds.
	ErrMissing = errors.New("missing weights")
	// ErrDType marks a tensor whose values cannot be read as asked.
	ErrDType = errors.New("unsupported dtype")
)
