package tap

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"regexp"

	"github.com/draftscope/draftscope/extract/probe"
	"github.com/draftscope/draftscope/schemas"
)

// Protocol is the version of docs/tap.md that this package speaks.
const Protocol = 1

// maxFrame bounds a control message, and so what a damaged length can cost.
const maxFrame = 16 << 20

// The kinds of message.
const (
	typeHello   = "hello"
	typeWelcome = "welcome"
	typeRing    = "ring"
	typeCredit  = "credit"
	typeBegin   = "begin"
	typeStep    = "step"
	typeFinish  = "finish"
	typeAbort   = "abort"
	typeShed    = "shed"
	typeDrop    = "drop"
	typeBye     = "bye"
	typeRefuse  = "refuse"
)

// Hello is what an engine says of itself.
type Hello struct {
	Protocol  int       `json:"protocol"`
	Engine    string    `json:"engine"`
	Version   string    `json:"engine_version"`
	PID       int       `json:"pid"`
	Model     Model     `json:"model"`
	DType     string    `json:"dtype"` // f32, bf16 or f16
	FinalNorm FinalNorm `json:"final_norm"`
	Bulk      []string  `json:"bulk"`
}

// Model is the engine's model.
type Model struct {
	Label       string `json:"label"`
	Fingerprint string `json:"fingerprint"` // empty when the engine does not know it
	Layers      int    `json:"layers"`
	Hidden      int    `json:"hidden"`
	Vocab       int    `json:"vocab"`
}

// FinalNorm refers to the norm between the last state and the head.
type FinalNorm struct {
	Eps    float64 `json:"eps"`
	SHA256 string  `json:"sha256"` // of the weights as little-endian float32
}

// welcome answers a hello.
type welcome struct {
	Type      string  `json:"type"`
	Protocol  int     `json:"protocol"`
	Run       string  `json:"run"`
	States    []int   `json:"states"`
	Bulk      string  `json:"bulk"`
	Sample    float64 `json:"sample"`
	MaxTokens int     `json:"max_tokens"`
}

// ringAd describes the memory that rows come through.
type ringAd struct {
	Kind      string `json:"kind"`
	Offset    int64  `json:"offset"`
	SlotBytes int64  `json:"slot_bytes"`
	Slots     int64  `json:"slots"`
}

type begin struct {
	R           string            `json:"r"`
	Prompt      []int32           `json:"prompt"`
	Cached      int               `json:"cached"`
	Temperature float32           `json:"temperature"`
	Tags        map[string]string `json:"tags"`
	OptOut      bool              `json:"optout"`
}

type step struct {
	N    int64   `json:"n"`
	At   float64 `json:"at"` // when it was sent, in seconds since 1970; 0 where the engine does not say
	Rows []entry `json:"rows"`
}

// entry is consecutive rows of one request.
type entry struct {
	R        string  `json:"r"`
	Pos      int     `json:"pos"`
	IDs      []int32 `json:"ids"`
	Slot     uint64  `json:"slot"`
	Accepted *int    `json:"accepted"`
}

// ending is finish, abort or shed.
type ending struct {
	R      string  `json:"r"`
	Reason string  `json:"reason"`
	IDs    []int32 `json:"ids"`
	Rows   int     `json:"rows"`
	Taken  int     `json:"taken"` // rows behind them that are taken back
}

// Counts say what became of an engine's requests. The first six are counted
// on both sides of the socket and must be equal.
type Counts struct {
	Begun    int64 `json:"begun"`
	Finished int64 `json:"finished"`
	Aborted  int64 `json:"aborted"`
	Shed     int64 `json:"shed"`
	Steps    int64 `json:"steps"`
	Rows     int64 `json:"rows"`

	// Only the engine knows these.
	ShedRows  int64 `json:"shed_rows,omitempty"`
	Unsampled int64 `json:"unsampled,omitempty"`
	OptOut    int64 `json:"optout,omitempty"`
	Lost      int64 `json:"lost,omitempty"`

	// And only the daemon these.
	Stored     int64 `json:"stored"` // handed to the stream, whole
	StoredRows int64 `json:"stored_rows"`
	// Of these, sequences whose first rows are another's, and such rows.
	Completed     int64 `json:"completed"`
	CompletedRows int64 `json:"completed_rows"`
	Faults        int64 `json:"faults"`     // set aside by a check
	Dropped       int64 `json:"dropped"`    // not wanted
	Tombstones    int64 `json:"tombstones"` // ended before they finished
}

// Add adds o to c.
func (c *Counts) Add(o Counts) {
	for _, p := range [][2]*int64{
		{&c.Begun, &o.Begun},
		{&c.Finished, &o.Finished},
		{&c.Aborted, &o.Aborted},
		{&c.Shed, &o.Shed},
		{&c.Steps, &o.Steps},
		{&c.Rows, &o.Rows},
		{&c.ShedRows, &o.ShedRows},
		{&c.Unsampled, &o.Unsampled},
		{&c.OptOut, &o.OptOut},
		{&c.Lost, &o.Lost},
		{&c.Stored, &o.Stored},
		{&c.StoredRows, &o.StoredRows},
		{&c.Completed, &o.Completed},
		{&c.CompletedRows, &o.CompletedRows},
		{&c.Faults, &o.Faults},
		{&c.Dropped, &o.Dropped},
		{&c.Tombstones, &o.Tombstones},
	} {
		*p[0] += *p[1]
	}
}

// sent is the part that both sides count.
func (c Counts) sent() [6]int64 {
	return [6]int64{c.Begun, c.Finished, c.Aborted, c.Shed, c.Steps, c.Rows}
}

// goodID is what a request may be called: it becomes a sequence's id.
var goodID = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)

func badProtocol(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

// readFrame reads one message into buf, which it may grow, and returns its
// type and bytes, valid until the next call.
func readFrame(r io.Reader, buf []byte) (kind string, body, grown []byte, err error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return "", nil, buf, err
	}
	n := binary.LittleEndian.Uint32(size[:])
	if n < 2 || n > maxFrame {
		return "", nil, buf, badProtocol("a message of %d bytes", n)
	}
	if int(n) > cap(buf) {
		// A length that lies costs what arrives, not what it says.
		if buf, err = readGrowing(r, int(n)); err != nil {
			return "", nil, buf, err
		}
	} else if _, err = io.ReadFull(r, buf[:n]); err != nil {
		return "", nil, buf, unexpected(err)
	}
	body = buf[:n]
	var head struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(body, &head); err != nil {
		return "", nil, buf, badProtocol("a message that is no JSON object: %v", err)
	}
	return head.Type, body, buf, nil
}

func readGrowing(r io.Reader, n int) ([]byte, error) {
	const piece = 1 << 20
	var buf []byte
	for len(buf) < n {
		lo := len(buf)
		buf = append(buf, make([]byte, min(piece, n-lo))...)
		if _, err := io.ReadFull(r, buf[lo:]); err != nil {
			return buf, unexpected(err)
		}
	}
	return buf, nil
}

// unexpected makes the end of the input within a message an error of its own.
func unexpected(err error) error {
	if err == io.EOF { //nolint:errorlint // ReadFull returns it as it is
		return io.ErrUnexpectedEOF
	}
	return err
}

// decode reads a message of a known type.
func decode[T any](kind string, body []byte) (T, error) {
	var m T
	if err := json.Unmarshal(body, &m); err != nil {
		return m, badProtocol("%s: %v", kind, err)
	}
	return m, nil
}

// frame is m with its length.
func frame(m any) ([]byte, error) {
	body, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encoding a message: %w", err)
	}
	out := binary.LittleEndian.AppendUint32(make([]byte, 0, 4+len(body)), uint32(len(body)))
	return append(out, body...), nil
}

// formatOf is how a ring of this dtype holds values.
func formatOf(dtype string) (probe.Format, error) {
	f, ok := probe.FormatOf(dtype)
	if !ok {
		return f, badProtocol("dtype %q; a ring holds f32, bf16 or f16", dtype)
	}
	return f, nil
}

// Kept is the dtype in which the states of an engine that says hello with
// this dtype are recorded without loss.
func Kept(dtype string) (schemas.DType, error) {
	f, err := formatOf(dtype)
	return f.Kept, err
}
