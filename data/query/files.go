package query

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/parquet-go/parquet-go"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/schemas"
)

// file is one readable Parquet file of a table.
type file struct {
	path       string   // absolute
	partitions []string // values of the table's partitions
	missing    []string // columns of the table that the file lacks
}

const (
	manifestName = "dataset.json"
	keyFormat    = "draftscope.format" // in a file's footer
)

// checkFormat refuses a directory that is no dataset, or of a newer format.
func checkFormat(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%w: it is a file; name the directory that holds %s", ErrNotDataset, manifestName)
	}
	raw, err := os.ReadFile(filepath.Join(dir, manifestName))
	if errors.Is(err, fs.ErrNotExist) {
		for _, t := range tables {
			if _, err := os.Stat(filepath.Join(dir, t.name)); err == nil {
				return nil // the files explain themselves
			}
		}
		return fmt.Errorf("%w: it holds neither %s nor a table", ErrNotDataset, manifestName)
	}
	if err != nil {
		return err
	}
	var manifest struct {
		FormatVersion int `json:"format_version"`
	}
	if err := json.Unmarshal(raw, &manifest); err == nil && manifest.FormatVersion > schemas.FormatVersion {
		return fmt.Errorf("%s: %w", manifestName, newerFormat(strconv.Itoa(manifest.FormatVersion)))
	}
	// What no other command reads is not asked either.
	if _, err := data.Open(dir); err != nil {
		return errors.Unwrap(err) // who calls names the folder
	}
	return nil
}

func newerFormat(got string) error {
	return fmt.Errorf("%w: it has format %s, this program reads %d; use the program that wrote it or a newer one",
		schemas.ErrFormat, got, schemas.FormatVersion)
}

// listFiles finds the Parquet files of every table that count, and tests the
// columns of each.
func listFiles(ctx context.Context, dir string, refused map[string]string) (found map[string][]file, warnings []Warning, err error) {
	for range patience {
		var moved bool
		if found, warnings, moved, err = listOnce(ctx, dir, refused); err != nil || !moved {
			break
		}
	}
	return found, warnings, err
}

// listOnce also says whether a file went while it was looked at.
func listOnce(ctx context.Context, dir string, refused map[string]string) (_ map[string][]file, _ []Warning, moved bool, _ error) {
	found := make(map[string][]file)
	var warnings []Warning
	warn := func(path, reason string) {
		rel, _ := filepath.Rel(dir, path)
		warnings = append(warnings, Warning{File: filepath.ToSlash(rel), Reason: oneLine(reason)})
	}
	again := false // some file is refused: its whole commit must not count
	inv, err := data.TakeBut(ctx, dir, refused)
	if err != nil {
		return nil, nil, false, err
	}
	for _, f := range inv.LeftOut {
		warn(f.Path, f.Reason)
	}
	for _, t := range tables {
		for _, path := range inv.Files[t.name] {
			f, err := t.open(filepath.Join(dir, t.name), path)
			if err != nil {
				gone := errors.Is(err, fs.ErrNotExist)
				moved = moved || gone
				if !gone && refused[path] == "" {
					refused[path], again = err.Error(), true
				}
				warn(path, err.Error())
				continue
			}
			found[t.name] = append(found[t.name], f)
		}
	}
	if again {
		return listOnce(ctx, dir, refused)
	}
	slices.SortStableFunc(warnings, func(a, b Warning) int { return strings.Compare(a.File, b.File) })
	return found, warnings, moved, nil
}

// open tests the footer of one file and reads its partitions off its path.
func (t table) open(root, name string) (f file, err error) {
	defer func() { // a spoilt footer may name a column of a type that has no physical one
		if r := recover(); r != nil {
			err = fmt.Errorf("reading its footer: %v", r)
		}
	}()
	f.path = name
	rel, err := filepath.Rel(root, name)
	if err != nil {
		return f, err
	}
	if f.partitions, err = t.partitionValues(filepath.ToSlash(rel)); err != nil {
		return f, err
	}
	footer, err := openFooter(name)
	if err != nil {
		return f, err
	}
	if v, ok := footer.Lookup(keyFormat); ok {
		if n, err := strconv.Atoi(v); err != nil || n > schemas.FormatVersion {
			return f, newerFormat(v)
		}
	}
	got := physicalTypes(footer.Schema())
	for _, c := range t.columns {
		kind, ok := got[c.name]
		switch {
		case !ok && c.nullable:
			f.missing = append(f.missing, c.name)
		case !ok:
			return f, fmt.Errorf("column %s is missing", c.name)
		case kind != c.physical:
			return f, fmt.Errorf("column %s holds %s, want %s", c.name, kind, c.physical)
		}
	}
	return f, nil
}

// partitionValues reads "run=R/drafter=D/part.parquet". Values are unescaped
// as in a URL path, which is how Hive writes a slash or a percent sign.
func (t table) partitionValues(rel string) ([]string, error) {
	dirs := strings.Split(rel, "/")
	dirs = dirs[:len(dirs)-1]
	if len(dirs) < len(t.partitions) {
		return nil, fmt.Errorf("it lies outside %s=…", strings.Join(t.partitions, "=…/"))
	}
	values := make([]string, len(t.partitions))
	for i, key := range t.partitions {
		name, value, ok := strings.Cut(dirs[i], "=")
		if !ok || name != key {
			return nil, fmt.Errorf("its folder is %s, want %s=…", dirs[i], key)
		}
		value, err := url.PathUnescape(value)
		if err != nil {
			return nil, fmt.Errorf("its folder is %s: %w", dirs[i], err)
		}
		values[i] = value
	}
	return values, nil
}

// openFooter reads the footer alone. A hostile footer may panic the decoder;
// that is an error like any other.
func openFooter(path string) (footer *parquet.File, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("reading its footer: %v", r)
		}
	}()
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	const smallest = 12 // two magics and a length
	if info.Size() < smallest {
		return nil, fmt.Errorf("%d bytes are no Parquet file", info.Size())
	}
	footer, err = parquet.OpenFile(f, info.Size(), parquet.SkipPageIndex(true), parquet.SkipBloomFilters(true))
	if err != nil {
		return nil, fmt.Errorf("reading its footer: %w", err)
	}
	if footer.NumRows() < 0 {
		return nil, fmt.Errorf("its footer counts %d rows", footer.NumRows())
	}
	return footer, nil
}

// damaged says whether an error of DuckDB may come from a file's pages, which
// no footer vouches for. DuckDB does not say from which file.
func damaged(err error) bool {
	msg := err.Error()
	for _, kind := range []string{"Invalid Error", "IO Error", "Internal Error", "Serialization Error"} {
		if strings.HasPrefix(msg, kind) {
			return true
		}
	}
	return strings.Contains(msg, "ecompress") || strings.Contains(msg, "orrupt")
}

// refuse asks DuckDB for the columns of every file, since it reads footers
// with other eyes than we do: what it cannot read is listed in db.refused. It
// says whether that is any more than before.
func (db *DB) refuse(ctx context.Context) (more bool) {
	columns := func(paths ...string) error {
		// By name it reads all of the footers, else the first one only.
		sql := "SELECT * FROM " + strings.TrimSuffix(readParquet(paths...), ")") + ", union_by_name = true) LIMIT 0"
		rows, err := db.eng.query(ctx, sql)
		if err != nil {
			return err
		}
		return rows.Close()
	}
	for _, t := range tables {
		var paths []string
		for _, f := range db.tables[t.name] {
			paths = append(paths, f.path)
		}
		if len(paths) == 0 || columns(paths...) == nil {
			continue
		}
		for _, p := range paths {
			if err := columns(p); err != nil && ctx.Err() == nil && !errors.Is(err, fs.ErrNotExist) {
				db.refused[p] = "DuckDB cannot read its footer: " + err.Error()
				more = true
			}
		}
	}
	return more
}

func (db *DB) filesOf(t table) []file {
	db.mu.RLock()
	defer db.mu.RUnlock()
	return db.tables[t.name]
}

// culprit reads every file that sql may have read, one by one, and returns
// the first that fails, relative to the dataset. The states are only read
// when they are asked for, since they dwarf the rest.
func (db *DB) culprit(ctx context.Context, sql string) string {
	for _, t := range tables {
		if t.name == schemas.TableStates && !strings.Contains(strings.ToLower(sql), t.name) {
			continue
		}
		for _, f := range db.filesOf(t) {
			rows, err := db.eng.query(ctx, "SELECT min(hash(f)) FROM "+readParquet(f.path)+" f")
			if err == nil {
				_, err = rows.All()
			}
			if err != nil && ctx.Err() == nil {
				rel, _ := filepath.Rel(db.dir, f.path)
				return filepath.ToSlash(rel)
			}
		}
	}
	return ""
}
