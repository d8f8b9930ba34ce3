package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// crashArgs is a job of a few seconds.
func crashArgs(out string) []string {
	return []string{"run", "--limit", "5", "--budgets", "8", "--out", out}
}

// answers is everything that a dataset says, in one order.
func answers(t *testing.T, dir string) string {
	t.Helper()
	var all strings.Builder
	for _, sql := range []string{
		"SELECT * EXCLUDE (created_at) FROM sequences ORDER BY ALL",
		"FROM tokens ORDER BY ALL",
		"SELECT seq_id, pos, state, norm, list_sum(vec) FROM states ORDER BY ALL",
		"FROM drafts ORDER BY ALL", "FROM slots ORDER BY ALL", "FROM rounds ORDER BY ALL", "FROM faults ORDER BY ALL",
	} {
		var out, errs bytes.Buffer
		if code := run(t.Context(), []string{"query", "--dataset", dir, "--format", "csv", sql}, &out, &errs); code != exitOK {
			t.Fatalf("%s: exit %d: %s", sql, code, errs.String())
		}
		all.Write(out.Bytes())
	}
	return all.String()
}

// interrupted starts the job in a process of its own, sends it sig at some
// moment after it began to capture, and returns its exit code.
func interrupted(t *testing.T, out string, sig os.Signal, after time.Duration) int {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, crashArgs(out)...)
	// A program with the race detector sleeps for a second at its very end, when
	// nobody listens to signals any more.
	cmd.Env = append(os.Environ(), asProgram+"=1", "GORACE=atexit_sleep_ms=0")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(stderr)
	var seen strings.Builder
	for {
		line, err := lines.ReadString('\n')
		seen.WriteString(line)
		if strings.HasPrefix(line, "captured") {
			break
		}
		if err != nil { // there was nothing left to capture
			if err := cmd.Wait(); err != nil {
				t.Fatalf("the job ended before it captured anything: %v: %s", err, seen.String())
			}
			return exitOK
		}
	}
	rest := make(chan struct{})
	go func() {
		defer close(rest)
		io.Copy(&seen, lines)
	}()
	time.Sleep(after)
	if err := cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatal(err)
	}
	<-rest
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if code := cmd.ProcessState.ExitCode(); code != -1 && code != exitOK && code != exitPartial {
		t.Fatalf("exit %d: %s", code, seen.String())
	}
	return cmd.ProcessState.ExitCode()
}

// TestAJobKilledAnywhereEndsAsIfUndisturbed kills jobs at random moments,
// runs them again, and compares every row with an undisturbed job's.
func TestAJobKilledAnywhereEndsAsIfUndisturbed(t *testing.T) {
	dir := t.TempDir()
	finish := func(out string) {
		t.Helper()
		var stdout, stderr bytes.Buffer
		if code := run(context.Background(), crashArgs(out), &stdout, &stderr); code != exitOK {
			t.Fatalf("exit %d: %s", code, stderr.String())
		}
	}
	whole := filepath.Join(dir, "whole")
	start := time.Now()
	finish(whole)
	took := time.Since(start)
	want := answers(t, whole)

	rng := rand.New(rand.NewPCG(1, 2))
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGINT, syscall.SIGTERM} {
		t.Run(sig.String(), func(t *testing.T) {
			out := filepath.Join(dir, sig.String())
			for range 2 {
				code := interrupted(t, out, sig, time.Duration(rng.Int64N(int64(took))))
				if sig != syscall.SIGKILL && code == -1 {
					t.Errorf("%s ended the job instead of draining it", sig)
				}
			}
			finish(out)
			if got := answers(t, out); got != want {
				t.Errorf("the dataset differs from an undisturbed one (%d bytes of answers, want %d)", len(got), len(want))
			}
			left, err := filepath.Glob(filepath.Join(out, "*", "*", "*.tmp"))
			if err != nil || len(left) > 0 {
				t.Errorf("temporary files are left: %v %v", left, err)
			}
		})
	}
}
