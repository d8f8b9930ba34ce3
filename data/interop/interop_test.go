//go:build interop

package interop

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/data/statefile"
	"github.com/draftscope/draftscope/data/statefile/statefiletest"
	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go"
)

// want is what the script compares a file with. Floats are hex of their
// little-endian bits.
type want struct {
	SeqID  []string `json:"seq_id"`
	Pos    []int32  `json:"pos"`
	State  []int32  `json:"state"`
	Norm   string   `json:"norm"`
	Vec    string   `json:"vec"`
	Hidden int      `json:"hidden"`
}

type rowWriter interface {
	Write(statefile.Rows) error
	Close() error
}

func TestOtherProgramsReadTheFiles(t *testing.T) {
	python := os.Getenv("DRAFTSCOPE_PYTHON")
	if python == "" {
		t.Fatal("DRAFTSCOPE_PYTHON must name a Python with requirements.txt installed; `task test:interop` sees to that")
	}
	dir := t.TempDir()
	rng := rand.New(rand.NewPCG(1, 2))
	for _, d := range []schemas.DType{schemas.BF16, schemas.F32} {
		for _, hidden := range []int{1, 2, 3, 7, 256, 5120} {
			for _, n := range []int{0, 1, 2, 40} {
				cfg := statefile.Config{DType: d, Hidden: hidden, PageBytes: 4 * hidden * 5, GroupBytes: 4 * hidden * 16}
				var rows []statefile.Rows
				for state := range int32(3) {
					for q := range 2 {
						raw := d.AppendBytes(nil, statefiletest.Like(rng, n*hidden, d == schemas.BF16))
						rows = append(rows, batch(cfg, fmt.Sprintf("q%d", q), 2*state, raw))
					}
				}
				write(t, filepath.Join(dir, fmt.Sprintf("%s-%dx%d", d, n, hidden)), cfg, rows)
			}
		}
	}
	splice(t, filepath.Join(dir, "bf16-40x256"), filepath.Join(dir, "bf16-40x256-spliced"))
	// Pages and row groups of the default size.
	big := statefile.Config{DType: schemas.BF16, Hidden: 5120}
	var rows []statefile.Rows
	for i, raw := range statefiletest.Residual(1, 2, 150, 5120, schemas.BF16) {
		rows = append(rows, batch(big, "p0", int32(i), raw))
	}
	write(t, filepath.Join(dir, "bf16-default"), big, rows)
	// Every pattern of bf16, and any bits of float32.
	var codes, bits []byte
	for code := range 1 << 16 {
		codes = binary.LittleEndian.AppendUint16(codes, uint16(code))
		bits = binary.LittleEndian.AppendUint32(bits, rng.Uint32())
	}
	for d, raw := range map[schemas.DType][]byte{schemas.BF16: codes, schemas.F32: bits} {
		cfg := statefile.Config{DType: d, Hidden: 1024}
		r := batch(cfg, "p0", 1, raw)
		clear(r.Norms) // those of NaN say nothing
		write(t, filepath.Join(dir, string(d)+"-patterns"), cfg, []statefile.Rows{r})
	}

	out, err := exec.CommandContext(t.Context(), python, "read.py", dir).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	if path := os.Getenv("DRAFTSCOPE_RESULT"); path != "" {
		if err := os.WriteFile(path, out, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func batch(cfg statefile.Config, seq string, state int32, raw []byte) statefile.Rows {
	return statefile.Rows{SeqID: seq, State: state, Norms: statefile.AppendNorms(nil, cfg.DType, cfg.Hidden, raw), Raw: raw}
}

// write makes name.parquet by the fast writer, name-plain.parquet by the plain
// one, and the rows that both must hold.
func write(t *testing.T, name string, cfg statefile.Config, rows []statefile.Rows) {
	t.Helper()
	w := want{SeqID: []string{}, Pos: []int32{}, State: []int32{}, Hidden: cfg.Hidden}
	var norms, vecs []byte
	for _, r := range rows {
		for i, norm := range r.Norms {
			w.SeqID, w.Pos, w.State = append(w.SeqID, r.SeqID), append(w.Pos, r.Pos+int32(i)), append(w.State, r.State)
			norms = binary.LittleEndian.AppendUint32(norms, math.Float32bits(norm))
		}
		for _, v := range cfg.DType.AppendFloats(nil, r.Raw) {
			vecs = binary.LittleEndian.AppendUint32(vecs, math.Float32bits(v))
		}
	}
	w.Norm, w.Vec = hex.EncodeToString(norms), hex.EncodeToString(vecs)
	b, err := json.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	for suffix, open := range map[string]func(io.Writer) (rowWriter, error){
		"":       func(out io.Writer) (rowWriter, error) { return statefile.NewWriter(out, cfg) },
		"-plain": func(out io.Writer) (rowWriter, error) { return statefile.NewPlainWriter(out, cfg) },
	} {
		if err := os.WriteFile(name+suffix+".json", b, 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Create(name + suffix + ".parquet")
		if err != nil {
			t.Fatal(err)
		}
		w, err := open(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rows {
			if err := w.Write(r); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// splice joins name.parquet with name-plain.parquet, one after the
// other.
func splice(t *testing.T, name, to string) {
	t.Helper()
	out, err := os.Create(to + ".parquet")
	if err != nil {
		t.Fatal(err)
	}
	w := statefile.NewSplicer(out)
	var rows want
	if b, err := os.ReadFile(name + ".json"); err != nil || json.Unmarshal(b, &rows) != nil {
		t.Fatal(err)
	}
	for _, suffix := range []string{"", "-plain"} {
		b, err := os.ReadFile(name + suffix + ".parquet")
		if err != nil {
			t.Fatal(err)
		}
		f, err := parquet.OpenFile(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			t.Fatal(err)
		}
		for g := range f.Metadata().RowGroups {
			if err := w.Append(statefile.Source{ReaderAt: f, Size: f.Size(), Metadata: f.Metadata()}, g); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := errors.Join(w.Close(), out.Close()); err != nil {
		t.Fatal(err)
	}
	rows.SeqID, rows.Pos, rows.State = slices.Repeat(rows.SeqID, 2), slices.Repeat(rows.Pos, 2), slices.Repeat(rows.State, 2)
	rows.Norm, rows.Vec = strings.Repeat(rows.Norm, 2), strings.Repeat(rows.Vec, 2)
	b, err := json.Marshal(rows)
	if err == nil {
		err = os.WriteFile(to+".json", b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}
