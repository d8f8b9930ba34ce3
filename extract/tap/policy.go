package tap

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// Policy says which requests are kept. The zero value keeps all.
type Policy struct {
	// Sample is the share of requests to keep, chosen by their names; 0 means
	// all of them.
	Sample float64
	// MinTokens and MaxTokens bound the rows of a request; 0 is no bound.
	MinTokens, MaxTokens int
	// Tags must all be among a request's.
	Tags map[string]string
	// Redact leaves the text out of the table sequences.
	Redact bool
}

// tagOff is the tag by which a client says that its request must not be kept,
// and its value.
const (
	tagOff      = "draftscope"
	tagOffValue = "off"
)

// Validate reports what is out of range.
func (p Policy) Validate() error {
	var errs []error
	if !(p.Sample >= 0 && p.Sample <= 1) {
		errs = append(errs, fmt.Errorf("%w: a sample of %v; want a share from 0 to 1", ErrConfig, p.Sample))
	}
	if p.MinTokens < 0 || p.MaxTokens < 0 || p.MaxTokens > 0 && p.MinTokens > p.MaxTokens {
		errs = append(errs, fmt.Errorf("%w: requests of %d to %d tokens", ErrConfig, p.MinTokens, p.MaxTokens))
	}
	return errors.Join(errs...)
}

func (p Policy) share() float64 {
	if p.Sample == 0 {
		return 1
	}
	return p.Sample
}

// sampled says whether a request of this name is among the share. The engine
// computes the same, and does not send the others.
func (p Policy) sampled(id string) bool {
	share := p.share()
	if share >= 1 {
		return true
	}
	sum := sha256.Sum256([]byte(id))
	return float64(binary.BigEndian.Uint64(sum[:8]))/math.Exp2(64) < share
}

// wants says whether a request that begins is to be kept.
func (p Policy) wants(b begin) bool {
	if b.OptOut || b.Tags[tagOff] == tagOffValue || !p.sampled(b.R) {
		return false
	}
	for k, v := range p.Tags {
		if got, ok := b.Tags[k]; !ok || got != v {
			return false
		}
	}
	return p.MaxTokens == 0 || len(b.Prompt) <= p.MaxTokens
}
