package main

import (
	"slices"
	"strings"

	"github.com/draftscope/draftscope/schemas"
)

// faultCount counts equal faults, whenever they were found.
type faultCount map[schemas.Fault]int

func faultKey(f schemas.Fault) schemas.Fault {
	return schemas.Fault{SeqID: f.SeqID, Chunk: f.Chunk, Check: f.Check, Detail: f.Detail}
}

// begin remembers what the dataset has before the job, and which sequences the
// job is about.
func (j *job) begin(inputs map[string]bool) error {
	faults, err := j.ds.Faults(j.run)
	if err != nil {
		return dataError(err)
	}
	j.old, j.asked = faultCount{}, inputs
	for _, f := range faults {
		j.old[faultKey(f)]++
	}
	return nil
}

// mattering are the faults that this job has to answer for: those that it has
// found, and older ones for which something that it was asked for is still not
// there: a sequence that is not stored, or that one of its drafters has not
// scored.
func (j *job) mattering() ([]schemas.Fault, error) {
	faults, err := j.ds.Faults(j.run)
	if err != nil {
		return nil, err
	}
	stored, err := j.ds.Stored(j.run)
	if err != nil {
		return nil, err
	}
	unscored, err := j.unscored(stored)
	if err != nil {
		return nil, err
	}
	old := faultCount{}
	return slices.DeleteFunc(faults, func(f schemas.Fault) bool {
		key := faultKey(f)
		if old[key]++; old[key] > j.old[key] {
			return false // it is new
		}
		if !j.asked[f.SeqID] {
			return true
		}
		if _, have := stored[f.SeqID]; !have {
			return false
		}
		ours := !strings.HasPrefix(f.Detail, "drafter ") || slices.ContainsFunc(j.names, func(name string) bool {
			return strings.HasPrefix(f.Detail, "drafter "+name+": ")
		})
		return !ours || !unscored[f.SeqID]
	}), nil
}
