package files

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"

	"github.com/draftscope/draftscope/extract/probe"
)

// DeepSpec (DeepSeek) stores a manifest.json, records of 56 bytes in
// samples.idx, and shards. Layer id v of its manifest is the output of the
// 0-based layer v, -1 the embedding: state v+1. The last hidden state is
// stored after the final norm.

type deepManifest struct {
	Version   int    `json:"version"`
	Samples   int    `json:"num_samples"`
	Layers    []int  `json:"target_layer_ids"`
	Hidden    int    `json:"hidden_size"`
	HiddenTyp string `json:"hidden_dtype"`
	TokenTyp  string `json:"token_dtype"`
	Record    int    `json:"index_record_size"`
}

const deepRecord = 56

func openDeepSpec(fsys fs.FS) (*Reader, error) {
	raw, err := readFile(fsys, "manifest.json")
	if err != nil {
		return nil, err
	}
	var m deepManifest
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, badFile("manifest.json", "%v", err)
	}
	switch {
	case m.Version != 2:
		return nil, badFile("manifest.json", "version %d; 2 is read", m.Version)
	case m.Record != deepRecord:
		return nil, badFile("manifest.json", "index records of %d bytes; %d are read", m.Record, deepRecord)
	case m.Hidden < 1 || m.Hidden > 1<<20 || len(m.Layers) == 0 || len(m.Layers) > 1<<12:
		return nil, badFile("manifest.json", "%d layers of %d values", len(m.Layers), m.Hidden)
	}
	format, ok := probe.FormatOf(shortDType(m.HiddenTyp))
	if !ok {
		return nil, badFile("manifest.json", "hidden_dtype %q; bfloat16, float16 and float32 are read", m.HiddenTyp)
	}
	index, err := readFile(fsys, "samples.idx")
	if err != nil {
		return nil, err
	}
	if len(index) != m.Samples*deepRecord {
		return nil, badFile("samples.idx", "%d bytes for %d samples of %d", len(index), m.Samples, deepRecord)
	}
	r := &Reader{}
	for _, v := range m.Layers {
		r.States = append(r.States, v+1)
	}
	for i := range m.Samples {
		rec := index[i*deepRecord : (i+1)*deepRecord]
		id := fmt.Sprintf("sample-%d", binary.LittleEndian.Uint64(rec))
		file := fmt.Sprintf("shard-%05d.bin", binary.LittleEndian.Uint32(rec[8:]))
		r.samples = append(r.samples, lazy{id, file, func() (*Sample, error) {
			s, err := m.read(fsys, file, rec, format)
			if err != nil {
				return nil, err
			}
			s.ID = id
			return s, s.check()
		}})
	}
	return r, nil
}

// shortDType turns a name such as torch.bfloat16 into ours.
func shortDType(name string) string {
	switch path.Ext("." + name) {
	case ".bfloat16", ".bf16":
		return "bf16"
	case ".float16", ".half", ".f16":
		return "f16"
	case ".float32", ".float", ".f32":
		return "f32"
	}
	return name
}

// read reads one sample of a shard: ids i32, attention mask u8, loss mask u8,
// states, and the last state, each at an offset of its own.
func (m deepManifest) read(fsys fs.FS, file string, rec []byte, format probe.Format) (_ *Sample, err error) {
	if err := checkFile(fsys, file); err != nil {
		return nil, err
	}
	f, err := fsys.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	at, ok := f.(io.ReaderAt)
	st, err := f.Stat()
	if err != nil || !ok {
		return nil, errors.Join(badFile(file, "it cannot be read at offsets"), err)
	}
	length := int64(binary.LittleEndian.Uint32(rec[12:]))
	piece := func(i int, size int64) ([]byte, error) {
		off := binary.LittleEndian.Uint64(rec[16+8*i:])
		if off > uint64(st.Size()) || size > st.Size()-int64(off) {
			return nil, badFile(file, "%d bytes at %d of a file of %d", size, off, st.Size())
		}
		raw := make([]byte, size)
		_, err := at.ReadAt(raw, int64(off))
		return raw, err
	}
	width := int64(m.Hidden * format.Size)
	s := &Sample{File: file, Rows: int(length), Hidden: m.Hidden, Slots: len(m.Layers), Format: format}
	ids, err := piece(0, 4*length)
	if err != nil {
		return nil, err
	}
	if s.IDs, err = readIDs("I32", ids); err != nil {
		return nil, err
	}
	attended, err := piece(1, length)
	if err != nil {
		return nil, err
	}
	mask, err := piece(2, length)
	if err != nil {
		return nil, err
	}
	for i := range mask {
		if attended[i] != 1 || mask[i] > 1 {
			return nil, badFile(file, "token %d has attention mask %d and loss mask %d; padding is not read", i, attended[i], mask[i])
		}
		s.Mask = append(s.Mask, mask[i] == 1)
	}
	if s.States, err = piece(3, length*width*int64(len(m.Layers))); err != nil {
		return nil, err
	}
	s.Normed, err = piece(4, length*width)
	return s, err
}
