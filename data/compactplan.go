package data

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Merge is several commit groups of a capture that become, or became, one.
type Merge struct {
	Shard  int    `json:"shard"`
	First  uint64 `json:"first"` // the stream's numbers that the groups span
	Last   uint64 `json:"last"`
	Groups int    `json:"groups"`
	Bytes  int64  `json:"bytes"` // of their states, which are copied as they are
}

func mergeOf(batch []oldGroup) Merge {
	m := Merge{Shard: batch[0].shard, Groups: len(batch)}
	var sp span
	for _, o := range batch {
		sp.add(o.span.first)
		sp.add(o.span.last)
		m.Bytes += o.states
	}
	m.First, m.Last = sp.first, sp.last
	return m
}

// PlanCompaction lists what [Dataset.Compact] would do now. It changes
// nothing, and the dataset may be open for reading only.
func (d *Dataset) PlanCompaction(run string, cfg CompactConfig) ([]Merge, error) {
	plan, err := d.merges(run, cfg)
	if err != nil {
		return nil, fmt.Errorf("planning the compaction of run %s: %w", run, err)
	}
	return plan, nil
}

func (d *Dataset) merges(run string, cfg CompactConfig) ([]Merge, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if _, err := d.Run(run); err != nil {
		return nil, err
	}
	batches, err := d.planCompaction(run, cmp.Or(cfg.TargetBytes, defaultCompacted))
	if err != nil {
		return nil, err
	}
	plan := []Merge{}
	for _, b := range batches {
		plan = append(plan, mergeOf(b))
	}
	return plan, nil
}

// CaptureSize is how many files the captures of a run take, and their bytes.
// What a compaction has moved already is not counted.
func (d *Dataset) CaptureSize(run string) (files int, bytes int64, err error) {
	markers, err := d.captureMarkers(run)
	if err != nil {
		return 0, 0, fmt.Errorf("measuring run %s: %w", run, err)
	}
	for _, marker := range markers {
		g, ok := parseGroup(filepath.Base(marker))
		if !ok {
			continue // not ours
		}
		for _, path := range g.capturePaths(d.dir, run) {
			info, err := os.Stat(path)
			if errors.Is(err, fs.ErrNotExist) && exists(marker) {
				return 0, 0, fmt.Errorf("measuring run %s: %w: %s is missing; restore it, or remove %s to capture its sequences again",
					run, ErrDamaged, path, marker)
			}
			if err != nil {
				return 0, 0, fmt.Errorf("measuring run %s: %w", run, err)
			}
			files++
			bytes += info.Size()
		}
	}
	return files, bytes, nil
}

// Interrupted says which run's compaction died half-way in the dataset in dir,
// and how many groups it was joining; an empty name when none did, or one is
// going on and this moment is between two of its steps. [Create] ends it.
func Interrupted(dir string) (run string, groups int, err error) {
	j, err := (&Dataset{dir: dir}).readJournal()
	return j.Run, len(j.Old), err
}
