package tokenizer

import "errors"

var (
	// ErrUnsupported marks a tokenizer.json that asks for a step this package
	// does not carry out. Ids that are nearly right would be worse than none.
	ErrUnsupported = errors.New("unsupported tokenizer")
	// ErrFile marks a tokenizer.json that is missing or contradicts itself.
	ErrFile = errors.New("unusable tokenizer file")
	// ErrChat marks a conversation that cannot be rendered.
	ErrChat = errors.New("unusable conversation")
)
