package similar

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/compress/zstd"
)

// Writer writes the rows of one pair of runs to a dataset's table similarity.
// The file appears whole on Close, in place of one of the same pair, or not at
// all.
type Writer struct {
	path string
	file *os.File
	w    *parquet.GenericWriter[schemas.Similarity]
}

// Create starts the file of a pair of runs in the dataset in dir.
func Create(dir, runA, runB string) (*Writer, error) {
	folder := filepath.Join(dir, schemas.TableSimilarity)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, fmt.Errorf("writing similarities: %w", err)
	}
	f, err := os.CreateTemp(folder, "*.tmp")
	if err != nil {
		return nil, fmt.Errorf("writing similarities: %w", err)
	}
	w := parquet.NewGenericWriter[schemas.Similarity](f, parquet.Compression(&zstd.Codec{}))
	return &Writer{path: filepath.Join(folder, fileName(runA)+"--"+fileName(runB)+".parquet"), file: f, w: w}, nil
}

// fileName keeps a run's label usable in a path.
func fileName(label string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune(`/\:=`, r) {
			return '_'
		}
		return r
	}, label)
}

// Write adds rows.
func (w *Writer) Write(rows []schemas.Similarity) error {
	if _, err := w.w.Write(rows); err != nil {
		return fmt.Errorf("writing similarities: %w", err)
	}
	return nil
}

// Close finishes the file and gives it its name, which it returns.
func (w *Writer) Close() (path string, err error) {
	err = w.w.Close()
	if err == nil {
		err = w.file.Sync()
	}
	err = errors.Join(err, w.file.Chmod(0o644), w.file.Close())
	if err == nil {
		err = os.Rename(w.file.Name(), w.path)
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("writing %s: %w", w.path, err), os.Remove(w.file.Name()))
	}
	return w.path, nil
}

// Abort removes what was written.
func (w *Writer) Abort() error {
	return errors.Join(w.file.Close(), os.Remove(w.file.Name()))
}
