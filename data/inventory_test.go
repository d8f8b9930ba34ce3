package data

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// leftOut takes the inventory of d and gives the reasons by table and number
// of file, such as "slots/0", and the number of files that count.
func leftOut(t *testing.T, d *Dataset, paths map[string]string) (reasons map[string]string, counted int) {
	t.Helper()
	inv, err := Take(t.Context(), d.Dir())
	if err != nil {
		t.Fatal(err)
	}
	for _, files := range inv.Files {
		counted += len(files)
	}
	reasons = map[string]string{}
	for _, f := range inv.LeftOut {
		if paths[f.Path] == "" {
			t.Errorf("%s is left out, and was not of the dataset", f.Path)
		}
		reasons[paths[f.Path]] = f.Reason
	}
	return reasons, counted
}

func TestACommitCountsWholeOrNotAtAll(t *testing.T) {
	capture, results := []string{"sequences/0", "states/0", "tokens/0"}, []string{"drafts/0", "rounds/0", "slots/0"}
	flip := func(path string) error {
		b, err := os.ReadFile(path)
		if err == nil {
			b[len(b)/4] ^= 0x10
			err = os.WriteFile(path, b, 0o644)
		}
		return err
	}
	cut := func(path string) error { return os.Truncate(path, 100) }
	for _, tt := range []struct {
		what   string
		table  string
		spoil  func(string) error
		reason string
		group  []string // that is left out with it
	}{
		{"bit flipped", "slots", flip, "its content has digest", results},
		{"bit flipped", "drafts", flip, "its content has digest", results},
		{"bit flipped", "rounds", flip, "its content has digest", results},
		{"bit flipped", "tokens", flip, "its content has digest", capture},
		{"bit flipped", "sequences", flip, "its content has digest", capture},
		{"missing", "slots", os.Remove, "listed by rounds/run=r1/drafter=good/part-00-000000000001-000000000002.parquet and missing; restore it, or delete rounds/", results},
		{"missing", "states", os.Remove, "and missing; restore it, or delete sequences/", capture},
		{"missing", "sequences", os.Remove, "", []string{"states/0", "tokens/0"}},
		{"cut", "states", cut, "of 100 bytes, not ", capture},
		{"cut", "tokens", cut, "of 100 bytes, not ", capture},
		{"cut", "rounds", cut, "or is no Parquet file; restore it, or delete it and run the command that made it again", results},
		{"bit flipped", "states", flip, "", nil}, // only read when it is asked for
	} {
		t.Run(tt.table+" "+tt.what, func(t *testing.T) {
			d, _ := smallDataset(t, t.TempDir())
			paths := map[string]string{}
			for _, table := range storedTables {
				for i, path := range partsOf(t, d, table) {
					paths[path] = fmt.Sprintf("%s/%d", table, i)
				}
			}
			if err := tt.spoil(partsOf(t, d, tt.table)[0]); err != nil {
				t.Fatal(err)
			}
			reasons, counted := leftOut(t, d, paths)
			if diff := cmp.Diff(tt.group, sorted(reasons)); diff != "" {
				t.Errorf("left out (-want +got):\n%s", diff)
			}
			if want := len(paths) - max(len(tt.group), b2i(tt.what == "missing")); counted != want && tt.reason != "" {
				t.Errorf("%d files count, want %d", counted, want)
			}
			if got := reasons[tt.table+"/0"]; !strings.Contains(got, tt.reason) || strings.Contains(got, d.Dir()) {
				t.Errorf("reason is %q, want one with %q", got, tt.reason)
			}
			for file, reason := range reasons {
				if file != tt.table+"/0" && !strings.Contains(reason, "left out with its group, of which "+tt.table) && !strings.Contains(reason, "not committed") {
					t.Errorf("reason of %s is %q, want the file that is to blame", file, reason)
				}
			}
			// inspect says the same.
			described, err := Describe(d.Dir())
			if err != nil {
				t.Fatal(err)
			}
			inv, err := Take(t.Context(), d.Dir())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(inv.LeftOut, described.Damaged); diff != "" {
				t.Errorf("the description leaves out other files (-inventory +description):\n%s", diff)
			}
			run := described.Runs[0]
			if want := 4 - 2*b2i(slices.Equal(tt.group, capture) || tt.table == "sequences"); run.Sequences != want {
				t.Errorf("%d sequences, want %d", run.Sequences, want)
			}
			if want := 4 - 2*b2i(slices.Equal(tt.group, results)); run.Scored["good"] != want {
				t.Errorf("%d sequences scored, want %d", run.Scored["good"], want)
			}
		})
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestAMarkerCannotPointOutOfTheDataset(t *testing.T) {
	for path, ok := range map[string]bool{"slots/run=r/drafter=d/x.parquet": true, "../x": false, "/etc/passwd": false, "slots/../../x": false, "": false} {
		if err := checkSiblings([]groupFile{{path, 1}}); (err == nil) != ok || !ok && !errors.Is(err, ErrDamaged) {
			t.Errorf("%q: %v", path, err)
		}
	}
}
