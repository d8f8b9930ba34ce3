package files

import (
	"archive/zip"
	"encoding/binary"
	"hash/crc32"
	"io"
	"strconv"

	"github.com/draftscope/draftscope/schemas"
)

// ckpt writes a sample of SpecForge: the zip of a torch.save, its members
// stored and aligned as torch does, so that it can map them. rows are all
// states of a DFlash sample; of an EAGLE3 sample, which has the last state
// after the norm, all but that one.
func (w *Writer) ckpt(out io.Writer, row sideRow, rows, normed []byte) error {
	n := len(row.ids)
	mask := make([]int32, n)
	for i, bit := range row.mask {
		if bit {
			mask[i] = 1
		}
	}
	storage := "FloatStorage"
	if w.spec.DType == schemas.BF16 {
		storage = "BFloat16Storage"
	}
	type member struct {
		name string
		data []byte
	}
	var storages []member
	p := &pickler{}
	p.raw(0x80, 2, '}', '(')
	add := func(name, storage string, data []byte, shape ...int) {
		key := strconv.Itoa(len(storages))
		p.text(name)
		p.tensor(storage, key, shape...)
		storages = append(storages, member{"data/" + key, data})
	}
	add("input_ids", "LongStorage", wide(row.ids), n)
	add("loss_mask", "LongStorage", wide(mask), n)
	h, states := w.spec.Hidden, len(w.spec.States)
	if w.format == Eagle3 {
		add("aux_hidden_state", storage, rows, 1, n, (states-1)*h)
		add("hidden_state", storage, normed, 1, n, h)
	} else {
		add("hidden_states", storage, rows, 1, n, states*h)
	}
	p.raw('u', '.')

	count := &counter{out: out}
	z := zip.NewWriter(count)
	members := append([]member{{"data.pkl", p.out}, {"byteorder", []byte("little")}}, storages...)
	for _, m := range append(members, member{"version", []byte("3\n")}) {
		if err := store(z, count, "archive/"+m.name, m.data); err != nil {
			return err
		}
	}
	return z.Close()
}

// counter knows where the next byte goes.
type counter struct {
	out io.Writer
	at  int64
}

// Write implements [io.Writer].
func (c *counter) Write(p []byte) (int, error) {
	n, err := c.out.Write(p)
	c.at += int64(n)
	return n, err
}

// store adds a member whose data begins on a multiple of 64 bytes.
func store(z *zip.Writer, count *counter, name string, data []byte) error {
	const localHeader, alignment = 30, 64
	if err := z.Flush(); err != nil {
		return err
	}
	begins := count.at + localHeader + int64(len(name)) + 4
	pad := int((alignment - begins%alignment) % alignment)
	extra := append([]byte{'F', 'B'}, byte(pad), 0)
	extra = append(extra, make([]byte, pad)...)
	member, err := z.CreateRaw(&zip.FileHeader{
		Name: name, Method: zip.Store, Extra: extra, CRC32: crc32.ChecksumIEEE(data),
		CompressedSize64: uint64(len(data)), UncompressedSize64: uint64(len(data)),
	})
	if err == nil {
		_, err = member.Write(data)
	}
	return err
}

// pickler writes the pickle of a dict of tensors.
type pickler struct{ out []byte }

func (p *pickler) raw(ops ...byte) { p.out = append(p.out, ops...) }

func (p *pickler) text(s string) {
	p.raw('X')
	p.out = binary.LittleEndian.AppendUint32(p.out, uint32(len(s)))
	p.out = append(p.out, s...)
}

func (p *pickler) number(n int) {
	if n < 1<<31 {
		p.raw('J')
		p.out = binary.LittleEndian.AppendUint32(p.out, uint32(n))
		return
	}
	p.raw(0x8a, 8)
	p.out = binary.LittleEndian.AppendUint64(p.out, uint64(n))
}

func (p *pickler) global(module, name string) {
	p.raw('c')
	p.out = append(p.out, module+"\n"+name+"\n"...)
}

func (p *pickler) tensor(storage, key string, shape ...int) {
	stride, n := make([]int, len(shape)), 1
	for i := len(shape) - 1; i >= 0; i-- {
		stride[i] = n
		n *= shape[i]
	}
	tuple := func(ns []int) {
		p.raw('(')
		for _, x := range ns {
			p.number(x)
		}
		p.raw('t')
	}
	p.global("torch._utils", "_rebuild_tensor_v2")
	p.raw('(', '(')
	p.text("storage")
	p.global("torch", storage)
	p.text(key)
	p.text("cpu")
	p.number(n)
	p.raw('t', 'Q')
	p.number(0)
	tuple(shape)
	tuple(stride)
	p.raw(0x89) // needs no gradient
	p.global("collections", "OrderedDict")
	p.raw(')', 'R', 't', 'R')
}
