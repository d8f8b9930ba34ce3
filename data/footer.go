package data

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/draftscope/draftscope/data/statefile"
)

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
