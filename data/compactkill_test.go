package data

import (
	"bufio"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/draftscope/draftscope/schemas"
)

// compactDir makes the test binary a compaction that is to be killed.
const compactDir = "DRAFTSCOPE_TEST_COMPACT_DIR"

// The dataset that it compacts, and how many times it is killed. A merge takes
// three to four groups, so that there are some eight of them.
const (
	compactGroups = 30
	compactTarget = 40 << 10
	compactKills  = 25
)

// compactUntilKilled is the process that the next test kills.
func compactUntilKilled(t *testing.T, dir string) {
	d := mustCreate(t, dir)
	fmt.Println("ready")
	if _, err := d.Compact(t.Context(), "r1", CompactConfig{TargetBytes: compactTarget}); err != nil {
		t.Fatal(err)
	}
	fmt.Println("done")
}

// runCompaction compacts in a process of its own and kills it after some time,
// counted from when it has opened the dataset; below 0 it lives.
func runCompaction(t *testing.T, dir string, after time.Duration) (finished bool, took time.Duration) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledCompactionsLoseAndDoubleNothing$", "-test.count=1")
	cmd.Env = append(os.Environ(), compactDir+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() && lines.Text() != "ready" {
	}
	start := time.Now()
	if after >= 0 {
		time.Sleep(after)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	for lines.Scan() {
		if lines.Text() == "done" {
			finished, took = true, time.Since(start)
		}
	}
	if err := cmd.Wait(); err != nil && after < 0 {
		t.Fatal(err)
	}
	return finished, took
}

// TestKilledCompactionsLoseAndDoubleNothing kills compactions at random
// moments. At each, a reader and then the next writer find every sequence and
// every row once, bit for bit.
func TestKilledCompactionsLoseAndDoubleNothing(t *testing.T) {
	if dir := os.Getenv(compactDir); dir != "" { // the child
		compactUntilKilled(t, dir)
		return
	}
	if testing.Short() {
		t.Skip("starts processes")
	}
	run := testRun("r1", 96, schemas.BF16)
	made, want := t.TempDir(), map[string]sample{}
	d := mustCreate(t, made)
	if err := d.AddRun(run); err != nil {
		t.Fatal(err)
	}
	manyParts(t, d, run, 0, 1, compactGroups, SinkConfig{Stream: "s"}, want)
	before, err := d.Stored("r1")
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
	fresh := func() string {
		dir := filepath.Join(t.TempDir(), "copy")
		if err := os.CopyFS(dir, os.DirFS(made)); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	dir := fresh()
	_, took := runCompaction(t, dir, -1) // nobody kills this one
	whole := groupsIn(t, dir)
	if whole >= compactGroups/2 {
		t.Fatalf("%d groups became %d", compactGroups, whole)
	}

	const seed = 9
	rng := rand.New(rand.NewPCG(seed, 1))
	dir = fresh()
	journals, halves, finished := 0, 0, 0
	for kill := range compactKills {
		done, _ := runCompaction(t, dir, time.Duration(rng.Int64N(int64(took))))
		where := fmt.Sprintf("kill %d of seed %d", kill, seed)
		if exists(filepath.Join(dir, journalName)) {
			journals++
		}
		if leftovers(t, dir) > 0 {
			halves++
		}
		r, err := Open(dir)
		if err != nil {
			t.Fatalf("%s: a reader: %v", where, err)
		}
		compareReplay(t, r, "r1", want)
		r.Close()
		d, err := Create(dir, nil)
		if err != nil {
			t.Fatalf("%s: the next writer: %v", where, err)
		}
		compareReplay(t, d, "r1", want)
		if after, err := d.Stored("r1"); err != nil || !mapsEqual(before, after) {
			t.Errorf("%s: %d sequences are stored, before %d: %v", where, len(after), len(before), err)
		}
		d.Close()
		if n := leftovers(t, dir); n > 0 || exists(filepath.Join(dir, journalName)) {
			t.Errorf("%s: the next writer left %d temporary files, or the journal", where, n)
		}
		if t.Failed() {
			t.Fatalf("%s: stopping here", where)
		}
		if done || groupsIn(t, dir) == whole { // nothing is left to kill
			finished++
			dir = fresh()
		}
	}
	if done, _ := runCompaction(t, dir, -1); !done || leftovers(t, dir) > 0 {
		t.Error("the last compaction, which nobody killed, left something undone")
	}
	r, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	compareReplay(t, r, "r1", want)
	r.Close()
	t.Logf("%d kills: %d while a merge was changing places, %d with half-written files, %d after the end; a compaction takes %s",
		compactKills, journals, halves, finished, took.Round(time.Millisecond))
	if journals+halves == 0 {
		t.Error("no kill came in the middle of a merge")
	}
}

// groupsIn counts the files of states.
func groupsIn(t *testing.T, dir string) (n int) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(dir, schemas.TableStates), func(path string, _ fs.DirEntry, err error) error {
		if filepath.Ext(path) == ".parquet" {
			n++
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}
