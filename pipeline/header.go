package pipeline

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/cespare/xxhash/v2"
	"github.com/nats-io/nats.go"
	"github.com/zeebo/xxh3"
)

// The headers of a message. docs/stream.md describes them for other programs.
const (
	hdrVersion = "Draftscope-Version"
	hdrKind    = "Draftscope-Kind"
	hdrSeq     = "Draftscope-Seq"
	hdrAttempt = "Draftscope-Attempt"
	hdrChunk   = "Draftscope-Chunk"
	hdrRows    = "Draftscope-Rows"
	hdrSchema  = "Draftscope-Schema"
	hdrDigest  = "Draftscope-Digest"
	hdrCount   = "Draftscope-Count"
	hdrPad     = "Draftscope-Pad"
	hdrMsgID   = "Nats-Msg-Id"
	hdrLastID  = "Nats-Expected-Last-Msg-Id"
	hdrLastSeq = "Nats-Expected-Last-Sequence"
)

// layoutVersion is the one layout that there is. Messages of another are
// refused.
const layoutVersion = "2"

// kind is what a message says.
type kind string

const (
	kindBegin    kind = "begin"      // an invocation starts on this partition
	kindData     kind = "data"       // one chunk of a sequence
	kindEnd      kind = "end"        // a sequence is complete
	kindGivenUp  kind = "given-up"   // nothing more of this attempt follows, and it has no end
	kindEndOfRun kind = "end-of-run" // the invocation sends no more here
)

// header is the parsed header of a message.
type header struct {
	kind    kind
	seq     string
	attempt string // of an invocation: its nonce; of a sequence: nonce.number
	chunk   int    // data: 0, 1, 2, ...
	rows    int64  // data: of the chunk; end: of the sequence
	schema  string // data: fingerprint of the columns
	digest  uint64 // data: of the payload, see [digestOf]; end: xxhash64 of all the digests
	count   int64  // end: chunks; end-of-run: sequences ended by the invocation

	partition int    // begin, end-of-run: where it is sent; only in the id
	counted   bool   // written with the number of the message before it, not its id
	behind    uint64 // that number
	again     int    // only in the id: a server that refused a message may not take its id any more
}

// id is the message id, by which the server recognises a repeat.
func (h *header) id(run string) string {
	tail := strconv.Itoa(h.chunk)
	switch h.kind {
	case kindEnd, kindGivenUp:
		tail = string(h.kind)
	case kindBegin, kindEndOfRun: // ids are compared over the whole stream
		tail = string(h.kind) + "-" + strconv.Itoa(h.partition)
	}
	if h.again > 0 {
		tail += renamed + strconv.Itoa(h.again)
	}
	return escapeToken(run) + "/" + escapeSeq(h.seq) + "/" + h.attempt + "/" + tail
}

// renamed parts the number of the try from an id. It is in no tail of an id.
const renamed = "~"

// sameMessage says that two ids are of one message, under whatever number.
func sameMessage(a, b string) bool {
	plain := func(id string) string {
		if i := strings.LastIndex(id, renamed); i > strings.LastIndex(id, "/") {
			return id[:i]
		}
		return id
	}
	return plain(a) == plain(b)
}

// headerBytes is what nats.Header takes on the wire.
func headerBytes(h nats.Header) int {
	n := len("NATS/1.0\r\n") + len("\r\n")
	for k, vs := range h {
		for _, v := range vs {
			n += len(k) + len(": ") + len(v) + len("\r\n")
		}
	}
	return n
}

// marshal writes h for the wire. last is the id of the message before it in
// the stream, empty when unknown. The header is padded to a multiple of 64
// bytes: a client reads header and payload into one allocation, so that the
// payload, and with it every Arrow buffer, starts 64-byte aligned.
func (h *header) marshal(run, last string) nats.Header {
	out := nats.Header{
		hdrVersion: {layoutVersion},
		hdrKind:    {string(h.kind)},
		hdrAttempt: {h.attempt},
		hdrMsgID:   {h.id(run)},
		hdrPad:     {""},
	}
	if h.kind == kindGivenUp {
		out[hdrSeq] = []string{escapeSeq(h.seq)}
	}
	switch {
	case last != "" && h.counted:
		out[hdrLastSeq] = []string{strconv.FormatUint(h.behind, 10)}
	case last != "":
		out[hdrLastID] = []string{last}
	}
	if h.kind == kindData || h.kind == kindEnd {
		out[hdrSeq] = []string{escapeSeq(h.seq)}
		out[hdrRows] = []string{strconv.FormatInt(h.rows, 10)}
		out[hdrDigest] = []string{fmt.Sprintf("%016x", h.digest)}
	}
	switch h.kind {
	case kindData:
		out[hdrChunk] = []string{strconv.Itoa(h.chunk)}
		out[hdrSchema] = []string{h.schema}
	case kindEnd, kindEndOfRun:
		out[hdrCount] = []string{strconv.FormatInt(h.count, 10)}
	}
	if over := headerBytes(out) % 64; over != 0 {
		out[hdrPad] = []string{strings.Repeat("-", 64-over)}
	}
	return out
}

// parseHeader reads a header. It refuses one that lacks a part.
func parseHeader(in nats.Header) (header, error) {
	var h header
	v := in.Get(hdrVersion)
	if v != layoutVersion {
		return h, fmt.Errorf("%w: %s is %q, this program reads %s", ErrFrame, hdrVersion, v, layoutVersion)
	}
	h.kind, h.attempt = kind(in.Get(hdrKind)), in.Get(hdrAttempt)
	if h.attempt == "" || strings.HasPrefix(h.attempt, ".") {
		return h, fmt.Errorf("%w: %s is %q", ErrFrame, hdrAttempt, h.attempt)
	}
	var err error
	number := func(key string, limit int64) int64 {
		n, e := strconv.ParseInt(in.Get(key), 10, 64)
		if err == nil && (e != nil || n < 0 || n > limit) {
			err = fmt.Errorf("%w: %s is %q", ErrFrame, key, in.Get(key))
		}
		return n
	}
	switch h.kind {
	case kindBegin:
	case kindEndOfRun:
		h.count = number(hdrCount, math.MaxInt64)
	case kindGivenUp:
		if h.seq, err = unescapeSeq(in.Get(hdrSeq)); err != nil {
			err = fmt.Errorf("%w: %s is %q", ErrFrame, hdrSeq, in.Get(hdrSeq))
		}
	case kindEnd, kindData:
		var e error
		if h.seq, e = unescapeSeq(in.Get(hdrSeq)); e != nil {
			return h, fmt.Errorf("%w: %s is %q", ErrFrame, hdrSeq, in.Get(hdrSeq))
		}
		if h.digest, e = strconv.ParseUint(in.Get(hdrDigest), 16, 64); e != nil {
			err = fmt.Errorf("%w: %s is %q", ErrFrame, hdrDigest, in.Get(hdrDigest))
		}
		h.rows = number(hdrRows, math.MaxInt64)
		if h.kind == kindEnd {
			h.count = number(hdrCount, math.MaxInt32)
		} else {
			h.chunk = int(number(hdrChunk, math.MaxInt32))
			h.schema = in.Get(hdrSchema)
		}
	default:
		err = fmt.Errorf("%w: %s is %q", ErrFrame, hdrKind, h.kind)
	}
	return h, err
}

// digestOf is the digest of a payload: its XXH3, of 64 bits and without a seed.
func digestOf(payload []byte) uint64 { return xxh3.Hash(payload) }

// tally counts what a sequence has had so far, on both ends of the stream.
// It is a value: a copy is a point to come back to.
type tally struct {
	chunks int
	rows   int64
	hash   xxhash.Digest // of the chunks' digests, 8 bytes big-endian each
}

func newTally() tally {
	var t tally
	t.hash.Reset()
	return t
}

func (t *tally) add(rows int64, digest uint64) {
	var b [8]byte
	for i := range b {
		b[i] = byte(digest >> (56 - 8*i))
	}
	t.hash.Write(b[:])
	t.chunks++
	t.rows += rows
}

func (t *tally) digest() uint64 { return t.hash.Sum64() }
