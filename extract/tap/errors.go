package tap

import (
	"errors"

	"github.com/draftscope/draftscope/extract/probe"
)

var (
	// ErrProtocol marks an engine that does not keep to docs/tap.md.
	ErrProtocol = errors.New("not the tap's protocol")
	// ErrClaim marks an engine whose states are not what it says they are, or
	// whose model is not the target.
	ErrClaim = probe.ErrClaim
	// ErrConfig marks options that cannot be used.
	ErrConfig = errors.New("unusable options")
)
