// Package query asks DuckDB about a dataset. It is the only importer of
// DuckDB, which runs inside this process, in memory, and reads the dataset's
// Parquet files where they lie.
//
// [Open] gives SQL one view a table (sequences, tokens, states, drafts, slots,
// rounds, similarity, faults) and, on top of them, one view or table macro a
// published number; views.sql holds their formulas. A table without files is
// an empty view with the right columns, so that a query never depends on what
// has been recorded so far.
//
// The package builds without cgo; Open then fails with [ErrNoDuckDB].
package query

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/draftscope/draftscope/data"
)

// viewsSQL defines the named numbers over the tables.
//
//go:embed views.sql
var viewsSQL string

// Options are the limits of a [DB]. The zero value leaves both to DuckDB: all
// cores and 80 % of the machine's memory.
type Options struct {
	Threads     int    // 0: as many as there are cores
	MemoryLimit string // in DuckDB's words, such as "2GB"; empty: its default
}

// Validate reports every value that is out of range.
func (o Options) Validate() error {
	var errs []error
	if o.Threads < 0 {
		errs = append(errs, fmt.Errorf("threads is %d, want 0 or more", o.Threads))
	}
	if strings.ContainsAny(o.MemoryLimit, "'\\;") {
		errs = append(errs, fmt.Errorf("memory limit %q is no size, want one such as 2GB", o.MemoryLimit))
	}
	return errors.Join(errs...)
}

// Warning names a file that was left out of every answer, and why.
type Warning struct {
	File   string `json:"file"` // relative to the dataset
	Reason string `json:"reason"`
}

func (w Warning) String() string { return w.File + ": " + w.Reason }

// Lines says warnings in few words: files that are whole themselves and left
// out with their group are counted only.
func Lines(warnings []Warning) []string {
	var lines []string
	with := 0
	for _, w := range warnings {
		if strings.HasPrefix(w.Reason, data.WithGroup) {
			with++
		} else {
			lines = append(lines, w.String())
		}
	}
	if with > 0 {
		lines = append(lines, fmt.Sprintf("%d more files of the same groups", with))
	}
	return lines
}

// DB is an open dataset. Its files are those of the moment of [Open], or of
// when a compaction moved some of them since. It is safe for concurrent use.
type DB struct {
	dir      string
	eng      engine
	spill    string
	warnings []Warning
	refused  map[string]string // files that DuckDB does not read, by path, and why

	mu     sync.RWMutex // held for reading by every query
	tables map[string][]file
}

// engine is what a DB needs of DuckDB; see duckdb.go and noduckdb.go.
type engine interface {
	exec(ctx context.Context, sql string) error
	query(ctx context.Context, sql string) (*Rows, error)
	close() error
}

// Open opens the dataset in dir for reading. The content of every Parquet file
// is compared with its digest first, but for the states, of which only the
// footers are tested; a file that fails is left out together with all others
// of its commit, and named in [DB.Warnings]. Unfinished files (*.tmp) are
// ignored.
//
// The error wraps [ErrNoDuckDB] in a program built without cgo,
// [ErrNotDataset] for a directory that holds none, [ErrNoTemp] where DuckDB has
// no place to spill to, and schemas.ErrFormat for a dataset of a newer format
// version.
func Open(ctx context.Context, dir string, opt Options) (*DB, error) {
	if err := opt.Validate(); err != nil {
		return nil, fmt.Errorf("opening dataset %s: %w", dir, err)
	}
	db, err := open(ctx, dir, opt)
	switch {
	case errors.Is(err, ErrNoTemp):
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("opening dataset %s: %w", dir, err)
	}
	return db, nil
}

func open(ctx context.Context, dir string, opt Options) (_ *DB, err error) {
	eng, err := openEngine(ctx)
	if err != nil {
		return nil, err
	}
	db := &DB{eng: eng, refused: map[string]string{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, db.Close())
		}
	}()
	if db.dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	if err := checkFormat(db.dir); err != nil {
		return nil, err
	}
	if db.spill, err = os.MkdirTemp("", "draftscope-query-"); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoTemp, err)
	}
	for _, s := range settings(opt, db.dir, db.spill) {
		if err := eng.exec(ctx, s); err != nil {
			return nil, err
		}
	}
	// A compaction removes files whose rows others hold. It may come again
	// while they are listed, but not for ever.
	err = db.define(ctx)
	for attempt := 0; err != nil && attempt < patience && ctx.Err() == nil && db.moved(); attempt++ {
		err = db.define(ctx)
	}
	return db, err
}

// patience is how often files are listed again that were moved meanwhile.
const patience = 5

// define lists the files and makes the views.
func (db *DB) define(ctx context.Context) (err error) {
	if db.tables, db.warnings, err = listFiles(ctx, db.dir, db.refused); err != nil {
		return err
	}
	if db.refuse(ctx) && !db.moved() {
		if db.tables, db.warnings, err = listFiles(ctx, db.dir, db.refused); err != nil {
			return err
		}
	}
	if err := db.defineTables(ctx); err != nil {
		return err
	}
	// All of them or none: a second try finds none.
	if err := db.eng.exec(ctx, "BEGIN TRANSACTION;\n"+viewsSQL+";\nCOMMIT;"); err != nil {
		return fmt.Errorf("defining the named numbers: %w", err)
	}
	return nil
}

func (db *DB) defineTables(ctx context.Context) error {
	for _, t := range tables {
		if err := db.eng.exec(ctx, t.view(db.tables[t.name])); err != nil {
			return fmt.Errorf("defining view %s: %w", t.name, err)
		}
	}
	return nil
}

// settings shuts DuckDB in: it reads the dataset, spills to one temporary
// folder, fetches nothing, and cannot be talked out of it.
func settings(opt Options, dir, spill string) []string {
	s := []string{
		"SET autoinstall_known_extensions = false",
		"SET autoload_known_extensions = false",
		"SET TimeZone = 'UTC'",
		"SET temp_directory = " + Literal(spill),
		// DuckDB checks a path both as we spell it and as it is.
		"SET allowed_directories = [" + Literal(withSlash(dir)) + ", " + Literal(noPattern.Replace(withSlash(dir))) + "]",
	}
	if opt.Threads > 0 {
		s = append(s, fmt.Sprintf("SET threads = %d", opt.Threads))
	}
	if opt.MemoryLimit != "" {
		s = append(s, "SET memory_limit = "+Literal(opt.MemoryLimit))
	}
	return append(s, "SET enable_external_access = false", "SET lock_configuration = true")
}

func withSlash(dir string) string {
	return strings.TrimSuffix(filepath.ToSlash(dir), "/") + "/"
}

// Literal spells s as a SQL string literal.
func Literal(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// Dir is the absolute path of the dataset.
func (db *DB) Dir() string { return db.dir }

// Warnings names the files that were left out.
func (db *DB) Warnings() []Warning { return db.warnings }

// Query runs one reading statement: a SELECT in any of DuckDB's spellings
// (FROM, WITH, VALUES, SUMMARIZE, DESCRIBE, SHOW), or EXPLAIN of one. Anything
// else, and several statements at once, is refused with [ErrStatement]. An
// error of DuckDB comes as one line. The caller closes the rows.
func (db *DB) Query(ctx context.Context, sql string) (*Rows, error) {
	rows, err := db.ask(ctx, sql)
	for attempt := 0; err != nil && attempt < patience && ctx.Err() == nil && db.moved(); attempt++ {
		if err := db.refresh(ctx); err != nil {
			return nil, fmt.Errorf("listing the files of %s again: %w", db.dir, err)
		}
		rows, err = db.ask(ctx, sql)
	}
	if err != nil && damaged(err) {
		if name := db.culprit(ctx, sql); name != "" {
			return nil, fmt.Errorf("reading %s: the file is damaged; move it away and ask again: %w", name, err)
		}
	}
	return rows, err
}

func (db *DB) ask(ctx context.Context, sql string) (*Rows, error) {
	db.mu.RLock()
	defer db.mu.RUnlock()
	return db.eng.query(ctx, sql)
}

// moved says that a file of the views is gone.
func (db *DB) moved() bool {
	db.mu.RLock()
	defer db.mu.RUnlock()
	for _, files := range db.tables {
		for _, f := range files {
			if _, err := os.Stat(f.path); errors.Is(err, fs.ErrNotExist) {
				return true
			}
		}
	}
	return false
}

// refresh lists the files again and defines the tables anew.
func (db *DB) refresh(ctx context.Context) error {
	found, _, err := listFiles(ctx, db.dir, db.refused)
	if err != nil {
		return err
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	db.tables = found
	return db.defineTables(ctx)
}

// Close releases DuckDB. No Rows may be used afterwards.
func (db *DB) Close() error {
	err := db.eng.close()
	if db.spill != "" {
		err = errors.Join(err, os.RemoveAll(db.spill))
	}
	return err
}
