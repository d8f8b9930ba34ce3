package cuda

import "errors"

var (
	// ErrShape marks operands whose shapes do not fit together.
	ErrShape = errors.New("operand shapes do not fit")
	// ErrUnavailable marks a backend that this build or machine lacks.
	ErrUnavailable = errors.New("backend unavailable")
	// ErrMemory marks an allocation that the device could not satisfy.
	ErrMemory = errors.New("out of device memory")
)
