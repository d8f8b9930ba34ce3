package data

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go"
)

// The footer keys of every Parquet file of a dataset. docs/dataset.md explains
// them.
const (
	keyFormat    = "draftscope.format"
	keyTable     = "draftscope.table"
	keySchema    = "draftscope.schema"
	keyRun       = "draftscope.run"
	keyDrafter   = "draftscope.drafter"
	keyShard     = "draftscope.shard"
	keyRows      = "draftscope.rows"
	keySequences = "draftscope.sequences"
	keyFirst     = "draftscope.first"
	keyLast      = "draftscope.last"
	keyStream    = "draftscope.stream"
	keyCreated   = "draftscope.stream_created"
	keyBody      = "draftscope.body_bytes"
	keyDigest    = "draftscope.digest"
	keyTail      = "draftscope.tail_digest"
	keyGroup     = "draftscope.group"
	keyDType     = "draftscope.dtype"
	keyHidden    = "draftscope.hidden"
	keyLayers    = "draftscope.layers"
	keyStates    = "draftscope.states"
	keyEncoding  = "draftscope.states_encoding"
	keyRounding  = "draftscope.rounding_error"
)

// storedSeq names a sequence and the digest of all that is stored of it.
type storedSeq struct {
	SeqID  string `json:"seq_id"`
	Digest string `json:"digest"`
}

// groupFile is one file of a commit group, as its marker lists it.
type groupFile struct {
	Path string `json:"path"` // from the dataset's folder, with slashes
	Size int64  `json:"size"`
}

// part is one file on its way into the dataset: complete and synced under a
// temporary name.
type part struct {
	path string // final
	size int64
	rows int64
}

func (p part) tmp() string { return p.path + tmpSuffix }

// footer are the key-values of a file.
type footer map[string]string

// newFooter holds what every file of a commit says.
func newFooter[T any](table, run, drafter string, shard int, cfg SinkConfig, span span, seqs []storedSeq) (footer, error) {
	list, err := json.Marshal(seqs)
	if err != nil {
		return nil, fmt.Errorf("encoding the list of sequences: %w", err)
	}
	f := footer{
		keyFormat:    strconv.Itoa(schemas.FormatVersion),
		keyTable:     table,
		keySchema:    schemas.Fingerprint(schemas.SchemaOf[T](schemas.Envelope{Table: table, Run: run, Drafter: drafter})),
		keyRun:       run,
		keyShard:     strconv.Itoa(shard),
		keySequences: string(list),
		keyFirst:     strconv.FormatUint(span.first, 10),
		keyLast:      strconv.FormatUint(span.last, 10),
	}
	if drafter != "" {
		f[keyDrafter] = drafter
	}
	if cfg.Stream != "" {
		f[keyStream] = cfg.Stream
		f[keyCreated] = cfg.StreamCreated.UTC().Format(time.RFC3339Nano)
	}
	return f, nil
}

// digester hashes and counts what passes, so that the footer can vouch for
// every byte before the indexes.
type digester struct {
	w io.Writer
	h *xxhash.Digest
	n int64
}

func (d *digester) Write(b []byte) (int, error) {
	n, err := d.w.Write(b)
	d.n += int64(n)
	d.h.Write(b[:n])
	return n, err
}

// partWriter writes the rows of one file. What it was given is in the file, up
// to the indexes, when Flush returns; no goroutine of it is left then.
type partWriter interface {
	Flush() error
	NumRows() int64
	SetKeyValueMetadata(key, value string)
	Close() error
}

// writePart writes one Parquet file under a temporary name, syncs it, opens
// it again and checks what it says. open makes the writer, fill writes the
// rows. On an error nothing is left behind.
func writePart[W partWriter](d disk, path string, f footer, open func(io.Writer) (W, error), fill func(W) error) (p part, err error) {
	p.path = path
	if err := makeDir(d, filepath.Dir(path)); err != nil {
		return p, err
	}
	file, err := d.Create(p.tmp())
	if err != nil {
		return p, writeError(path, err)
	}
	defer func() {
		if err != nil {
			_ = d.Remove(p.tmp()) // as far as possible: the next writer removes it too
		}
	}()
	buf := bufio.NewWriterSize(file, 128<<10)
	body := &digester{w: buf, h: xxhash.New()}
	var tail bytes.Buffer // indexes and footer
	err = guard(func() error {
		w, err := open(body)
		if err != nil {
			return err
		}
		if err := errors.Join(fill(w), w.Flush()); err != nil {
			return err
		}
		p.rows = w.NumRows()
		for _, key := range sorted(f) {
			w.SetKeyValueMetadata(key, f[key])
		}
		w.SetKeyValueMetadata(keyRows, strconv.FormatInt(p.rows, 10))
		w.SetKeyValueMetadata(keyBody, strconv.FormatInt(body.n, 10))
		w.SetKeyValueMetadata(keyDigest, hex64(body.h.Sum64()))
		w.SetKeyValueMetadata(keyTail, noDigest)
		body.w = &tail
		return w.Close()
	})
	p.size = body.n
	if err == nil {
		err = vouch(tail.Bytes())
	}
	if err == nil {
		_, err = buf.Write(tail.Bytes())
	}
	if err == nil {
		err = buf.Flush()
	}
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			return p, fmt.Errorf("writing %s: %w", path, err)
		}
		return p, writeError(path, err)
	}
	return p, p.verify()
}

// verify opens the finished temporary file again.
func (p part) verify() error {
	f, err := openPart(p.tmp())
	if err != nil {
		return fmt.Errorf("verifying %s: %w", p.path, err)
	}
	defer f.Close()
	if f.size != p.size || f.NumRows() != p.rows || f.kv(keyRows) != strconv.FormatInt(p.rows, 10) {
		return fmt.Errorf("verifying %s: %w: %d bytes and %d rows, want %d and %d", p.path, ErrDamaged, f.size, f.NumRows(), p.size, p.rows)
	}
	return nil
}

// publish gives files their final names: all but the last, then, when these
// names are durable, the last, which is the marker that makes them count.
func publish(d disk, parts []part) (err error) {
	done := 0
	defer func() {
		if err == nil {
			return
		}
		for i, p := range parts {
			name := p.tmp()
			if i < done {
				name = p.path
			}
			_ = d.Remove(name) // as far as possible: the next writer removes it too
		}
	}()
	dirs := map[string]bool{}
	for i, p := range parts {
		if i == len(parts)-1 {
			for dir := range dirs {
				if err := d.SyncDir(dir); err != nil {
					return writeError(dir, err)
				}
			}
		}
		if err := d.Rename(p.tmp(), p.path); err != nil {
			return writeError(p.path, err)
		}
		done++
		dirs[filepath.Dir(p.path)] = true
	}
	last := filepath.Dir(parts[len(parts)-1].path)
	if err := d.SyncDir(last); err != nil {
		return writeError(last, err)
	}
	return nil
}

// exists reports whether there is anything of this name.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// guard runs f and turns a panic into an error. parquet-go panics on some
// damaged files and on some broken writers; neither may end the program.
func guard(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: %v", ErrDamaged, r)
		}
	}()
	return f()
}

// openedPart is an open Parquet file whose footer was checked.
type openedPart struct {
	*parquet.File
	file *os.File
	path string
	size int64
}

func (o *openedPart) Close() error { return o.file.Close() }

func (o *openedPart) kv(key string) string {
	v, _ := o.Lookup(key)
	return v
}

// ours reports whether a program of this project wrote the file.
func (o *openedPart) ours() bool { return o.kv(keyFormat) != "" }

// sequences reads the list of sequences in the footer.
func (o *openedPart) sequences() ([]storedSeq, error) {
	var list []storedSeq
	if err := json.Unmarshal([]byte(o.kv(keySequences)), &list); err != nil {
		return nil, fmt.Errorf("reading %s: %w: its list of sequences: %w", o.path, ErrDamaged, err)
	}
	return list, nil
}

// openPart opens a Parquet file and checks that its footer is consistent with
// itself and with the file's size. The error names the file.
func openPart(path string) (*openedPart, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	o := &openedPart{file: file, path: path}
	err = guard(func() error {
		info, err := file.Stat()
		if err != nil {
			return err
		}
		o.size = info.Size()
		return o.open(file)
	})
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return o, nil
}

// open reads the footer from r, which has o.size bytes.
func (o *openedPart) open(r io.ReaderAt) error {
	if err := checkFooter(r, o.size); err != nil {
		return err
	}
	var err error
	o.File, err = parquet.OpenFile(r, o.size, parquet.SkipPageIndex(true), parquet.SkipBloomFilters(true))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if err := o.check(); err != nil {
		return err
	}
	return o.checkTail(r)
}

// check compares the footer's numbers with each other.
func (o *openedPart) check() error {
	md := o.Metadata()
	var rows int64
	for i, rg := range md.RowGroups {
		if rg.NumRows < 0 || len(rg.Columns) != len(o.Schema().Columns()) {
			return fmt.Errorf("%w: row group %d has %d rows and %d columns", ErrDamaged, i, rg.NumRows, len(rg.Columns))
		}
		rows += rg.NumRows
		for _, c := range rg.Columns {
			m := c.MetaData
			start := m.DataPageOffset
			if m.DictionaryPageOffset > 0 {
				start = min(start, m.DictionaryPageOffset)
			}
			if m.NumValues < 0 || start < 0 || m.TotalCompressedSize < 0 || m.TotalUncompressedSize < 0 || start > o.size-m.TotalCompressedSize {
				return fmt.Errorf("%w: row group %d, column %s: %d values in %d bytes at %d", ErrDamaged, i, strings.Join(m.PathInSchema, "."), m.NumValues, m.TotalCompressedSize, start)
			}
		}
	}
	if md.NumRows < 0 || rows != md.NumRows {
		return fmt.Errorf("%w: its footer claims %d rows and its row groups %d", ErrDamaged, md.NumRows, rows)
	}
	if !o.ours() {
		return nil
	}
	if v, err := strconv.Atoi(o.kv(keyFormat)); err != nil || v < 1 {
		return fmt.Errorf("%w: format version %q", ErrDamaged, o.kv(keyFormat))
	} else if v > schemas.FormatVersion {
		return fmt.Errorf("%w: version %d, this program knows up to %d; update draftscope", ErrNewer, v, schemas.FormatVersion)
	}
	if v := o.kv(keyRows); v != strconv.FormatInt(rows, 10) {
		return fmt.Errorf("%w: its footer promises %q rows and holds %d", ErrDamaged, v, rows)
	}
	return nil
}

// verifyBody compares the file's content with the digest in its footer. A file
// of another program has none and passes.
func (o *openedPart) verifyBody() error {
	if !o.ours() {
		return nil
	}
	n, err := strconv.ParseInt(o.kv(keyBody), 10, 64)
	if err != nil || n < 0 || n > o.size {
		return fmt.Errorf("reading %s: %w: %q bytes of content in a file of %d", o.path, ErrDamaged, o.kv(keyBody), o.size)
	}
	h := xxhash.New()
	if _, err := io.Copy(h, io.NewSectionReader(o.file, 0, n)); err != nil {
		return fmt.Errorf("reading %s: %w", o.path, err)
	}
	if got, want := hex64(h.Sum64()), o.kv(keyDigest); got != want {
		return fmt.Errorf("reading %s: %w: its content has digest %s, its footer says %s", o.path, ErrDamaged, got, want)
	}
	return nil
}

// readRows reads all rows of a small table's file.
func readRows[T any](path string) ([]T, error) {
	o, err := openPart(path)
	if err != nil {
		return nil, err
	}
	defer o.Close()
	if err := o.verifyBody(); err != nil {
		return nil, err
	}
	want := o.NumRows()
	rows := make([]T, 0, min(want, 4096))
	err = guard(func() error {
		r := parquet.NewGenericReader[T](o.File)
		defer r.Close()
		// What the footer promises is allocated only as it comes.
		for int64(len(rows)) < want {
			lo := len(rows)
			rows = slices.Grow(rows, 1)
			n, err := r.Read(rows[lo:min(int64(cap(rows)), want)])
			rows = rows[:lo+n]
			if int64(len(rows)) < want && (n == 0 || err != nil) {
				return fmt.Errorf("%w after %d of %d rows: %w", ErrDamaged, len(rows), want, cmp.Or(err, io.ErrNoProgress))
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return rows, nil
}

func hex64(v uint64) string { return fmt.Sprintf("%016x", v) }
