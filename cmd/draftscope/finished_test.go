package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// transcript is written by a command and read by a test meanwhile.
type transcript struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *transcript) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *transcript) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// await waits until the buffer matches, and returns what the first group of
// the pattern has caught.
func (l *transcript) await(t *testing.T, pattern string, times int) string {
	t.Helper()
	re := regexp.MustCompile(pattern)
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if m := re.FindAllStringSubmatch(l.String(), -1); len(m) >= times {
			return m[times-1][len(m[0])-1]
		}
		if time.Now().After(deadline) {
			t.Fatalf("%q did not come %d times: %s", pattern, times, l.String())
		}
	}
}

// serving runs serve beside the test and returns its URL.
func serving(t *testing.T, args ...string) (url string, stderr *transcript) {
	t.Helper()
	stderr = new(transcript)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan int, 1)
	go func() {
		ended <- run(ctx, append([]string{"serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--commit-idle", "50ms"}, args...), new(transcript), stderr)
	}()
	t.Cleanup(func() { stop(); <-ended })
	return stderr.await(t, `NATS server at (\S+)`, 1), stderr
}

func mustRun(t *testing.T, want int, args ...string) (stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	if code := run(t.Context(), args, &out, &errs); code != want {
		t.Fatalf("%v: exit %d, want %d: %s%s", args, code, want, out.String(), errs.String())
	}
	return out.String(), errs.String()
}

func TestServeDeletesTheStreamsOfARunThatIsOverAndTakesItUpAgain(t *testing.T) {
	dir := t.TempDir()
	ds := filepath.Join(dir, "ds")
	url, stderr := serving(t, "--out", ds, "--grace", "6s", "--states-encoding", "fp8-e4m3")
	source := []string{"capture", "--stream-only", "--nats", url, "--max-new", "10", "--run", "r1"}
	worker := []string{"draft", "--nats", url, "--run", "r1", "--budgets", "8", "--once"}
	drafting := make(chan string, 1) // it is known before the streams go, or waits for more for ever
	go func() {
		var errs bytes.Buffer
		if code := run(t.Context(), worker, new(bytes.Buffer), &errs); code != exitOK {
			drafting <- errs.String()
		}
		close(drafting)
	}()
	time.Sleep(200 * time.Millisecond)
	mustRun(t, exitOK, append(source, "--limit", "2")...)
	select {
	case errs := <-drafting:
		if errs != "" {
			t.Fatal(errs)
		}
	case <-time.After(time.Minute):
		t.Fatal("the worker has not ended: it needed longer than the grace to join")
	}
	stderr.await(t, "run r1 is over, and stored: its streams are deleted", 1)
	if got, _ := mustRun(t, exitOK, "inspect", "--nats", url, ds); !strings.Contains(got, "2 sequences captured, of which "+ds+" has 2 stored, 0 set aside, 0 missing") || strings.Contains(got, "DS_r1") {
		t.Errorf("inspect says %s", got)
	}

	// The same run goes on with one input more.
	_, errs := mustRun(t, exitOK, append(source, "--limit", "3")...)
	if !strings.Contains(errs, "2 of 3 sequences are in the stream, or have been") {
		t.Errorf("the source says %s", errs)
	}
	mustRun(t, exitOK, worker...)
	stderr.await(t, "run r1 is over, and stored: its streams are deleted", 2)
	got, _ := mustRun(t, exitOK, "query", "--dataset", ds, "--format", "csv",
		"SELECT count(*), (SELECT count(DISTINCT seq_id) FROM rounds WHERE drafter = 'good') FROM sequences")
	if !strings.HasSuffix(got, "\n3,3\n") {
		t.Errorf("stored, drafted on: %s", got)
	}
	b, err := os.ReadFile(filepath.Join(ds, "dataset.json"))
	if err != nil || !bytes.Contains(b, []byte(`"states_encoding": "fp8-e4m3"`)) {
		t.Errorf("dataset.json: %v, %s", err, b)
	}
}

func TestASequenceIsDeletedFromTheStreamsOfARun(t *testing.T) {
	ds := filepath.Join(t.TempDir(), "ds")
	url, stderr := serving(t, "--out", ds, "--keep-streams")
	source := []string{"capture", "--stream-only", "--nats", url, "--max-new", "4", "--run", "r1", "--limit", "3"}
	mustRun(t, exitOK, source...)
	stderr.await(t, "storing run r1", 1)
	if got, _ := mustRun(t, exitOK, "delete", "--nats", url, "--run", "r1", "--sequence", "p0001"); !strings.HasPrefix(got, "run r1: sequence p0001 deleted, ") {
		t.Errorf("delete says %s", got)
	}
	if _, errs := mustRun(t, exitUsage, "delete", "--nats", url, "--run", "r1", "--sequence", "p0001"); !strings.Contains(errs, "no such sequence") {
		t.Errorf("delete says %s", errs)
	}
	if got, _ := mustRun(t, exitOK, "inspect", "--nats", url); !strings.Contains(got, "2 sequences captured; 1 deleted") {
		t.Errorf("inspect says %s", got)
	}
	if _, errs := mustRun(t, exitOK, source...); !strings.Contains(errs, "3 of 3 sequences are in the stream, or have been") {
		t.Errorf("the source says %s", errs)
	}
	mustRun(t, exitUsage, "delete", "--nats", url, "--run", "r1")
	mustRun(t, exitUsage, "delete", "--run", "r1", "--sequence", "p0001")
	if got, _ := mustRun(t, exitOK, "delete", "--nats", url, "--run", "r1", "--sequence", "p0000", "--json"); !strings.Contains(got, `"sequence": "p0000"`) {
		t.Errorf("delete says %s", got)
	}
}
