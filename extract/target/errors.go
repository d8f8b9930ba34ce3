package target

import "errors"

var (
	// ErrUnsupported marks a model that this package cannot run as its
	// config.json describes it.
	ErrUnsupported = errors.New("unsupported target")
	// ErrModel marks a model directory that contradicts itself: a tensor
	// missing, of another shape, or of no known use.
	ErrModel = errors.New("unusable target")
	// ErrInput marks prompts, sequences or options that cannot be run.
	ErrInput = errors.New("bad input")
)
