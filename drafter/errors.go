package drafter

import "errors"

var (
	// ErrConfig marks a checkpoint configuration that cannot be run: a field
	// is missing, contradicts another, or does not fit the target.
	ErrConfig = errors.New("config.json of a drafter")
	// ErrFamily marks a checkpoint of a kind that this package does not run.
	ErrFamily = errors.New("unsupported drafter family")
	// ErrWeights marks tensors that are missing, unknown, misshapen or not finite.
	ErrWeights = errors.New("drafter weights")
	// ErrAnchor marks an anchor whose context has not been given yet.
	ErrAnchor = errors.New("anchor beyond its context")
	// ErrStage marks a stage that is configured or fed wrongly.
	ErrStage = errors.New("drafting stage")
)
