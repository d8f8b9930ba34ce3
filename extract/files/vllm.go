package files

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/draftscope/draftscope/extract/probe"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/schemas"
)

// vLLM's ExampleHiddenStatesConnector writes one file a request, with
// hidden_states [tokens, layers, hidden] and token_ids [tokens]. Layer id c is
// the residual stream after c layers, before the final norm, as ours; which
// ids stand in the slots is not in the file.

const (
	tensorStates = "hidden_states"
	tensorIDs    = "token_ids"
	// tensorAttended is not vLLM's; who batches with padding adds it.
	tensorAttended = "attention_mask"
)

func openVLLM(fsys fs.FS) (*Reader, error) {
	names, err := find(fsys, func(name string) bool { return strings.HasSuffix(name, ".safetensors") })
	if err != nil {
		return nil, fmt.Errorf("looking for *.safetensors: %w", err)
	}
	r := &Reader{}
	for _, name := range names {
		r.samples = append(r.samples, lazy{idOf(name), name, func() (*Sample, error) { return readStates(fsys, name) }})
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%w: there is no *.safetensors", ErrFormat)
	}
	return r, nil
}

// readStates reads a file of one request.
func readStates(fsys fs.FS, name string) (_ *Sample, err error) {
	if err := checkFile(fsys, name); err != nil {
		return nil, err
	}
	ckpt, err := safetensors.OpenFile(fsys, name)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, ckpt.Close())
		}
	}()
	states, ok := ckpt.Info(tensorStates)
	if !ok || len(states.Shape) != 3 {
		return nil, badFile(name, "it has no %s [tokens, layers, hidden]", tensorStates)
	}
	ids, ok := ckpt.Info(tensorIDs)
	if !ok || len(ids.Shape) != 1 {
		return nil, badFile(name, "it has no %s [tokens]", tensorIDs)
	}
	format, ok := probe.FormatOf(strings.ToLower(string(states.DType)))
	if !ok && !E4M3(states) {
		return nil, badFile(name, "%s is %s; bf16, f16, f32, and F8_E4M3 with %s are read", tensorStates, states.DType, tensorStates+scaleSuffix)
	}
	s := &Sample{
		ID: idOf(name), File: name, Rows: states.Shape[0], Slots: states.Shape[1], Hidden: states.Shape[2], Format: format, release: ckpt.Close,
	}
	if E4M3(states) {
		var vals []float32
		if vals, s.Error, err = FromE4M3(ckpt, tensorStates, s.Rows, s.Slots); err != nil {
			return nil, fmt.Errorf("reading %s: %w", name, err)
		}
		s.Format, _ = probe.FormatOf("f32")
		s.States = schemas.F32.AppendBytes(nil, vals)
	} else if s.States, err = ckpt.Raw(tensorStates); err != nil {
		return nil, err
	}
	raw, err := ckpt.Raw(tensorIDs)
	if err != nil {
		return nil, err
	}
	if s.IDs, err = readIDs(string(ids.DType), raw); err != nil {
		return nil, badFile(name, "%s: %v", tensorIDs, err)
	}
	if mask, ok := ckpt.Info(tensorAttended); ok {
		if raw, err = ckpt.Raw(tensorAttended); err != nil {
			return nil, err
		}
		if s.Attended, err = readIDs(string(mask.DType), raw); err != nil {
			return nil, badFile(name, "%s: %v", tensorAttended, err)
		}
	}
	return s, s.check()
}

// readIDs reads token ids of a safetensors dtype.
func readIDs(dtype string, raw []byte) ([]int32, error) {
	var out []int32
	switch dtype {
	case "I64":
		for i := 0; i+8 <= len(raw); i += 8 {
			v := int64(binary.LittleEndian.Uint64(raw[i:]))
			if v < 0 || v >= 1<<31 {
				return nil, fmt.Errorf("token %d at %d", v, i/8)
			}
			out = append(out, int32(v))
		}
	case "I32":
		for i := 0; i+4 <= len(raw); i += 4 {
			out = append(out, int32(binary.LittleEndian.Uint32(raw[i:])))
		}
	default:
		return nil, fmt.Errorf("dtype %s; I64 and I32 are read", dtype)
	}
	return out, nil
}

// speculators stores vLLM's files as hidden_states/hs_{row}.safetensors, the
// last slot being state n, and ids and masks in an Arrow data set beside them,
// joined by nothing but the row's number.

func openSpeculators(fsys fs.FS) (*Reader, error) {
	side, err := readSideSet(fsys)
	if err != nil {
		return nil, err
	}
	names, err := find(fsys, func(name string) bool {
		return strings.HasPrefix(name, "hs_") && strings.HasSuffix(name, ".safetensors")
	})
	if err != nil || len(names) == 0 {
		return nil, errors.Join(fmt.Errorf("%w: there is no hs_*.safetensors", ErrFormat), err)
	}
	r := &Reader{}
	if lost := withoutFile(names, len(side)); len(lost) > 0 {
		name := lost[0]
		r.samples = append(r.samples, lazy{idOf(name), name, func() (*Sample, error) {
			return nil, badFile(name, "a row of the data set has no hidden states, as there is no such file (so it is with %d of its %d rows)", len(lost), len(side))
		}})
	}
	for _, name := range names {
		r.samples = append(r.samples, lazy{idOf(path.Base(name)), name, func() (*Sample, error) {
			row, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(path.Base(name), "hs_"), ".safetensors"))
			if err != nil || row < 0 || row >= len(side) {
				return nil, badFile(name, "the data set beside it has %d rows", len(side))
			}
			s, err := readStates(fsys, name)
			if err != nil {
				return nil, err
			}
			s.ID = idOf(path.Base(name))
			// The two are joined by number alone: a data set that was filtered
			// again belongs to other files.
			if !slices.Equal(side[row].ids, s.IDs) {
				at := 0
				for at < min(len(s.IDs), len(side[row].ids)) && s.IDs[at] == side[row].ids[at] {
					at++
				}
				return nil, errors.Join(badFile(name, "ids differ at %d: it has %d ids, row %d of the data set %d, and they are not the same text", at, len(s.IDs), row, len(side[row].ids)), s.Close())
			}
			s.Mask = side[row].mask
			return s, nil
		}})
	}
	return r, nil
}

// withoutFile names the files that rows of a data set should have.
func withoutFile(names []string, rows int) (lost []string) {
	have := map[string]bool{}
	for _, name := range names {
		have[path.Base(name)] = true
	}
	for row := range rows {
		if name := fmt.Sprintf("hs_%d.safetensors", row); !have[name] {
			lost = append(lost, name)
		}
	}
	return lost
}

type sideRow struct {
	ids  []int32
	mask []bool
}

// readSideSet reads the columns input_ids and loss_mask of data-*.arrow, in
// the order of the files' names.
func readSideSet(fsys fs.FS) ([]sideRow, error) {
	names, err := find(fsys, func(name string) bool { return strings.HasSuffix(name, ".arrow") })
	if err != nil || len(names) == 0 {
		return nil, errors.Join(fmt.Errorf("%w: there is no data-*.arrow, which holds the loss masks", ErrFormat), err)
	}
	var out []sideRow
	for _, name := range names {
		if err := checkFile(fsys, name); err != nil {
			return nil, err
		}
		if out, err = readArrow(fsys, name, out); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func readArrow(fsys fs.FS, name string, out []sideRow) (_ []sideRow, err error) {
	// The library panics on some damaged files.
	defer func() {
		if p := recover(); p != nil {
			err = badFile(name, "damaged: %v", p)
		}
	}()
	f, err := fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r, err := ipc.NewReader(f)
	if err != nil {
		return nil, badFile(name, "%v", err)
	}
	defer r.Release()
	find := func(column string) (int, error) {
		i := r.Schema().FieldIndices(column)
		if len(i) != 1 {
			return 0, badFile(name, "it has no column %s", column)
		}
		return i[0], nil
	}
	ids, err := find("input_ids")
	if err != nil {
		return nil, err
	}
	mask, err := find("loss_mask")
	if err != nil {
		return nil, err
	}
	for r.Next() {
		rec := r.Record()
		for row := range int(rec.NumRows()) {
			var s sideRow
			if s.ids, err = listAt(rec.Column(ids), row); err != nil {
				return nil, badFile(name, "input_ids: %v", err)
			}
			bits, err := listAt(rec.Column(mask), row)
			if err != nil {
				return nil, badFile(name, "loss_mask: %v", err)
			}
			for i, bit := range bits {
				if bit != 0 && bit != 1 {
					return nil, badFile(name, "loss_mask[%d] of row %d is %d; want 0 or 1", i, len(out), bit)
				}
				s.mask = append(s.mask, bit == 1)
			}
			out = append(out, s)
		}
	}
	if err := r.Err(); err != nil && !errors.Is(err, io.EOF) {
		return nil, badFile(name, "%v", err)
	}
	return out, nil
}

// listAt is a list of whole numbers or of bits.
func listAt(col arrow.Array, row int) ([]int32, error) {
	list, ok := col.(array.ListLike)
	if !ok || col.IsNull(row) {
		return nil, fmt.Errorf("a %s, want a list", col.DataType())
	}
	lo, hi := list.ValueOffsets(row)
	out := make([]int32, 0, hi-lo)
	for i := int(lo); i < int(hi); i++ {
		switch v := list.ListValues().(type) {
		case *array.Int64:
			out = append(out, int32(v.Value(i)))
		case *array.Int32:
			out = append(out, v.Value(i))
		case *array.Int8:
			out = append(out, int32(v.Value(i)))
		case *array.Uint8:
			out = append(out, int32(v.Value(i)))
		case *array.Boolean:
			out = append(out, 0)
			if v.Value(i) {
				out[len(out)-1] = 1
			}
		default:
			return nil, fmt.Errorf("a list of %s, want whole numbers", v.DataType())
		}
	}
	return out, nil
}
