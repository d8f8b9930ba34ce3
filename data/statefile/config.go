// Package statefile writes the Parquet files of the table states.
//
// A [Writer] makes pages straight from captured bytes: it never expands bf16
// to float32, never looks for matches that are not there, and encodes row
// groups on several goroutines. What it writes is ordinary Parquet, which
// every reader opens as a list of FLOAT. A [PlainWriter] writes the same rows
// through parquet-go's own writer; it is slower, has no page code of its own,
// and is what the tests hold the Writer against. A [Splicer] joins finished
// files without decoding them.
//
// A row group holds one state only and at most [Config.GroupBytes]; its
// column vec is cut into pages of at most [Config.PageBytes], whole rows each.
package statefile

import (
	"fmt"
	"runtime"

	"github.com/draftscope/draftscope/schemas"
)

// Config says what the files hold and how they are cut.
type Config struct {
	DType  schemas.DType // of the captured bytes
	Hidden int           // values in a row's vector
	// GroupBytes and PageBytes bound row groups and pages of vectors, counted
	// as float32; 0 means 2 MiB and 1 MiB. Either holds one row at least.
	GroupBytes int
	PageBytes  int
	// Workers is how many goroutines encode; 0 means GOMAXPROCS. With one, all
	// is done by the caller's. Each takes about a row group's stored size and
	// twice a page's captured size of memory, and as many finished row groups
	// again may wait for their turn to be written.
	Workers int
}

const (
	defaultGroup = 2 << 20
	defaultPage  = 1 << 20
	// maxGroup keeps counts and sizes of a page far below 2^31.
	maxGroup = 1 << 30
)

// Validate reports what of the config cannot be used.
func (c Config) Validate() error {
	if c.DType.Size() == 0 || c.Hidden < 1 || c.Hidden > maxGroup/4 {
		return fmt.Errorf("rows of %d values in dtype %q", c.Hidden, c.DType)
	}
	if c.GroupBytes < 0 || c.GroupBytes > maxGroup || c.PageBytes < 0 || c.PageBytes > maxGroup {
		return fmt.Errorf("row groups of %d bytes and pages of %d: want 0 to %d", c.GroupBytes, c.PageBytes, maxGroup)
	}
	if c.Workers < 0 {
		return fmt.Errorf("%d workers: want 0 or more", c.Workers)
	}
	return nil
}

func (c Config) withDefaults() Config {
	if c.GroupBytes == 0 {
		c.GroupBytes = defaultGroup
	}
	if c.PageBytes == 0 {
		c.PageBytes = defaultPage
	}
	if c.Workers == 0 {
		c.Workers = runtime.GOMAXPROCS(0)
	}
	return c
}

// groupRows is the most rows in a row group.
func (c Config) groupRows() int { return max(1, c.GroupBytes/(4*c.Hidden)) }

// pageRows is the most rows in a page of the column vec.
func (c Config) pageRows() int { return max(1, c.PageBytes/(4*c.Hidden)) }

// width is the size of a captured row in bytes.
func (c Config) width() int { return c.Hidden * c.DType.Size() }

// Rows are consecutive tokens of one sequence in one state.
type Rows struct {
	SeqID string
	Pos   int32 // of the first row
	State int32
	Norms []float32 // one a row
	Raw   []byte    // [len(Norms), Hidden] values, little-endian
}

func (c Config) check(r Rows) error {
	if len(r.Raw) != len(r.Norms)*c.width() {
		return fmt.Errorf("%d bytes for %d rows of %d", len(r.Raw), len(r.Norms), c.width())
	}
	return nil
}

// slice are the rows lo to hi.
func (c Config) slice(r Rows, lo, hi int) Rows {
	r.Pos += int32(lo)
	r.Norms, r.Raw = r.Norms[lo:hi], r.Raw[lo*c.width():hi*c.width()]
	return r
}
