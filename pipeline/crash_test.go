package pipeline

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/memory"
)

// The run that the crash tests kill.
const (
	crashSeqs    = 24
	crashRecords = 4
	crashRows    = 30
)

func crashConfig(dir string) Config {
	return Config{
		Run: "crash", Dir: filepath.Join(dir, "stream"), Partitions: 2, ChunkBytes: 2500,
		CommitSequences: 5, CommitIdle: 20 * time.Millisecond,
	}
}

// crashRun does what a run command does: it asks the source only for what is
// not stored yet.
func crashRun(ctx context.Context, cfg Config, dir string, sh *shelf) (Summary, error) {
	mem := memory.NewGoAllocator()
	todo := slices.DeleteFunc(ids(crashSeqs), func(seq string) bool {
		_, a := sh.stored[CaptureStream][seq]
		_, b := sh.stored[ResultsStream][seq]
		return a && b
	})
	src := &testSource{mem: mem, ids: todo, records: crashRecords, rows: crashRows}
	return Run(ctx, cfg, src, stages(mem, nil), sh.sink)
}

// crashChild is the body of the process that TestKilledProcesses kills.
func crashChild(dir string) int {
	sh, err := openShelf(filepath.Join(dir, "shelf"))
	if err == nil {
		_, err = crashRun(context.Background(), crashConfig(dir), dir, sh)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func checkCrashed(t *testing.T, dir string) {
	t.Helper()
	sh, err := openShelf(filepath.Join(dir, "shelf"))
	if err != nil {
		t.Fatal(err)
	}
	capture, results := want(ids(crashSeqs), crashRecords, crashRows)
	sh.check(t, CaptureStream, capture)
	sh.check(t, ResultsStream, results)
}

func TestKilledProcessesLoseAndDoubleNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	rng := rand.New(rand.NewPCG(1, 2))
	dir := t.TempDir()
	kills := 0
	for try := 0; ; try++ {
		if try == 200 {
			t.Fatal("no end after 200 processes")
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), "PIPELINE_TEST_CHILD="+dir)
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		delay := 30 + rng.IntN(300+try*120)
		timer := time.AfterFunc(time.Duration(delay)*time.Millisecond, func() { _ = cmd.Process.Kill() })
		err := cmd.Wait()
		timer.Stop()
		if err == nil {
			break
		}
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Exited() {
			t.Fatalf("the process failed by itself: %v", err)
		}
		kills++
	}
	checkCrashed(t, dir)
	t.Logf("%d kills", kills)
}

func TestHardCancelsLoseAndDoubleNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	dir := t.TempDir()
	cancels := 0
	for try := 0; ; try++ {
		if try == 200 {
			t.Fatal("no end after 200 runs")
		}
		sh, err := openShelf(filepath.Join(dir, "shelf"))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(10+rng.IntN(200+try*120))*time.Millisecond)
		_, err = crashRun(ctx, crashConfig(dir), dir, sh)
		cancel()
		if err == nil {
			break
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		cancels++
	}
	checkCrashed(t, dir)
	t.Logf("%d cancels", cancels)
}

// TestWhatIsPublishedIsStoredWithoutItsSource takes the source away: after the
// first run every sequence is in the stream and nowhere else, so that an ack
// before its time would show as a loss.
func TestWhatIsPublishedIsStoredWithoutItsSource(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	dir := t.TempDir()
	cfg := crashConfig(dir)
	mem := memory.NewGoAllocator()
	slow := stages(mem, func(string) error { time.Sleep(2 * time.Millisecond); return nil })
	left := ids(crashSeqs)
	for try := 0; ; try++ {
		sh, err := openShelf(filepath.Join(dir, "shelf"))
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			for try == 0 && ctx.Err() == nil && !allPublished(ctx, s) {
				time.Sleep(time.Millisecond)
			}
			if try > 0 {
				time.Sleep(time.Duration(10+rng.IntN(100+try*30)) * time.Millisecond)
			}
			cancel()
		}()
		_, err = s.Run(ctx, &testSource{mem: mem, ids: left, records: crashRecords, rows: crashRows}, slow, sh.sink)
		cancel()
		<-stopped
		if cerr := s.Close(); cerr != nil {
			t.Fatal(cerr)
		}
		left = nil
		if err == nil {
			t.Logf("%d cancels", try)
			break
		}
		if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if try == 0 && len(sh.stored[ResultsStream]) == crashSeqs {
			t.Fatal("nothing was left for the runs without a source")
		}
	}
	checkCrashed(t, dir)
}

// allPublished says that every partition of the capture stream ends with the
// end-of-run marker.
func allPublished(ctx context.Context, s *Session) bool {
	stream, err := s.js.Stream(ctx, StreamName(s.cfg.Run, CaptureStream))
	if err != nil {
		return false
	}
	for p := range s.cfg.Partitions {
		m, err := stream.GetLastMsgForSubject(ctx, Subject(s.cfg.Run, CaptureStream, p))
		if err != nil || kind(m.Header.Get(hdrKind)) != kindEndOfRun {
			return false
		}
	}
	return true
}
