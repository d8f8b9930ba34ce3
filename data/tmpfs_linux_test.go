package data

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

func TestATinyDiskGivesOneClearError(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting a tmpfs needs root; TestAFullDiskAnywhereInACommitLosesNothing covers the rest")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("no tmpfs here: %v", err)
	}
	defer syscall.Unmount(dir, 0)
	run := testRun("r1", 256, schemas.F32)
	d, err := Create(filepath.Join(dir, "out"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := d.AddRun(run); err != nil {
		t.Fatal(err)
	}
	mem := checked(t)
	s := mustSink(t, d)
	defer s.Close()
	small, large := newSample(run, "p0", 10), newSample(run, "p1", 400)
	feed(t, s, "p0", 1, small.records(t, mem, 64))
	if err := s.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	feed(t, s, "p1", 2, large.records(t, mem, 64))
	if err := s.Commit(t.Context()); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "free space") {
		t.Errorf("Commit on a full disk: %v, want ENOSPC with a remedy", err)
	}
	if n := leftovers(t, dir); n > 0 {
		t.Errorf("%d temporary files left on the full disk", n)
	}
	compareReplay(t, d, "r1", map[string]sample{"p0": small})
}
