package data

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Temporary is a file that becomes part of a dataset whole, by [Temporary.Commit],
// or not at all. It needs no dataset open for writing: a lock on the file
// itself says that its writer lives.
type Temporary struct {
	*os.File
	unlock func() error
}

// CreateTemporary starts a file in a folder of a dataset, which is made where
// it is missing, and removes what dead processes left there.
func CreateTemporary(folder string) (*Temporary, error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, fmt.Errorf("creating folder %s: %w", folder, err)
	}
	if err := sweepTemporaries(folder, os.Remove); err != nil {
		return nil, err
	}
	for {
		f, err := os.CreateTemp(folder, "*"+tmpSuffix)
		if err != nil {
			return nil, fmt.Errorf("creating a file in %s: %w", folder, err)
		}
		unlock, err := lock(f.Name())
		if err == nil && named(f) {
			return &Temporary{f, unlock}, nil
		}
		if err == nil { // another process swept it before it was locked
			err = unlock()
		}
		if err = errors.Join(err, f.Close()); err != nil && !errors.Is(err, ErrLocked) {
			return nil, fmt.Errorf("creating a file in %s: %w", folder, err)
		}
	}
}

// named says that a file still bears its name.
func named(f *os.File) bool {
	a, errA := f.Stat()
	b, errB := os.Stat(f.Name())
	return errA == nil && errB == nil && os.SameFile(a, b)
}

// Commit makes the file durable and gives it its name.
func (t *Temporary) Commit(path string) error {
	err := t.Sync()
	if err = errors.Join(err, t.Chmod(0o644), t.Close()); err == nil {
		err = os.Rename(t.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("writing %s: %w", path, err), os.Remove(t.Name()), t.unlock())
	}
	return t.unlock()
}

// Abort removes the file.
func (t *Temporary) Abort() error {
	return errors.Join(t.Close(), os.Remove(t.Name()), t.unlock())
}

// sweepTemporaries removes the temporaries of a folder that no process holds.
func sweepTemporaries(folder string, remove func(path string) error) error {
	entries, err := os.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("listing %s: %w", folder, err)
	}
	for _, e := range entries {
		path := filepath.Join(folder, e.Name())
		if filepath.Ext(path) != tmpSuffix || !e.Type().IsRegular() || !exists(path) {
			continue
		}
		unlock, err := lock(path)
		if errors.Is(err, ErrLocked) || errors.Is(err, fs.ErrPermission) {
			continue // its writer lives, or is another user
		}
		if err != nil {
			return err
		}
		if err := remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errors.Join(fmt.Errorf("removing unfinished %s: %w", path, err), unlock())
		}
		if err := unlock(); err != nil {
			return err
		}
	}
	return nil
}
