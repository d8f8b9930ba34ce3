package similar

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/compress/zstd"
)

// Writer writes the rows of one pair of runs to a dataset's table similarity.
// The file appears whole on Close, in place of one of the same pair, or not at
// all.
type Writer struct {
	path string
	file *data.Temporary
	w    *parquet.GenericWriter[schemas.Similarity]
}

// Create starts the file of a pair of runs in the dataset in dir.
func Create(dir, runA, runB string) (*Writer, error) {
	folder := filepath.Join(dir, schemas.TableSimilarity)
	f, err := data.CreateTemporary(folder)
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
	if err := w.w.Close(); err != nil {
		return "", errors.Join(fmt.Errorf("writing %s: %w", w.path, err), w.file.Abort())
	}
	return w.path, w.file.Commit(w.path)
}

// Abort removes what was written.
func (w *Writer) Abort() error { return w.file.Abort() }
