package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/drafter/diagnose"
)

// isModel says that a path is a model's folder, and no dataset.
func isModel(path string) bool {
	_, err := os.Stat(filepath.Join(path, "config.json"))
	return err == nil
}

// compareWeights compares the weights of two drafters.
func compareWeights(a, b string, asJSON bool, out streams) (err error) {
	j := newJob(jobFlags{}, out)
	defer func() { err = errors.Join(err, j.opened.Close()) }()
	var sides [2]diagnose.Checkpoint
	for i, path := range []string{a, b} {
		if sides[i], _, err = j.examined(data.Run{}, path); err != nil {
			return err
		}
		sides[i].Name = path
	}
	if err := sameKind(sides); err != nil {
		return err
	}
	c, err := diagnose.CompareCheckpoints(sides[0], sides[1])
	if err != nil {
		return badInput(err)
	}
	if asJSON {
		err = writeJSON(out.stdout, c)
	} else {
		err = c.WriteText(out.stdout)
	}
	switch {
	case err != nil || len(c.Faults) == 0:
		return err
	case len(c.Tensors) == 0:
		return badUsage("nothing of %s and %s can be compared: %d faults", a, b, len(c.Faults))
	}
	return exitError{exitPartial, fmt.Errorf("%s and %s have %d faults; what is named there tells nothing of the training", a, b, len(c.Faults))}
}

// sameKind refuses a drafter against a model that is none.
func sameKind(sides [2]diagnose.Checkpoint) error {
	var drafters [2]bool
	var what [2]string
	for i, side := range sides {
		name, isDrafter, err := drafter.KindOf(side.Config)
		if err != nil {
			return badInput(fmt.Errorf("reading config.json of %s: %w", side.Name, err))
		}
		drafters[i], what[i] = isDrafter, "a model of architecture "+strconv.Quote(name)
		if isDrafter {
			what[i] = "a drafter, " + name
		}
	}
	if drafters[0] != drafters[1] {
		return badUsage("%s is %s, and %s is %s: compare two of a kind", sides[0].Name, what[0], sides[1].Name, what[1])
	}
	return nil
}
