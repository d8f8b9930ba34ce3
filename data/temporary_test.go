package data

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

func TestTemporariesOfTheDeadAreSweptAndThoseOfTheLivingStay(t *testing.T) {
	dir := t.TempDir()
	folder := filepath.Join(dir, schemas.TableSimilarity)
	living, err := CreateTemporary(folder)
	if err != nil {
		t.Fatal(err)
	}
	dead := filepath.Join(folder, "123.tmp")
	theirs := filepath.Join(folder, "notes.txt")
	for name, sweep := range map[string]func() error{
		"the next comparison": func() error {
			next, err := CreateTemporary(folder)
			if err != nil {
				return err
			}
			return next.Abort()
		},
		"the next writer": func() error {
			d, err := Create(dir, nil)
			if err != nil {
				return err
			}
			return d.Close()
		},
	} {
		for _, path := range []string{dead, theirs} {
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := sweep(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if exists(dead) || !exists(theirs) || !exists(living.Name()) {
			t.Errorf("after %s: dead %v, theirs %v, living %v", name, exists(dead), exists(theirs), exists(living.Name()))
		}
	}
	path := filepath.Join(folder, "a--b.parquet")
	if err := living.Commit(path); err != nil || !exists(path) {
		t.Errorf("committing: %v", err)
	}
}
