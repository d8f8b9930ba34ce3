package pipeline

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"
)

// The two streams of a run. A [Session] calls its sink factory with one of
// these names.
const (
	CaptureStream = "capture" // what the Source gave
	ResultsStream = "results" // what the Stage emitted
)

const (
	maxRunName = 64  // bytes, before escaping
	maxSeqID   = 256 // bytes, before escaping
)

// escapeToken spells s with letters, digits, - and _ only, every other byte
// as =XX, so that it is one token of a subject, a stream name and a folder.
func escapeToken(s string) string {
	var b strings.Builder
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '_':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "=%02X", c)
		}
	}
	return b.String()
}

func checkRunName(run string) error {
	if run == "" || len(run) > maxRunName || !utf8.ValidString(run) {
		return fmt.Errorf("%w: run name %q has to be 1 to %d bytes of UTF-8", ErrConfig, run, maxRunName)
	}
	return nil
}

func checkSeqID(seq string) error {
	if seq == "" || len(seq) > maxSeqID || !utf8.ValidString(seq) {
		return fmt.Errorf("sequence id %q has to be 1 to %d bytes of UTF-8", seq, maxSeqID)
	}
	return nil
}

// StreamName is the JetStream name of a run's stream.
func StreamName(run, stream string) string {
	return route{run: run, stream: stream}.name()
}

// Subject is where the sequences of one partition are published.
func Subject(run, stream string, partition int) string {
	return route{run: run, stream: stream}.subject(partition)
}

// Partition is where a sequence belongs: xxhash64 of its id modulo n.
func Partition(seq string, n int) int {
	return int(xxhash.Sum64String(seq) % uint64(n))
}

// escapeSeq is the sequence id as headers and message ids carry it.
func escapeSeq(seq string) string { return url.PathEscape(seq) }

func unescapeSeq(s string) (string, error) {
	seq, err := url.PathUnescape(s)
	if err != nil {
		return "", err
	}
	if checkSeqID(seq) != nil {
		return "", errors.New("bad sequence id")
	}
	return seq, nil
}

// newNonce names this invocation. It is the part of an attempt before the dot.
func newNonce() string { return strings.ToLower(rand.Text()[:12]) }

// nonceOf is the invocation that made an attempt.
func nonceOf(attempt string) string {
	nonce, _, _ := strings.Cut(attempt, ".")
	return nonce
}
