package pipeline

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestAFullDiskUnderTheEmbeddedServerIsAClearErrorAndLosesNothing fills the
// disk of the server's store in the middle of a run. The server answers no
// more after that, also when there is room again.
func TestAFullDiskUnderTheEmbeddedServerIsAClearErrorAndLosesNothing(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting a tmpfs needs root")
	}
	mem := checked(t)
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=16m"); err != nil {
		t.Skipf("no tmpfs here: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	sh, _ := openShelf("")
	cfg := Config{Run: "r", Dir: filepath.Join(dir, "stream"), Allocator: mem, CommitSequences: 2, ackTimeout: time.Second, OutageTimeout: 20 * time.Second}
	ballast := filepath.Join(dir, "ballast")
	left := ids(20)
	src := &testSource{mem: mem, ids: left, records: 3, rows: 60}
	src.onNext = func(seq string, rec int) error {
		if seq != left[9] || rec != 1 {
			return nil
		}
		f, err := os.Create(ballast)
		if err != nil {
			return err
		}
		for size := 1 << 20; size > 0; size /= 16 {
			for err = nil; err == nil; {
				_, err = f.Write(make([]byte, size))
			}
		}
		if !errors.Is(err, syscall.ENOSPC) {
			return err
		}
		return f.Close()
	}
	start := time.Now()
	_, err := Run(t.Context(), cfg, src, stages(mem, nil), sh.sink)
	if !errors.Is(err, ErrServerFailed) && !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "free some space") {
		t.Fatalf("a full disk: %v", err)
	}
	t.Logf("%s: %v", time.Since(start).Round(time.Millisecond), err)
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	// What a run command does: it asks for what is not stored yet.
	var todo []string
	for _, seq := range left {
		_, a := sh.stored[CaptureStream][seq]
		_, b := sh.stored[ResultsStream][seq]
		if !a || !b {
			todo = append(todo, seq)
		}
	}
	if _, err := Run(t.Context(), cfg, &testSource{mem: mem, ids: todo, records: 3, rows: 60}, stages(mem, nil), sh.sink); err != nil {
		t.Fatal(err)
	}
	capture, results := want(left, 3, 60)
	sh.check(t, CaptureStream, capture)
	sh.check(t, ResultsStream, results)
}
