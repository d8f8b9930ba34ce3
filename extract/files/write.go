package files

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/schemas"
)

// Writer writes sequences as another system stores them: vllm and speculators
// with all of the capture's states in ascending order, specforge as its DFlash
// samples, specforge-eagle3 as its EAGLE3 samples. Files appear whole or not at
// all.
type Writer struct {
	format string
	dir    string
	spec   schemas.CaptureSpec
	target *target.Model
	n      int
	side   []sideRow
}

// NewWriter writes into dir, which must be empty or missing: two exports in
// one folder could not be told apart. EAGLE3 samples have the last state after
// the final norm, and so need the target; other formats do not use it.
func NewWriter(format, dir string, spec schemas.CaptureSpec, m *target.Model) (*Writer, error) {
	n := len(spec.States)
	last := n > 0 && spec.States[n-1] == spec.Layers
	switch format {
	case VLLM, SpecForge:
	case Speculators:
		if !last {
			return nil, fmt.Errorf("%w: speculators reads state %d, the last one, in the last slot, and the run has %v", ErrConfig, spec.Layers, spec.States)
		}
	case Eagle3:
		switch {
		case !last || n != 4:
			return nil, fmt.Errorf("%w: an EAGLE3 sample of SpecForge has three states and state %d, the last one, and there are %v; choose with --states", ErrConfig, spec.Layers, spec.States)
		case m == nil:
			return nil, fmt.Errorf("%w: an EAGLE3 sample has the last state after the final norm, which is the target's; give --target", ErrConfig)
		case m.Config().Hidden != spec.Hidden || m.Config().Layers != spec.Layers:
			return nil, fmt.Errorf("%w: the target has %d layers of %d values, and the run is of a model with %d of %d", ErrConfig, m.Config().Layers, m.Config().Hidden, spec.Layers, spec.Hidden)
		}
	default:
		return nil, fmt.Errorf("%w: format %q; %s, %s, %s and %s are written", ErrConfig, format, VLLM, Speculators, SpecForge, Eagle3)
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) > 0 {
		err = fmt.Errorf("%w: %s is not empty", ErrConfig, dir)
	}
	return &Writer{format: format, dir: dir, spec: spec, target: m}, err
}

// Written is the number of sequences so far.
func (w *Writer) Written() int { return w.n }

// Write writes one sequence. states has, for each state of the run, one row a
// token.
func (w *Writer) Write(id string, tokens []schemas.Token, states [][]byte) error {
	width := w.spec.Hidden * w.spec.DType.Size()
	if len(states) != len(w.spec.States) || slices.ContainsFunc(states, func(raw []byte) bool { return len(raw) != len(tokens)*width }) {
		return fmt.Errorf("writing %s: %w: %d tokens and %d states that do not fit together", id, ErrFormat, len(tokens), len(states))
	}
	var normed []byte
	if w.format == Eagle3 {
		var err error
		if normed, err = w.normed(states[len(states)-1]); err != nil {
			return fmt.Errorf("writing %s: %w", id, err)
		}
		states = states[:len(states)-1]
	}
	// [tokens][states][hidden]: the rows of all states side by side.
	rows := make([]byte, 0, len(tokens)*len(states)*width)
	row := sideRow{}
	for r, t := range tokens {
		for _, raw := range states {
			rows = append(rows, raw[r*width:(r+1)*width]...)
		}
		row.ids, row.mask = append(row.ids, t.TokenID), append(row.mask, t.LossMask)
	}
	var err error
	switch w.format {
	case VLLM:
		err = w.requestFile(id+".safetensors", row.ids, rows)
	case Speculators:
		err = w.requestFile(filepath.Join("hidden_states", fmt.Sprintf("hs_%d.safetensors", w.n)), row.ids, rows)
		w.side = append(w.side, row)
	case SpecForge, Eagle3:
		group := w.n / 2000 * 2000
		name := filepath.Join(fmt.Sprintf("rows_%d-%d", group, group+2000), fmt.Sprintf("data_%d.ckpt", w.n))
		err = w.file(name, func(out io.Writer) error { return w.ckpt(out, row, rows, normed) })
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", id, err)
	}
	w.n++
	return nil
}

// normed applies the target's final norm to rows of the last state, in its
// arithmetic, and rounds the results once.
func (w *Writer) normed(rows []byte) ([]byte, error) {
	const most = 512 // rows at a time
	dtype, h := w.spec.DType, w.spec.Hidden
	dev := w.target.Device()
	buf, err := dev.New(most * h)
	if err != nil {
		return nil, fmt.Errorf("allocating rows for the final norm: %w", err)
	}
	defer buf.Close()
	out := make([]byte, 0, len(rows))
	for part := range slices.Chunk(dtype.AppendFloats(nil, rows), most*h) {
		x := cuda.Matrix(buf, len(part)/h, h)
		if err := dev.Upload(x, part); err != nil {
			return nil, fmt.Errorf("applying the final norm: %w", err)
		}
		y, err := w.target.Normed(x)
		if err == nil {
			err = dev.Download(part, y)
		}
		if err != nil {
			return nil, fmt.Errorf("applying the final norm: %w", err)
		}
		out = dtype.AppendBytes(out, part)
	}
	return out, nil
}

// Close writes what belongs to all sequences together.
func (w *Writer) Close() error {
	if w.format != Speculators || len(w.side) == 0 {
		return nil
	}
	return w.sideSet()
}

// file writes a file under a name of its own, syncs it, and gives it its name.
func (w *Writer) file(name string, write func(out io.Writer) error) error {
	path := filepath.Join(w.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}
	f, err := os.Create(path + ".tmp")
	if err != nil {
		return err
	}
	if err := errors.Join(write(f), f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(path+".tmp"))
	}
	return os.Rename(path+".tmp", path)
}

// requestFile writes vLLM's file of a request.
func (w *Writer) requestFile(name string, ids []int32, rows []byte) error {
	dtype := map[schemas.DType]string{schemas.F32: "F32", schemas.BF16: "BF16"}[w.spec.DType]
	idBytes := wide(ids)
	type info struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	header, err := json.Marshal(map[string]info{
		tensorStates: {dtype, []int{len(ids), len(w.spec.States), w.spec.Hidden}, [2]int{0, len(rows)}},
		tensorIDs:    {"I64", []int{len(ids)}, [2]int{len(rows), len(rows) + len(idBytes)}},
	})
	if err != nil {
		return err
	}
	for len(header)%8 != 0 {
		header = append(header, ' ')
	}
	return w.file(name, func(out io.Writer) error {
		for _, part := range [][]byte{binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header, rows, idBytes} {
			if _, err := out.Write(part); err != nil {
				return err
			}
		}
		return nil
	})
}

// wide is ids as little-endian int64.
func wide(ids []int32) []byte {
	out := make([]byte, 0, 8*len(ids))
	for _, id := range ids {
		out = binary.LittleEndian.AppendUint64(out, uint64(id))
	}
	return out
}
