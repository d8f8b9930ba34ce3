package main

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/draftscope/draftscope/data"
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
	c, err := diagnose.CompareCheckpoints(sides[0], sides[1])
	if err != nil {
		return badInput(err)
	}
	if asJSON {
		return writeJSON(out.stdout, c)
	}
	return c.WriteText(out.stdout)
}
