package data

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/draftscope/draftscope/schemas"
)

// EachSequence calls visit with every stored sequence of a run and its
// tokens, part by part, and stops at its first error. The states are not
// read.
func (d *Dataset) EachSequence(run string, visit func(schemas.Sequence, []schemas.Token) error) error {
	if _, err := d.Run(run); err != nil {
		return err
	}
	parts, err := d.captureMarkers(run)
	if err != nil {
		return fmt.Errorf("reading the sequences of run %s: %w", run, err)
	}
	for _, marker := range parts {
		if err := eachInPart(d, run, marker, func(s schemas.Sequence) int32 { return s.Length }, visit); err != nil {
			return err
		}
	}
	return nil
}

// eachInPart is EachSequence of one commit, for the columns of the two tables
// that S and T have.
func eachInPart[S, T any](d *Dataset, run, marker string, length func(S) int32, visit func(S, []T) error) error {
	g, ok := parseGroup(filepath.Base(marker))
	if !ok {
		return fmt.Errorf("reading %s: %w: not a name of ours; move it elsewhere", marker, ErrDamaged)
	}
	seqs, err := readRows[S](marker)
	if err != nil {
		return err
	}
	path := g.capturePaths(d.dir, run)[1]
	tokens, err := readRows[T](path)
	if err != nil {
		return err
	}
	for _, s := range seqs {
		n := int(length(s))
		if n < 0 || n > len(tokens) {
			return fmt.Errorf("reading %s: %w: fewer tokens than its sequences have", path, ErrDamaged)
		}
		if err := visit(s, tokens[:n]); err != nil {
			return err
		}
		tokens = tokens[n:]
	}
	return nil
}

// eachStates opens the states file of every commit group of a run in turn.
func (d *Dataset) eachStates(run Run, visit func(*openedPart) error) error {
	markers, err := d.captureMarkers(run.Name)
	if err != nil {
		return err
	}
	for _, marker := range markers {
		g, ok := parseGroup(filepath.Base(marker))
		if !ok {
			return fmt.Errorf("reading %s: %w: not a name of ours; move it elsewhere", marker, ErrDamaged)
		}
		o, err := openPart(g.statesPath(d.dir, run.Name))
		if err != nil {
			return err
		}
		if err := errors.Join(visit(o), o.Close()); err != nil {
			return err
		}
	}
	return nil
}

// AddFaults stores faults that no sink saw, such as those of the stream. One
// that is stored already is not stored again.
func (d *Dataset) AddFaults(run string, faults []schemas.Fault) error {
	if len(faults) == 0 {
		return nil
	}
	s, err := d.newSink(run, 0, SinkConfig{})
	if err != nil {
		return fmt.Errorf("storing faults of run %s: %w", run, err)
	}
	for _, f := range faults {
		s.addFault(0, f)
	}
	if err := s.commitFaults(); err != nil {
		s.forgetFaults()
		return fmt.Errorf("storing faults of run %s: %w", run, err)
	}
	return nil
}
