package data

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"strconv"

	"github.com/cespare/xxhash/v2"
	"github.com/draftscope/draftscope/data/statefile"
)

// noDigest stands for the digest of a file's end while that is computed: it is
// itself part of what it vouches for.
const noDigest = "0000000000000000"

// vouch puts the digest of a file's end, from its indexes on, into its place
// in the footer.
func vouch(tail []byte) error {
	at := tailDigest(tail)
	if at < 0 || string(tail[at:at+len(noDigest)]) != noDigest {
		return fmt.Errorf("its footer has no place for %s", keyTail)
	}
	copy(tail[at:], hex64(xxhash.Sum64(tail)))
	return nil
}

// tailDigest is where in a file's end the value of keyTail begins, or -1. In
// Thrift's compact protocol the string that follows another has the byte 0x18
// and its length before it.
func tailDigest(tail []byte) int {
	key := keyTail + "\x18" + string(rune(len(noDigest)))
	at := bytes.LastIndex(tail, []byte(key))
	if at < 0 || at+len(key)+len(noDigest) > len(tail) {
		return -1
	}
	return at + len(key)
}

// checkTail compares the file's end with its digest: a footer that decodes
// need not be what was written. A file without one passes.
func (o *openedPart) checkTail(r io.ReaderAt) error {
	want := o.kv(keyTail)
	if want == "" {
		return nil
	}
	from, err := strconv.ParseInt(o.kv(keyBody), 10, 64)
	if err != nil || from < 0 || from > o.size || o.size-from > maxFooter {
		return fmt.Errorf("%w: %q bytes of content in a file of %d", ErrDamaged, o.kv(keyBody), o.size)
	}
	tail := make([]byte, o.size-from)
	if _, err := r.ReadAt(tail, from); err != nil {
		return err
	}
	at := tailDigest(tail)
	if at < 0 {
		return fmt.Errorf("%w: its footer is not what was written", ErrDamaged)
	}
	copy(tail[at:], noDigest)
	if got := hex64(xxhash.Sum64(tail)); got != want {
		return fmt.Errorf("%w: its footer is not what was written: it has digest %s, and says %s", ErrDamaged, got, want)
	}
	return nil
}

// maxFooter bounds what is read of a footer.
const maxFooter = 256 << 20

// checkFooter reads the length at the end of r, which has size bytes, and
// scans the footer before it.
func checkFooter(r io.ReaderAt, size int64) error {
	if size < 12 {
		return fmt.Errorf("%w: %d bytes are no Parquet file", ErrDamaged, size)
	}
	var tail [8]byte
	if _, err := r.ReadAt(tail[:], size-8); err != nil {
		return err
	}
	if string(tail[4:]) != "PAR1" {
		return fmt.Errorf("%w: no Parquet footer at its end: it was cut, or is no Parquet file", ErrDamaged)
	}
	n := int64(binary.LittleEndian.Uint32(tail[:]))
	if n+12 > size || n > maxFooter {
		return fmt.Errorf("%w: its footer claims %d bytes of %d", ErrDamaged, n, size)
	}
	b := make([]byte, n)
	if _, err := r.ReadAt(b, size-8-n); err != nil {
		return err
	}
	if err := statefile.ScanThrift(b); err != nil {
		return fmt.Errorf("%w: its footer: %w", ErrDamaged, err)
	}
	return nil
}
