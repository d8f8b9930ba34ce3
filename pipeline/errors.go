package pipeline

import (
	"errors"
	"fmt"
)

var (
	// ErrConfig marks a configuration that cannot work.
	ErrConfig = errors.New("invalid pipeline configuration")
	// ErrNoServer marks a NATS server that did not answer in time.
	ErrNoServer = errors.New("no NATS server")
	// ErrNoJetStream marks a NATS server that answers but has JetStream off.
	ErrNoJetStream = errors.New("JetStream is not enabled")
	// ErrStoreInUse marks a store directory that another process has open.
	ErrStoreInUse = errors.New("stream store is in use by another process")
	// ErrFrame marks a message that is not a whole, undamaged frame.
	ErrFrame = errors.New("damaged frame")
	// ErrRowTooLarge marks a single row that does not fit in a message.
	ErrRowTooLarge = errors.New("row is larger than a message may be")
	// ErrSequenceTooLarge marks a sequence that does not fit in a stream of
	// limited size, so that waiting for room would never end.
	ErrSequenceTooLarge = errors.New("sequence is larger than the stream may be")
	// ErrRefused marks a message that the server will not store, whatever
	// the number of tries: its disk is full, or a limit forbids it.
	ErrRefused = errors.New("refused by the NATS server")
	// ErrServerFailed marks an embedded server that could not write its store:
	// it answers no more until it is started again.
	ErrServerFailed = errors.New("the embedded NATS server could not write its store")
	// ErrAnotherWriter marks a run that a second process is working on.
	ErrAnotherWriter = errors.New("another process works on this run")
	// ErrStreamGone marks a stream that was there and is not any more.
	ErrStreamGone = errors.New("a stream of the run is gone from the server: somebody deleted it, or the server lost its store; what is in the dataset is kept, and the same command captures the rest again")
	// ErrOrder marks a Source that breaks its contract.
	ErrOrder = errors.New("source mixes sequences")
	// ErrIncomplete marks a run that ended with fewer sequences stored or
	// set aside than were published.
	ErrIncomplete = errors.New("sequences are missing")
)

var (
	// errStopped ends a reader that was told to stop; what it held comes again.
	errStopped = errors.New("told to stop")
	// ErrDecline marks a group of workers whose results a sink will not have.
	ErrDecline = errors.New("results are not wanted")
)

// Fault says why one sequence was set aside. The run goes on without it.
//
// A [Stage] or a [Sink] whose error wraps a *Fault sets the sequence aside in
// the same way; only Check and Detail need to be filled in then.
type Fault struct {
	Stream string // [CaptureStream] or [ResultsStream]
	Seq    string // empty when the message does not say
	Chunk  int    // of the sequence; -1 when it concerns none
	Check  string // a short name of the rule: header, frame, order, digest, count, or the stage's own
	Detail string
}

// Error is one line that names the sequence, the chunk and the rule.
func (f *Fault) Error() string {
	return fmt.Sprintf("sequence %q, chunk %d of %s: %s: %s", f.Seq, f.Chunk, f.Stream, f.Check, f.Detail)
}
