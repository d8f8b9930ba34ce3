// Package files reads the hidden states that other systems have stored, and
// writes ours as they do. What each of them calls a state, and where the
// facts are from, is told with each reader.
//
// A [Reader] gives samples as they lie in the files; a [Source] checks them,
// finds or tests which states they are, and yields them as the pipeline takes
// them. Nothing of a file is executed, and no size that a file states is
// believed before its bytes are there.
package files

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/extract/probe"
)

var (
	// ErrFormat marks a file that is not what its format asks for.
	ErrFormat = errors.New("not a file of this format")
	// ErrConfig marks options that cannot be used.
	ErrConfig = errors.New("unusable options")
	// ErrClaim marks states that are not what somebody says they are.
	ErrClaim = probe.ErrClaim
)

// The formats that are known.
const (
	VLLM        = "vllm"        // {req_id}.safetensors of the ExampleHiddenStatesConnector
	Speculators = "speculators" // hs_{row}.safetensors beside an Arrow data set
	SpecForge   = "specforge"   // rows_*/data_*.ckpt, gzipped or not
	DeepSpec    = "deepspec"    // manifest.json, samples.idx, shard-*.bin

	// Eagle3 is what SpecForge trains EAGLE3 on; it is written, and read as
	// SpecForge's.
	Eagle3 = "specforge-eagle3"
)

// Sample is one sequence as another system stored it.
type Sample struct {
	ID   string // usable as a sequence's id
	File string // for messages
	IDs  []int32
	Mask []bool // nil: the format has none
	// Attended is 0 at padding, before the text or behind it; nil: there is
	// none.
	Attended []int32
	// Rows is the number of rows of states; a sound file has one a token, or
	// one less.
	Rows, Hidden int
	Slots        int
	Format       probe.Format
	// States are Rows*Slots*Hidden values, all slots of a row together.
	States []byte
	// Error is by how much a value may differ from what an 8-bit code was
	// rounded from; 0 where the format rounds nothing.
	Error float32
	// Normed is the last state after the final norm, Rows*Hidden values; nil
	// where the format has none.
	Normed []byte

	release func() error
}

// row is the bytes of a slot's row.
func (s *Sample) row(slot, r int) []byte {
	width := s.Hidden * s.Format.Size
	lo := (r*s.Slots + slot) * width
	return s.States[lo : lo+width]
}

// unpad takes padding off, which no row of the text has seen, so that the first
// token of the text has position 0.
func (s *Sample) unpad() error {
	if s.Attended == nil {
		return nil
	}
	n := len(s.Attended)
	lo, hi := slices.Index(s.Attended, 1), n
	for hi > 0 && s.Attended[hi-1] != 1 {
		hi--
	}
	switch {
	case n != len(s.IDs) || s.Mask != nil && n != len(s.Mask):
		return fmt.Errorf("%w: attention_mask has %d entries for %d tokens", ErrFormat, n, len(s.IDs))
	case lo < 0:
		return fmt.Errorf("%w: attention_mask has no 1", ErrFormat)
	case s.Rows != n:
		return nil // rows are missing, and nobody knows which
	}
	for t, bit := range s.Attended[lo:hi] {
		if bit != 1 {
			return fmt.Errorf("%w: attention_mask[%d] is %d within the text; padding is 0, before or behind it", ErrFormat, lo+t, bit)
		}
	}
	width := s.Hidden * s.Format.Size
	s.IDs, s.Rows, s.Attended = s.IDs[lo:hi], hi-lo, nil
	if s.Mask != nil {
		s.Mask = s.Mask[lo:hi]
	}
	s.States = s.States[lo*s.Slots*width : hi*s.Slots*width]
	if s.Normed != nil {
		s.Normed = s.Normed[lo*width : hi*width]
	}
	return nil
}

// check compares the sizes of what a reader gives.
func (s *Sample) check() error {
	width := s.Hidden * s.Format.Size
	switch {
	case s.Hidden < 1 || s.Slots < 1 || s.Rows < 0:
		return fmt.Errorf("%w: %d rows of %d states of %d values", ErrFormat, s.Rows, s.Slots, s.Hidden)
	case len(s.States) != s.Rows*s.Slots*width:
		return fmt.Errorf("%w: %d bytes of states for %d rows of %d states of %d %s values", ErrFormat, len(s.States), s.Rows, s.Slots, s.Hidden, s.Format.Name)
	case s.Normed != nil && len(s.Normed) != s.Rows*width:
		return fmt.Errorf("%w: %d bytes of last states for %d rows", ErrFormat, len(s.Normed), s.Rows)
	}
	return nil
}

// Close gives the sample's memory back.
func (s *Sample) Close() error {
	if s.release == nil {
		return nil
	}
	return s.release()
}

// Reader gives the samples of a folder, one at a time. open is called for one
// sample after the other; an error of it concerns that sample alone.
type Reader struct {
	// States are what the format itself says that the slots are; nil where it
	// says nothing.
	States  []int
	samples []lazy
	close   func() error
}

// lazy is a sample that is not read yet.
type lazy struct {
	id, file string
	open     func() (*Sample, error)
}

// Len is the number of samples.
func (r *Reader) Len() int { return len(r.samples) }

// Close gives back what the reader holds.
func (r *Reader) Close() error {
	if r.close == nil {
		return nil
	}
	return r.close()
}

// Open finds the samples of a folder.
func Open(format string, fsys fs.FS) (*Reader, error) {
	switch format {
	case VLLM:
		return openVLLM(fsys)
	case Speculators:
		return openSpeculators(fsys)
	case SpecForge:
		return openSpecForge(fsys)
	case DeepSpec:
		return openDeepSpec(fsys)
	}
	return nil, fmt.Errorf("%w: format %q; use %s, %s, %s or %s", ErrConfig, format, VLLM, Speculators, SpecForge, DeepSpec)
}

// find lists what below the root has a name that fits, sorted. It need not be
// a file.
func find(fsys fs.FS, fits func(name string) bool) ([]string, error) {
	var out []string
	err := fs.WalkDir(fsys, ".", func(name string, _ fs.DirEntry, err error) error {
		if err == nil && name != "." && fits(path.Base(name)) {
			out = append(out, name)
		}
		return err
	})
	slices.Sort(out)
	return out, err
}

// checkFile says what is wrong with a name that stands for no file, whose
// opening might wait forever. Links are followed.
func checkFile(fsys fs.FS, name string) error {
	st, err := fs.Stat(fsys, name)
	switch {
	case err != nil:
		return fmt.Errorf("reading %s: %w: %w", name, ErrFormat, err)
	case !st.Mode().IsRegular():
		return badFile(name, "it is no file (%s)", st.Mode())
	}
	return nil
}

// readFile reads what checkFile finds nothing wrong with.
func readFile(fsys fs.FS, name string) ([]byte, error) {
	if err := checkFile(fsys, name); err != nil {
		return nil, err
	}
	return fs.ReadFile(fsys, name)
}

// idOf makes a file's name a sequence's id.
func idOf(name string) string {
	name = strings.NewReplacer("/", "_").Replace(name)
	for _, end := range []string{".gz", ".ckpt", ".safetensors"} {
		name = strings.TrimSuffix(name, end)
	}
	out := []byte(name)
	for i, c := range out {
		ok := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || i > 0 && (c == '-' || c == '.')
		if !ok {
			out[i] = '_'
		}
	}
	if len(out) > 128 {
		out = out[len(out)-128:]
		out[0] = '_'
	}
	return string(out)
}

func badFile(name, format string, args ...any) error {
	return fmt.Errorf("reading %s: %w: %s", name, ErrFormat, fmt.Sprintf(format, args...))
}
