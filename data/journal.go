package data

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/draftscope/draftscope/schemas"
)

// journalName is the file that says which groups a compaction is replacing.
// It is there from before the new group counts until the old ones are gone.
const journalName = "compaction.json"

// journal says that one commit group of a capture holds all that others hold.
// While the new marker is there, the old ones do not count.
type journal struct {
	Run string   `json:"run"`
	New string   `json:"new"` // names of markers
	Old []string `json:"old"`
}

// readJournal reads the journal; without one, the result is empty.
func (d *Dataset) readJournal() (journal, error) {
	var j journal
	path := filepath.Join(d.dir, journalName)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return j, nil
	}
	if err != nil {
		return j, fmt.Errorf("reading %s: %w", path, err)
	}
	if err := json.Unmarshal(b, &j); err != nil {
		return j, fmt.Errorf("reading %s: %w (%w); move it elsewhere", path, ErrDamaged, err)
	}
	for _, name := range append(j.Old, j.New) {
		if _, ok := parseGroup(name); !ok || checkName(j.Run) != nil || name == j.New && slices.Contains(j.Old, name) {
			return j, fmt.Errorf("reading %s: %w: %q in run %q; move it elsewhere", path, ErrDamaged, name, j.Run)
		}
	}
	return j, nil
}

// captureMarkers lists the markers of a run's captures, without those whose
// content a compaction has moved to another.
func (d *Dataset) captureMarkers(run string) ([]string, error) {
	for {
		before, err := d.readMoves()
		if err != nil {
			return nil, err
		}
		paths, err := partsIn(runDir(d.dir, schemas.TableSequences, run))
		if err != nil {
			return nil, err
		}
		after, err := d.readMoves()
		if err != nil {
			return nil, err
		}
		if !before.same(after) { // a list of two moments
			continue
		}
		return slices.DeleteFunc(paths, before.uncounted), nil
	}
}

// moves is the journal at one moment, and whether its new group counts.
type moves struct {
	journal
	marker  string // path of the new one; empty without a journal
	counts  bool
	without map[string]bool // markers by path that do not count
}

func (d *Dataset) readMoves() (m moves, err error) {
	if m.journal, err = d.readJournal(); err != nil || m.New == "" {
		return m, err
	}
	m.marker = d.captureMarker(m.Run, m.New)
	m.counts = exists(m.marker)
	m.without = map[string]bool{m.marker: true}
	if m.counts {
		err := d.checkMoved(m.journal)
		if errors.Is(err, fs.ErrNotExist) {
			m.counts = false // a next compaction has replaced it since
			return m, nil
		}
		if err != nil {
			return m, err
		}
		m.without = d.oldMarkers(m.journal)
	}
	return m, nil
}

func (m moves) same(o moves) bool { return m.marker == o.marker && m.counts == o.counts }

// uncounted says that the commit of a marker does not count: it has been
// replaced, or is about to replace others.
func (m moves) uncounted(marker string) bool { return m.without[marker] }

// checkMoved makes sure that the new group of j holds all sequences of the old
// ones that are still there: a journal that says more than was done would hide
// the others.
func (d *Dataset) checkMoved(j journal) error {
	list, err := d.readMarker(d.captureMarker(j.Run, j.New))
	if err != nil {
		return err
	}
	holds := map[storedSeq]bool{}
	for _, s := range list {
		holds[s] = true
	}
	for _, name := range j.Old {
		marker := d.captureMarker(j.Run, name)
		old, err := d.readMarker(marker)
		if err != nil && !exists(marker) {
			continue // removed
		}
		if err != nil {
			return err
		}
		for _, s := range old {
			if !holds[s] {
				path := filepath.Join(d.dir, journalName)
				return fmt.Errorf("reading %s: %w: it says that %s holds what %s does, which lacks sequence %s; move %s elsewhere",
					path, ErrDamaged, j.New, name, s.SeqID, path)
			}
		}
	}
	return nil
}

// oldMarkers are the paths of the markers that a compaction replaces.
func (d *Dataset) oldMarkers(j journal) map[string]bool {
	old := map[string]bool{}
	for _, name := range j.Old {
		old[d.captureMarker(j.Run, name)] = true
	}
	return old
}

// recoverCompaction ends what a compaction that died began: when its new group
// counts it removes the old ones, else they stay. The rest of the recovery
// removes what has no marker.
func (d *Dataset) recoverCompaction() error {
	m, err := d.readMoves()
	if err != nil || m.New == "" {
		return err
	}
	if m.counts {
		if err := d.removeOld(m.journal); err != nil {
			return err
		}
		d.log.Info("finished a compaction", "run", m.Run, "into", m.New, "groups", len(m.Old))
	}
	return d.removeJournal()
}

func (d *Dataset) captureMarker(run, name string) string {
	return filepath.Join(runDir(d.dir, schemas.TableSequences, run), name)
}

func (d *Dataset) removeJournal() error {
	path := filepath.Join(d.dir, journalName)
	if err := d.disk.Remove(path); err != nil {
		return fmt.Errorf("removing %s: %w", path, err)
	}
	return d.disk.SyncDir(d.dir)
}

// removeOld removes the groups that j.New replaces, each marker first: what is
// left of a group without it is removed by the recovery. Before, it makes sure
// that the new group is whole and holds all their sequences.
func (d *Dataset) removeOld(j journal) error {
	if err := d.checkMoved(j); err != nil {
		return err
	}
	var groups [][]string
	for _, name := range j.Old {
		g, _ := parseGroup(name) // readJournal has checked it
		paths := g.capturePaths(d.dir, j.Run)
		slices.Reverse(paths)
		groups = append(groups, paths)
	}
	dirs := map[string]bool{}
	for table := range 3 { // the marker is first
		for _, paths := range groups {
			if err := d.disk.Remove(paths[table]); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("removing %s: %w", paths[table], err)
			}
			dirs[filepath.Dir(paths[table])] = true
		}
		for dir := range dirs {
			if err := d.disk.SyncDir(dir); err != nil {
				return writeError(dir, err)
			}
		}
		clear(dirs)
	}
	return nil
}
