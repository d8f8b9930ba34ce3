package demo

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
)

// Unpack is fsys with every file NAME.zst also readable as NAME. Contents are
// decompressed once and kept.
func Unpack(fsys fs.FS) fs.FS {
	return &unpacked{fsys: fsys, cache: map[string][]byte{}}
}

type unpacked struct {
	fsys  fs.FS
	mu    sync.Mutex
	cache map[string][]byte
}

// Open opens a file under its uncompressed name.
func (u *unpacked) Open(name string) (fs.File, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	data, ok := u.cache[name]
	if !ok {
		packed, err := fs.ReadFile(u.fsys, name+".zst")
		if err != nil {
			return u.fsys.Open(name) // a folder, or a file that is not packed
		}
		dec, err := zstd.NewReader(nil)
		if err != nil {
			return nil, fmt.Errorf("unpacking %s: %w", name, err)
		}
		defer dec.Close()
		if data, err = dec.DecodeAll(packed, nil); err != nil {
			return nil, fmt.Errorf("unpacking %s: %w", name, err)
		}
		u.cache[name] = data
	}
	return &file{Reader: bytes.NewReader(data), name: name, data: data}, nil
}

type file struct {
	*bytes.Reader
	name string
	data []byte
}

// Bytes is the whole content, to be read only; it saves readers a copy.
func (f *file) Bytes() []byte              { return f.data }
func (f *file) Close() error               { return nil }
func (f *file) Stat() (fs.FileInfo, error) { return info{f}, nil }

var _ io.ReaderAt = (*file)(nil)

type info struct{ f *file }

func (i info) Name() string       { return i.f.name }
func (i info) Size() int64        { return int64(len(i.f.data)) }
func (i info) Mode() fs.FileMode  { return 0o444 }
func (i info) ModTime() time.Time { return time.Time{} }
func (i info) IsDir() bool        { return false }
func (i info) Sys() any           { return nil }
