package data

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/draftscope/draftscope/schemas"
)

// recover removes what a writer that died left behind: files under temporary
// names, and files of a group whose marker was not renamed. Their sequences
// were never acknowledged and will come again. Files that do not bear a name
// of ours stay.
func (d *Dataset) recover() error {
	remove := func(path, why string) error {
		if err := d.disk.Remove(path); err != nil {
			return fmt.Errorf("removing unfinished %s: %w", path, err)
		}
		d.log.Info("removed an unfinished file", "path", path, "why", why)
		return nil
	}
	for _, name := range []string{manifestName, journalName} {
		if tmp := filepath.Join(d.dir, name+tmpSuffix); exists(tmp) {
			if err := remove(tmp, "temporary"); err != nil {
				return err
			}
		}
	}
	if err := sweepTemporaries(filepath.Join(d.dir, schemas.TableSimilarity), func(path string) error { return remove(path, "temporary") }); err != nil {
		return err
	}
	if err := d.recoverCompaction(); err != nil {
		return err
	}
	for _, table := range storedTables {
		root := filepath.Join(d.dir, table)
		err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) && path == root {
				return fs.SkipAll
			}
			if err != nil {
				return fmt.Errorf("listing %s: %w", path, err)
			}
			if e.IsDir() {
				return nil
			}
			if strings.HasSuffix(path, ".parquet"+tmpSuffix) {
				return remove(path, "temporary")
			}
			if marker := d.markerOf(table, path); marker != "" && !exists(marker) {
				return remove(path, "its group was not committed")
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// markerOf is the path of the file that commits the group of path, or empty
// when path is a marker, stands alone, or is not ours.
func (d *Dataset) markerOf(table, path string) string {
	dir, name := filepath.Split(path)
	dir = filepath.Clean(dir)
	switch table {
	case schemas.TableTokens:
		if _, ok := parseGroup(name); ok {
			return filepath.Join(d.dir, schemas.TableSequences, filepath.Base(dir), name)
		}
	case schemas.TableStates:
		shard, ok := strings.CutPrefix(filepath.Base(dir), "shard=")
		rest, ok2 := strings.CutPrefix(name, "part-")
		name = "part-" + shard + "-" + rest
		if _, ok3 := parseGroup(name); ok && ok2 && ok3 {
			return filepath.Join(d.dir, schemas.TableSequences, filepath.Base(filepath.Dir(dir)), name)
		}
	case schemas.TableDrafts, schemas.TableSlots:
		if _, ok := parseGroup(name); ok {
			return filepath.Join(d.dir, schemas.TableRounds, filepath.Base(filepath.Dir(dir)), filepath.Base(dir), name)
		}
	}
	return ""
}

// index knows what is stored of a run, and what sinks are about to store. The
// dataset's mutex guards it.
type index struct {
	seqs   map[string]entry // by seqKey
	faults map[string]bool  // by digest
}

// entry is one stored sequence, or one that a sink holds and will store.
type entry struct {
	digest  string
	durable bool
}

// seqKey is what is stored once. The drafter of a capture is empty.
type seqKey struct{ drafter, seq string }

func (k seqKey) String() string { return k.drafter + "\x00" + k.seq }

// indexOf loads the index of a run from the footers of its markers. The
// caller holds mu.
func (d *Dataset) indexOf(run string) (*index, error) {
	if ix := d.indexes[run]; ix != nil {
		return ix, nil
	}
	ix := &index{seqs: map[string]entry{}, faults: map[string]bool{}}
	load := func(list func(string) ([]string, error), dir, drafter string) error {
		paths, err := list(dir)
		if err != nil {
			return err
		}
		for _, path := range paths {
			list, err := d.readMarker(path)
			if err != nil {
				return err
			}
			for _, s := range list {
				ix.seqs[seqKey{drafter, s.SeqID}.String()] = entry{s.Digest, true}
			}
		}
		return nil
	}
	if err := load(d.captureMarkers, run, ""); err != nil {
		return nil, err
	}
	drafters, err := filepath.Glob(filepath.Join(escapeGlob(runDir(d.dir, schemas.TableRounds, run)), "drafter=*"))
	if err != nil {
		return nil, fmt.Errorf("listing the drafters of run %s: %w", run, err)
	}
	for _, dir := range drafters {
		if err := load(partsIn, dir, strings.TrimPrefix(filepath.Base(dir), "drafter=")); err != nil {
			return nil, err
		}
	}
	faults, err := d.Faults(run)
	if err != nil {
		return nil, err
	}
	for _, f := range faults {
		ix.faults[faultDigest(f)] = true
	}
	d.indexes[run] = ix
	return ix, nil
}

// readMarker reads the sequences that a marker commits, and makes sure that
// the other files of its group are there in the size that they had: a name
// alone proves nothing.
func (d *Dataset) readMarker(path string) ([]storedSeq, error) {
	list, err := d.openMarker(path)
	return list, withRemedy(err, path, d.writable)
}

func (d *Dataset) openMarker(path string) ([]storedSeq, error) {
	o, err := openPart(path)
	if err != nil {
		return nil, err
	}
	defer o.Close()
	if !o.ours() {
		return nil, fmt.Errorf("reading %s: %w: no draftscope file", path, ErrDamaged)
	}
	var files []groupFile
	if err := json.Unmarshal([]byte(o.kv(keyGroup)), &files); err != nil {
		return nil, fmt.Errorf("reading %s: %w: its list of files: %w", path, ErrDamaged, err)
	}
	for _, f := range files {
		other := filepath.Join(d.dir, filepath.FromSlash(f.Path))
		info, err := os.Stat(other)
		if err != nil || info.Size() != f.Size {
			return nil, fmt.Errorf("reading %s: %w: it belongs to %s, %d bytes, which is missing or has another size", path, ErrDamaged, other, f.Size)
		}
	}
	return o.sequences()
}

// Stored lists the captured sequences of a run, with the digest of each.
func (d *Dataset) Stored(run string) (map[string]string, error) { return d.durable(run, "") }

// Scored lists the sequences whose results by a drafter are stored, with the
// digest of each.
func (d *Dataset) Scored(run, drafter string) (map[string]string, error) {
	return d.durable(run, drafter)
}

func (d *Dataset) durable(run, drafter string) (map[string]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.writable {
		delete(d.indexes, run) // a writer may have added to it
	}
	ix, err := d.indexOf(run)
	if err != nil {
		return nil, fmt.Errorf("listing what is stored of run %s: %w", run, err)
	}
	out := map[string]string{}
	for key, e := range ix.seqs {
		if who, seq, _ := strings.Cut(key, "\x00"); who == drafter && e.durable {
			out[seq] = e.digest
		}
	}
	return out, nil
}

// Faults reads what was set aside in a run, in the order it was stored.
func (d *Dataset) Faults(run string) ([]schemas.Fault, error) {
	paths, err := partsIn(runDir(d.dir, schemas.TableFaults, run))
	if err != nil {
		return nil, err
	}
	var faults []schemas.Fault
	for _, path := range paths {
		rows, err := readRows[schemas.Fault](path)
		if errors.Is(err, ErrDamaged) {
			return nil, fmt.Errorf("%w; restore it, or delete it: what it lists is found again by the command that set it aside", err)
		}
		if err != nil {
			return nil, err
		}
		faults = append(faults, rows...)
	}
	return faults, nil
}

func faultDigest(f schemas.Fault) string {
	h := newRowHash()
	addRows(h, []schemas.Fault{f})
	return hex64(h.sum())
}

// The answers of claim.
type claimResult int

const (
	claimNew   claimResult = iota // it is ours to store
	claimEqual                    // it is stored, or about to be, and equal
	claimOther                    // it is stored, or about to be, and another
)

// claim asks for the right to store a sequence.
func (d *Dataset) claim(run string, key seqKey, digest string) (claimResult, string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	ix := d.indexes[run]
	have, ok := ix.seqs[key.String()]
	switch {
	case !ok:
		ix.seqs[key.String()] = entry{digest: digest}
		return claimNew, ""
	case have.digest == digest:
		return claimEqual, have.digest
	}
	return claimOther, have.digest
}

// settle ends claims: their sequences are stored, or were given up.
func (d *Dataset) settle(run string, keys []seqKey, stored bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	ix := d.indexes[run]
	for _, k := range keys {
		if stored {
			ix.seqs[k.String()] = entry{ix.seqs[k.String()].digest, true}
		} else {
			delete(ix.seqs, k.String())
		}
	}
}

// partsIn lists the Parquet files of one folder in order; a missing folder
// has none.
func partsIn(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing %s: %w", dir, err)
	}
	var paths []string
	for _, e := range entries {
		if !e.IsDir() && strings.HasSuffix(e.Name(), ".parquet") {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths, nil
}

// escapeGlob quotes what filepath.Glob would read as a pattern.
func escapeGlob(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}
