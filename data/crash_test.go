package data

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/schemas"
	"github.com/google/go-cmp/cmp"
)

// crashDir makes the test binary a writer that is to be killed.
const crashDir = "DRAFTSCOPE_TEST_CRASH_DIR"

const crashSequences = 24

func crashID(i int) string { return fmt.Sprintf("p%04d", i) }

// writeUntilKilled is the process that the next test kills. It captures
// and scores every sequence that is not stored yet, three to a commit.
func writeUntilKilled(t *testing.T, dir string) {
	d := mustCreate(t, dir)
	run := testRun("r1", 32, schemas.BF16)
	if err := d.AddRun(run); err != nil {
		t.Fatal(err)
	}
	if err := d.AddDrafter("r1", Drafter{Name: "good"}); err != nil {
		t.Fatal(err)
	}
	fmt.Println("ready")
	mem := memory.NewGoAllocator()
	c, err := d.CaptureSink("r1", 0, SinkConfig{Stream: "STATES"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r, err := d.ResultSink("r1", 0, SinkConfig{Stream: "RESULTS"})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for i := range crashSequences {
		// Like a stream after a crash: everything comes again.
		id := crashID(i)
		feed(t, c, id, uint64(i+1), newSample(run, id, 20+i).records(t, mem, 8))
		feed(t, r, id, uint64(i+1), sampleResults(id, "good").records(mem, "r1"))
		if i%3 == 2 {
			if err := c.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := r.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	fmt.Println("done")
}

func TestKilledWritersStoreEverythingOnce(t *testing.T) {
	if dir := os.Getenv(crashDir); dir != "" { // the child
		writeUntilKilled(t, dir)
		return
	}
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	dir := t.TempDir()
	kills, inside := 0, 0
	for kills < 6 {
		kills++
		finished := runWriter(t, dir, time.Duration(rng.IntN(60_000))*time.Microsecond)
		if unfinished(t, dir) {
			inside++
		}
		if finished { // before the kill came: begin anew, or nothing is left to do
			checkExactlyOnce(t, dir)
			dir = t.TempDir()
		}
	}
	if !runWriter(t, dir, 0) {
		t.Fatal("the writer that nobody killed did not get to its end")
	}
	checkExactlyOnce(t, dir)
	t.Logf("%d kills, %d of them in the middle of a commit", kills, inside)
}

// runWriter runs the writer and kills it some time after it opened the
// dataset; 0 lets it live. It reports whether the writer got to its end.
func runWriter(t *testing.T, dir string, after time.Duration) (finished bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledWritersStoreEverythingOnce$", "-test.count=1")
	cmd.Env = append(os.Environ(), crashDir+"="+dir)
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
	if after > 0 {
		time.Sleep(after)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	for lines.Scan() {
		finished = finished || lines.Text() == "done"
	}
	if err := cmd.Wait(); err != nil && after == 0 {
		t.Fatal(err)
	}
	return finished
}

// unfinished reports whether the killed writer left a part of a commit.
func unfinished(t *testing.T, dir string) bool {
	t.Helper()
	d := &Dataset{dir: dir}
	found := false
	for _, table := range storedTables {
		err := filepath.WalkDir(filepath.Join(dir, table), func(path string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // a table that has nothing yet
			}
			if err != nil || e.IsDir() {
				return err
			}
			marker := d.markerOf(table, path)
			found = found || strings.HasSuffix(path, tmpSuffix) || marker != "" && !exists(marker)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
}

func checkExactlyOnce(t *testing.T, dir string) {
	t.Helper()
	d := mustCreate(t, dir)
	defer d.Close()
	if unfinished(t, dir) {
		t.Error("an unfinished commit outlived the recovery")
	}
	run := testRun("r1", 32, schemas.BF16)
	want := map[string]sample{}
	var rounds []schemas.Round
	for i := range crashSequences {
		id := crashID(i)
		want[id] = newSample(run, id, 20+i)
		rounds = append(rounds, sampleResults(id, "good").rounds...)
	}
	src, err := d.Replay("r1", ReplayConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	got := replayAll(t, src) // which fails when one comes twice
	if len(got) != len(want) {
		t.Errorf("%d sequences, want %d", len(got), len(want))
	}
	for id, w := range want {
		if diff := cmp.Diff(w.states, got[id].states); diff != "" {
			t.Errorf("states of %s differ", id)
		}
	}
	if diff := cmp.Diff(rounds, stored[schemas.Round](t, d, "rounds")); diff != "" {
		t.Errorf("rounds (-want +got):\n%s", diff)
	}
	if faults, err := d.Faults("r1"); err != nil || len(faults) > 0 {
		t.Errorf("faults %+v (%v): a repeat was taken for another", faults, err)
	}
}
