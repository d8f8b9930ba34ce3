package data

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go"
)

// SinkConfig says how a sink writes. The zero value is fine.
type SinkConfig struct {
	// Stream and StreamCreated name the stream that is stored. They are
	// written into every file: a stream that is made anew counts from one
	// again, and only its creation tells the two apart.
	Stream        string
	StreamCreated time.Time
	// RowGroupBytes is about how many bytes of float32 a row group of the
	// table states holds; 0 means 2 MiB. A row group holds one state.
	RowGroupBytes int
	// EncodeWorkers is how many goroutines of a capture sink encode states
	// during Commit; 0 means GOMAXPROCS. Each takes about three times the
	// stored bytes of a row group.
	EncodeWorkers int
}

// Validate reports what of the config cannot be used.
func (c SinkConfig) Validate() error {
	if c.RowGroupBytes < 0 || c.RowGroupBytes > maxRowGroup {
		return fmt.Errorf("row groups of %d bytes: want 0 to %d", c.RowGroupBytes, maxRowGroup)
	}
	if c.EncodeWorkers < 0 {
		return fmt.Errorf("%d goroutines to encode: want 0 or more", c.EncodeWorkers)
	}
	return nil
}

const (
	defaultRowGroup = 2 << 20
	// maxRowGroup keeps the elements of a list column far below 2^31.
	maxRowGroup = 1 << 30
)

// Counts says what a sink did with the sequences that ended. A result sink
// counts each drafter of a sequence.
type Counts struct {
	Stored    int // made durable
	Repeats   int // equal to what was stored, and dropped
	Conflicts int // unlike what was stored; a fault of check K15
	SetAside  int // stored as a fault only
}

// sink is what the two sinks share.
type sink struct {
	d      *Dataset
	run    Run
	shard  int
	cfg    SinkConfig
	counts Counts
	// faults wait for Commit, keyed by digest; span is theirs.
	faults    []schemas.Fault
	faultSpan span
}

func (d *Dataset) newSink(run string, shard int, cfg SinkConfig) (sink, error) {
	s := sink{d: d, shard: shard, cfg: cfg}
	if !d.writable {
		return s, ErrReadOnly
	}
	if err := cfg.Validate(); err != nil {
		return s, err
	}
	if shard < 0 {
		return s, fmt.Errorf("shard %d: want 0 or more", shard)
	}
	if s.cfg.RowGroupBytes == 0 {
		s.cfg.RowGroupBytes = defaultRowGroup
	}
	var err error
	if s.run, err = d.Run(run); err != nil {
		return s, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err = d.indexOf(run)
	return s, err
}

// Counts says what became of the sequences so far.
func (s *sink) Counts() Counts { return s.counts }

// envelope reads and checks a record's envelope.
func (s *sink) envelope(rec arrow.Record) (schemas.Envelope, error) {
	env, err := schemas.EnvelopeOf(rec)
	if err != nil {
		return env, err
	}
	if env.Run != s.run.Name {
		return env, fmt.Errorf("%w: a record of run %s came to the sink of run %s", ErrRecord, env.Run, s.run.Name)
	}
	return env, nil
}

// addFault queues a fault unless it is stored or queued already.
func (s *sink) addFault(streamSeq uint64, f schemas.Fault) {
	if f.At.IsZero() {
		f.At = time.Now().UTC().Truncate(time.Microsecond)
	}
	// They may quote a file's name; a reader of the table takes UTF-8 only.
	f.SeqID, f.Detail = strings.ToValidUTF8(f.SeqID, "\ufffd"), strings.ToValidUTF8(f.Detail, "\ufffd")
	key := faultDigest(f)
	s.d.mu.Lock()
	known := s.d.indexes[s.run.Name].faults
	seen := known[key]
	known[key] = true
	s.d.mu.Unlock()
	if !seen {
		s.faults = append(s.faults, f)
		s.faultSpan.add(streamSeq)
	}
}

// conflict queues the fault of a sequence that came again and is another.
func (s *sink) conflict(streamSeq uint64, key seqKey, stored, came string) {
	s.counts.Conflicts++
	what := "capture"
	if key.drafter != "" {
		what = "results of drafter " + key.drafter
	}
	s.addFault(streamSeq, schemas.Fault{
		SeqID: key.seq, Chunk: -1, Check: "K15",
		Detail: fmt.Sprintf("%s: came again with digest %s, stored is %s; the stored one was kept", what, came, stored),
	})
}

// commitFaults stores the queued faults in a file of their own.
func (s *sink) commitFaults() error {
	if len(s.faults) == 0 {
		return nil
	}
	if err := s.d.present(); err != nil {
		return err
	}
	dir := runDir(s.d.dir, schemas.TableFaults, s.run.Name)
	paths := func(g group) []string { return []string{filepath.Join(dir, g.file())} }
	g, release := s.d.reserve(s.shard, s.faultSpan, paths)
	defer release()
	slices.SortStableFunc(s.faults, func(a, b schemas.Fault) int { return cmp.Compare(a.SeqID, b.SeqID) })
	var list []storedSeq
	for _, f := range s.faults {
		list = append(list, storedSeq{f.SeqID, faultDigest(f)})
	}
	p, err := writeSmall(s, paths(g)[0], schemas.TableFaults, "", g.span, list, nil, s.faults)
	if err != nil {
		return err
	}
	if err := publish(s.d.disk, []part{p}); err != nil {
		return err
	}
	s.faults, s.faultSpan = nil, span{}
	return nil
}

// forgetFaults gives up what waits for Commit.
func (s *sink) forgetFaults() {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	for _, f := range s.faults {
		delete(s.d.indexes[s.run.Name].faults, faultDigest(f))
	}
	s.faults = nil
}

// writeSmall writes one file of a table without vectors. siblings are the
// other files of a group whose marker this is.
func writeSmall[T any](s *sink, path, table, drafter string, sp span, seqs []storedSeq, siblings []part, rows []T) (part, error) {
	f, err := newFooter[T](table, s.run.Name, drafter, s.shard, s.cfg, sp, seqs)
	if err != nil {
		return part{}, err
	}
	if siblings != nil {
		if f[keyGroup], err = s.groupList(siblings); err != nil {
			return part{}, err
		}
	}
	open := func(out io.Writer) (*smallWriter[T], error) { return newSmallWriter[T](out), nil }
	return writePart(s.d.disk, path, f, open, func(w *smallWriter[T]) error { return w.write(rows) })
}

// smallWriter is how all tables but states are written.
type smallWriter[T any] struct {
	*parquet.GenericWriter[T]
	rows int64
}

func newSmallWriter[T any](out io.Writer) *smallWriter[T] {
	return &smallWriter[T]{GenericWriter: parquet.NewGenericWriter[T](out,
		parquet.Compression(&parquet.Zstd), parquet.PageBufferSize(64<<10), parquet.WriteBufferSize(0),
		parquet.CreatedBy("draftscope", strconv.Itoa(schemas.FormatVersion), "parquet-go"))}
}

// NumRows is how many rows were written so far.
func (w *smallWriter[T]) NumRows() int64 { return w.rows }

func (w *smallWriter[T]) write(rows []T) error {
	n, err := w.Write(rows)
	w.rows += int64(n)
	return err
}

func (s *sink) groupList(parts []part) (string, error) {
	files := []groupFile{}
	for _, p := range parts {
		rel, err := filepath.Rel(s.d.dir, p.path)
		if err != nil {
			return "", fmt.Errorf("naming %s: %w", p.path, err)
		}
		files = append(files, groupFile{filepath.ToSlash(rel), p.size})
	}
	b, err := json.Marshal(files)
	return string(b), err
}

// discard removes temporary files after a failed commit.
func (s *sink) discard(parts []part) {
	for _, p := range parts {
		_ = s.d.disk.Remove(p.tmp()) // as far as possible: the next writer removes it too
	}
}
