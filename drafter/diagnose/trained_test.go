package diagnose

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/draftscope/draftscope/extract/safetensors"
)

// TestFoldersOfTrainedDrafters prints what is said of each drafter in a
// folder of folders.
func TestFoldersOfTrainedDrafters(t *testing.T) {
	root := os.Getenv("DRAFTSCOPE_TRAINED")
	if root == "" {
		t.Skip("DRAFTSCOPE_TRAINED names no folder")
	}
	dirs, err := filepath.Glob(root + "/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		name := filepath.Base(dir)
		t.Run(name, func(t *testing.T) {
			w, err := safetensors.Open(os.DirFS(dir), ".")
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			config, err := os.ReadFile(dir + "/config.json")
			if err != nil {
				t.Fatal(err)
			}
			c := demoCase(t, "good")
			c.Anchors = 192
			c.Drafter = Checkpoint{Name: name, Config: config, Weights: w}
			r := examine(t, c, probeDrafter)
			f := r.Findings[0]
			word := "-"
			if f.alarm() {
				word = f.Key
			}
			fmt.Printf("RESULT %-18s %-16s %-11s %s\n", name, word, f.Verdict, f.Measure)
			for _, f := range r.Findings[1:] {
				if f.alarm() || os.Getenv("DRAFTSCOPE_VERBOSE") != "" {
					fmt.Printf("   also %-16s %-11s %s\n", f.Key, f.Verdict, f.Measure)
				}
			}
		})
	}
}
