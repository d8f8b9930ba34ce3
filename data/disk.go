package data

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// tmpSuffix ends the name of every file that is not complete yet. No reader's
// *.parquet matches it.
const tmpSuffix = ".tmp"

// disk is what the package asks of a file system when it writes. Tests put
// faults into it.
type disk interface {
	Create(name string) (diskFile, error)
	Rename(from, to string) error
	Remove(name string) error
	Mkdir(name string) error
	SyncDir(name string) error
}

type diskFile interface {
	io.WriteCloser
	Sync() error
}

type osDisk struct{}

func (osDisk) Create(name string) (diskFile, error) {
	return os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
}
func (osDisk) Rename(from, to string) error { return os.Rename(from, to) }
func (osDisk) Remove(name string) error     { return os.Remove(name) }
func (osDisk) Mkdir(name string) error      { return os.Mkdir(name, 0o755) }

func (osDisk) SyncDir(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// makeDir creates dir and its missing parents, and makes their names durable.
func makeDir(d disk, dir string) error {
	info, err := os.Stat(dir)
	if err == nil {
		if !info.IsDir() {
			return fmt.Errorf("creating folder %s: there is a file of this name", dir)
		}
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("creating folder %s: %w", dir, err)
	}
	parent := filepath.Dir(dir)
	if parent != dir {
		if err := makeDir(d, parent); err != nil {
			return err
		}
	}
	if err := d.Mkdir(dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return writeError(dir, err)
	}
	if err := d.SyncDir(parent); err != nil {
		return writeError(parent, err)
	}
	return nil
}

// replaceFile puts content at path, whole or not at all.
func replaceFile(d disk, path string, content []byte) error {
	tmp := path + tmpSuffix
	f, err := d.Create(tmp)
	if err != nil {
		return writeError(path, err)
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = d.Rename(tmp, path)
	}
	if err != nil {
		_ = d.Remove(tmp) // as far as possible: the next writer removes it too
		return writeError(path, err)
	}
	if err := d.SyncDir(filepath.Dir(path)); err != nil {
		return writeError(path, err)
	}
	return nil
}

// writeError names the file and says what can be done.
func writeError(path string, err error) error {
	remedy := "check the folder and its permissions"
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		remedy = "free space there, or choose another --out folder"
	}
	return fmt.Errorf("writing %s: %w; %s and run the same command again: what was committed is kept", path, err, remedy)
}
