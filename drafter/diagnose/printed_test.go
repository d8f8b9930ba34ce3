//go:build printed

package diagnose

import (
	"os"
	"strings"
	"testing"
)

// TestDraftersOfFilesArePrinted examines every drafter of the files that
// DRAFTSCOPE_TRAINED names, as the command does, and prints what is said: the
// table of docs/diagnose.md.
func TestDraftersOfFilesArePrinted(t *testing.T) {
	files := strings.Fields(os.Getenv("DRAFTSCOPE_TRAINED"))
	if len(files) == 0 {
		t.Fatal("DRAFTSCOPE_TRAINED names no file that train.py wrote")
	}
	for _, path := range files {
		file, names := trainedDrafters(t, path)
		for _, name := range names {
			t.Run(name, func(t *testing.T) {
				c := demoCase(t, "good")
				c.Anchors = 0 // as the command
				c.Drafter = packed{file, name}.checkpoint(t)
				r := examine(t, c, probeDrafter)
				for i, f := range r.Findings {
					if i == 0 || f.alarm() {
						t.Logf("%s: %s %s, alarm %t: %s", name, f.Key, f.Verdict, f.alarm(), f.Measure)
					}
				}
			})
		}
	}
}
