package data

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/draftscope/draftscope/schemas"
)

// CheckResults reads the stored results of all drafters of a run and compares
// those of every sequence with their digest. It tells damaged of each file that
// cannot be read, and of each marker whose commit is not what was stored: a
// footer that decodes may still name other columns than were written.
func (d *Dataset) CheckResults(ctx context.Context, run string, damaged func(path string, err error)) error {
	drafters, err := filepath.Glob(filepath.Join(escapeGlob(runDir(d.dir, schemas.TableRounds, run)), "drafter=*"))
	if err != nil {
		return fmt.Errorf("listing the drafters of run %s: %w", run, err)
	}
	for _, dir := range drafters {
		markers, err := partsIn(dir)
		if err != nil {
			return fmt.Errorf("listing the results of run %s: %w", run, err)
		}
		drafter := strings.TrimPrefix(filepath.Base(dir), "drafter=")
		for _, marker := range markers {
			if err := ctx.Err(); err != nil {
				return err
			}
			if path, err := d.checkResults(run, drafter, marker); err != nil && exists(marker) {
				damaged(path, err)
			}
		}
	}
	return nil
}

// checkResults returns the file to blame with the error.
func (d *Dataset) checkResults(run, drafter, marker string) (path string, err error) {
	list, err := d.readMarker(marker)
	if err != nil {
		return marker, err
	}
	g, ok := parseGroup(filepath.Base(marker))
	if !ok {
		return marker, fmt.Errorf("reading %s: %w: not a name of ours; move it elsewhere", marker, ErrDamaged)
	}
	paths := g.resultPaths(d.dir, run, drafter)
	by := map[string]*results{}
	for _, s := range list {
		by[s.SeqID] = &results{}
	}
	others := 0 // rows of sequences that the marker does not list
	of := func(seq string) *results {
		if r := by[seq]; r != nil {
			return r
		}
		others++
		return &results{}
	}
	drafts, err := readRows[schemas.Draft](paths[0])
	if err != nil {
		return paths[0], err
	}
	for _, row := range drafts {
		r := of(row.SeqID)
		r.drafts = append(r.drafts, row)
	}
	slots, err := readRows[schemas.Slot](paths[1])
	if err != nil {
		return paths[1], err
	}
	for _, row := range slots {
		r := of(row.SeqID)
		r.slots = append(r.slots, row)
	}
	rounds, err := readRows[schemas.Round](paths[2])
	if err != nil {
		return paths[2], err
	}
	for _, row := range rounds {
		r := of(row.SeqID)
		r.rounds = append(r.rounds, row)
	}
	for _, s := range list {
		if got := by[s.SeqID].sum(); got != s.Digest {
			return marker, fmt.Errorf("reading %s: %w: the results of sequence %s have digest %s, stored was %s; %s", marker, ErrDamaged, s.SeqID, got, s.Digest, remedy(marker, false))
		}
	}
	if others > 0 {
		return marker, fmt.Errorf("reading %s: %w: %s in its commit of sequences that it does not list; %s", marker, ErrDamaged, count(others, "row"), remedy(marker, false))
	}
	return "", nil
}

// remedy says how a damaged commit is repaired: without its marker it does not
// count, and whoever wrote it writes what is missing. again says that this is
// the command at work.
func remedy(marker string, again bool) string {
	switch {
	case filepath.Base(filepath.Dir(filepath.Dir(marker))) == schemas.TableSequences:
		return fmt.Sprintf("restore the file, or delete %s and run the command that captured its sequences again; until then they are left out", marker)
	case again:
		return fmt.Sprintf("restore the file, or delete %s and run the same command again", marker)
	}
	return fmt.Sprintf("restore the file, or delete %s and run the command that made it again", marker)
}

// withRemedy adds to the error of a damaged commit how it is repaired.
func withRemedy(err error, marker string, again bool) error {
	if !errors.Is(err, ErrDamaged) {
		return err
	}
	if _, ours := parseGroup(filepath.Base(marker)); !ours {
		return fmt.Errorf("%w; move it elsewhere", err)
	}
	return fmt.Errorf("%w; %s", err, remedy(marker, again))
}
