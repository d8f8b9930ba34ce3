package data

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/draftscope/draftscope/schemas"
)

// Inventory lists the Parquet files of a dataset at one moment.
type Inventory struct {
	// Files are the paths of those that count, by table, in order.
	Files map[string][]string
	// LeftOut are those that must not be counted, and why: damaged ones, those
	// of a commit that was not finished, and all others of their commits, so
	// that what is counted of a sequence is all of it or nothing.
	LeftOut []DamagedFile
}

// Take lists the dataset in dir, which need not have a dataset.json. The
// content of every file is compared with its digest, but for the table states,
// of which only the footers are read; a file of another program has no digest
// and passes. A commit counts when every file that its marker lists is there
// in the size it had. What a writer has not finished writing is no part of the
// inventory, nor is what a compaction has moved.
func Take(ctx context.Context, dir string) (Inventory, error) {
	return TakeBut(ctx, dir, nil)
}

// TakeBut is Take, with files that the caller cannot read, by path, and why:
// they count as damaged.
func TakeBut(ctx context.Context, dir string, refused map[string]string) (Inventory, error) {
	d := &Dataset{dir: dir}
	for attempt := 0; ; attempt++ {
		t := taking{d: d, refused: refused, by: map[string]*takenFile{}}
		moved, err := t.take(ctx)
		if err != nil {
			return Inventory{}, fmt.Errorf("listing the files of %s: %w", dir, err)
		}
		// A compaction moves files while they are read, but not for ever.
		if !moved || attempt == 4 {
			return t.inventory(), nil
		}
	}
}

// inventoried are all tables, those with markers first: the other files of a
// commit are there before its marker is.
var inventoried = []string{
	schemas.TableSequences, schemas.TableRounds, schemas.TableTokens, schemas.TableStates,
	schemas.TableDrafts, schemas.TableSlots, schemas.TableFaults, schemas.TableSimilarity,
}

// takenFile is one file on its way into the inventory.
type takenFile struct {
	table, path string
	marker      string      // of its commit; empty for a marker and for a file that stands alone
	siblings    []groupFile // of a marker
	reason      string      // why it is left out; empty when it counts
	foreign     bool        // its footer names no format: another program's, or damaged
	gone        bool        // it vanished, or belongs to a commit of after the listing
}

// WithGroup begins the reason of a file that is whole itself, and left out
// because another one of its commit is not.
const WithGroup = "left out with its group, of which "

// Uncommitted is the reason of a file whose writer was stopped, or is about to
// commit it.
const Uncommitted = "its group was not committed; what it holds is written again when the run goes on"

type taking struct {
	d       *Dataset
	refused map[string]string // reasons by path
	files   []*takenFile
	by      map[string]*takenFile
}

// take lists and judges every file. It reports whether files were moved
// meanwhile, so that the list is of no one moment.
func (t *taking) take(ctx context.Context) (moved bool, err error) {
	before, err := t.d.readMoves()
	if err != nil {
		return false, err
	}
	for _, table := range inventoried {
		if err := t.list(ctx, table, before); err != nil {
			return false, err
		}
	}
	if err := t.judge(ctx); err != nil {
		return false, err
	}
	t.join()
	after, err := t.d.readMoves()
	if err != nil {
		return false, err
	}
	gone := slices.ContainsFunc(t.files, func(f *takenFile) bool { return f.gone })
	return gone || !before.same(after), nil
}

func (t *taking) list(ctx context.Context, table string, at moves) error {
	root := filepath.Join(t.d.dir, table)
	return filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && (e.IsDir() || filepath.Ext(path) != ".parquet") {
			return nil
		}
		f := &takenFile{table: table, path: path, marker: t.d.markerOf(table, path), reason: t.refused[path]}
		if at.uncounted(path) || at.uncounted(f.marker) {
			return nil
		}
		if err != nil {
			f.reason, f.marker = err.Error(), ""
		}
		t.files = append(t.files, f)
		t.by[path] = f
		return nil
	})
}

// judge reads all files, several at once.
func (t *taking) judge(ctx context.Context) error {
	next := make(chan *takenFile)
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(t.files)) {
		wg.Go(func() {
			for f := range next {
				f.judge()
			}
		})
	}
	var err error
	for _, f := range t.files {
		if err = ctx.Err(); err != nil {
			break
		}
		if f.reason == "" {
			next <- f
		}
	}
	close(next)
	wg.Wait()
	return err
}

func (f *takenFile) isMarker() bool {
	return f.table == schemas.TableSequences || f.table == schemas.TableRounds
}

func (f *takenFile) judge() {
	err := f.read()
	if err != nil && !exists(f.path) {
		f.gone = true
		return
	}
	if err != nil {
		f.reason = strings.TrimPrefix(err.Error(), "reading "+f.path+": ")
		return
	}
}

func (f *takenFile) read() error {
	o, err := openPart(f.path)
	if err != nil {
		return err
	}
	defer o.Close()
	if f.table != schemas.TableStates {
		if err := o.verifyBody(); err != nil {
			return err
		}
	}
	f.foreign = !o.ours()
	if !f.isMarker() || f.foreign {
		return nil
	}
	if err := json.Unmarshal([]byte(o.kv(keyGroup)), &f.siblings); err != nil {
		return fmt.Errorf("%w: its list of files: %w", ErrDamaged, err)
	}
	if err := checkSiblings(f.siblings); err != nil {
		return err
	}
	_, err = o.sequences()
	return err
}

// checkSiblings refuses paths that lead out of the dataset.
func checkSiblings(list []groupFile) error {
	for _, s := range list {
		if !filepath.IsLocal(filepath.FromSlash(s.Path)) {
			return fmt.Errorf("%w: it lists %q, which is outside the dataset", ErrDamaged, s.Path)
		}
	}
	return nil
}

// join leaves out whole commits: when any of their files is missing or bad,
// the others do not count.
func (t *taking) join() {
	cause := map[string]string{} // by marker: the file that is to blame
	for _, f := range slices.Clone(t.files) {
		switch {
		case f.marker == "" && f.reason != "":
			cause[f.path] = f.path
			if _, ok := parseGroup(filepath.Base(f.path)); ok && f.isMarker() {
				f.reason += "; restore it, or delete it and run the command that made it again"
			}
		case f.marker == "":
			t.joinSiblings(f, cause)
		case t.by[f.marker] == nil && exists(f.marker):
			f.gone = true // its marker came after the list
		case t.by[f.marker] == nil:
			f.reason = Uncommitted
		case f.reason != "":
			f.reason += "; restore it, or delete " + t.rel(f.marker) + " and run the command that made it again"
			cause[f.marker] = f.path
		}
	}
	for _, f := range t.files {
		marker := f.marker
		if marker == "" {
			marker = f.path
		}
		if bad := cause[marker]; bad != "" && f.reason == "" {
			f.reason = WithGroup + t.rel(bad) + " is damaged or missing"
		}
		if m := t.by[marker]; m != nil && m.gone {
			f.gone = true
		}
	}
}

// joinSiblings compares the files that a marker lists with those that are
// there.
func (t *taking) joinSiblings(marker *takenFile, cause map[string]string) {
	for _, s := range marker.siblings {
		path := filepath.Join(t.d.dir, filepath.FromSlash(s.Path))
		info, err := os.Stat(path)
		if f := t.by[path]; err == nil && info.Size() == s.Size {
			if f != nil && f.foreign && f.reason == "" {
				cause[marker.path] = path
				f.reason = fmt.Sprintf("listed by %s, and its footer is not what was written; restore it, or delete %s and run the command that made it again", t.rel(marker.path), t.rel(marker.path))
				f.marker = ""
			}
			continue
		}
		if !exists(marker.path) {
			marker.gone = true
			return
		}
		cause[marker.path] = path
		f := t.by[path]
		if f == nil {
			f = &takenFile{path: path}
			t.files = append(t.files, f)
			t.by[path] = f
		}
		what := "missing"
		if err == nil {
			what = fmt.Sprintf("of %d bytes, not %d", info.Size(), s.Size)
		}
		f.reason = fmt.Sprintf("listed by %s and %s; restore it, or delete %s and run the command that made it again", t.rel(marker.path), what, t.rel(marker.path))
		f.marker, f.gone = "", false // it has its reason
	}
}

// rel is a path as messages name it: from the dataset's folder, with slashes.
func (t *taking) rel(path string) string {
	rel, err := filepath.Rel(t.d.dir, path)
	if err != nil {
		return path
	}
	return filepath.ToSlash(rel)
}

func (t *taking) inventory() Inventory {
	inv := Inventory{Files: map[string][]string{}}
	slices.SortFunc(t.files, func(a, b *takenFile) int { return strings.Compare(a.path, b.path) })
	for _, f := range t.files {
		switch {
		case f.gone:
		case f.reason != "":
			inv.LeftOut = append(inv.LeftOut, DamagedFile{f.path, f.reason})
		default:
			inv.Files[f.table] = append(inv.Files[f.table], f.path)
		}
	}
	return inv
}
