package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/draftscope/draftscope/pipeline"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// plainServer is a server that nobody stores from.
func plainServer(t *testing.T) (url string) {
	t.Helper()
	srv, err := pipeline.StartServer(pipeline.Config{Dir: t.TempDir()}, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { srv.Close() })
	return srv.URL()
}

func capturing(url string, more ...string) []string {
	return append([]string{"capture", "--stream-only", "--nats", url, "--run", "r1", "--max-new", "4"}, more...)
}

func storing(url, out string, more ...string) []string {
	return append([]string{"store", "--nats", url, "--run", "r1", "--out", out, "--commit-idle", "50ms", "--lease", "1s"}, more...)
}

// beside runs a command until it ends or stop is called.
func beside(t *testing.T, args ...string) (stderr *transcript, ended chan int, stop func()) {
	t.Helper()
	stderr, ended = new(transcript), make(chan int, 1)
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(stop)
	go func() { ended <- run(ctx, args, new(transcript), stderr) }()
	return stderr, ended, stop
}

// stored counts the sequences of a dataset, and those that have rounds.
func stored(t *testing.T, ds string) string {
	t.Helper()
	got, _ := mustRun(t, exitOK, "query", "--dataset", ds, "--format", "csv",
		"SELECT count(*), (SELECT count(DISTINCT seq_id) FROM rounds) FROM sequences")
	lines := strings.Split(strings.TrimSpace(got), "\n")
	return lines[len(lines)-1]
}

// losePart deletes the files of one commit of the capture.
func losePart(t *testing.T, ds string) {
	t.Helper()
	for _, table := range []string{"sequences", "tokens"} {
		files, err := filepath.Glob(filepath.Join(ds, table, "run=r1", "*.parquet"))
		if err != nil || len(files) == 0 {
			t.Fatal(table, files, err)
		}
		if err := os.Remove(files[0]); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAStoreWithAnotherDatasetReadsTheStreamFromItsBeginning(t *testing.T) {
	url, dir := plainServer(t), t.TempDir()
	worker := []string{"draft", "--nats", url, "--run", "r1", "--budgets", "8", "--once"}
	mustRun(t, exitOK, capturing(url, "--limit", "4")...)
	mustRun(t, exitOK, worker...)
	first := filepath.Join(dir, "first")
	mustRun(t, exitOK, storing(url, first, "--once")...)
	mustRun(t, exitOK, capturing(url, "--limit", "6")...)
	mustRun(t, exitOK, worker...)
	for _, name := range []string{"second", "third", "first"} {
		out := filepath.Join(dir, name)
		got, errs := mustRun(t, exitOK, storing(url, out, "--once")...)
		if !strings.Contains(got, "run r1: 6 sequences stored, 0 faults") {
			t.Errorf("%s: %s%s", name, got, errs)
		}
		if n := stored(t, out); n != "6,6" {
			t.Errorf("%s has %s sequences, drafted on", name, n)
		}
	}
	// A dataset that lacks nothing is not filled again.
	if _, errs := mustRun(t, exitOK, storing(url, first, "--once")...); strings.Contains(errs, "from its beginning") {
		t.Errorf("%s", errs)
	}
}

func TestAStandbyStoreWithAnotherDatasetHasTheWholeRun(t *testing.T) {
	url, dir := plainServer(t), t.TempDir()
	first, ended, stop := beside(t, storing(url, filepath.Join(dir, "first"))...)
	mustRun(t, exitOK, capturing(url, "--limit", "3")...)
	first.await(t, "storing run r1", 1)
	second, _, _ := beside(t, storing(url, filepath.Join(dir, "second"))...)
	second.await(t, "another process stores the run", 1)
	time.Sleep(500 * time.Millisecond)
	stop()
	<-ended
	mustRun(t, exitOK, capturing(url, "--limit", "5")...)
	for end := time.Now().Add(30 * time.Second); stored(t, filepath.Join(dir, "second")) != "5,0"; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("second has %s: %s", stored(t, filepath.Join(dir, "second")), second.String())
		}
	}
}

func TestAPartThatWasDeletedIsStoredAgainFromTheStream(t *testing.T) {
	url, ds := plainServer(t), filepath.Join(t.TempDir(), "ds")
	mustRun(t, exitOK, capturing(url, "--limit", "6")...)
	mustRun(t, exitOK, storing(url, ds, "--once")...)
	losePart(t, ds)
	if got, _ := mustRun(t, exitOK, storing(url, ds, "--once")...); !strings.Contains(got, "6 sequences stored, 0 faults") {
		t.Errorf("%s", got)
	}
	if n := stored(t, ds); n != "6,0" {
		t.Errorf("%s", n)
	}
}

func TestAPartThatWasDeletedAfterItsRunIsCapturedAgain(t *testing.T) {
	url, ds := plainServer(t), filepath.Join(t.TempDir(), "ds")
	serve := []string{"serve", "--nats", url, "--out", ds, "--grace", "1s", "--http", "127.0.0.1:0", "--commit-idle", "50ms"}
	stderr, ended, stop := beside(t, serve...)
	mustRun(t, exitOK, capturing(url, "--limit", "4")...)
	stderr.await(t, "its streams are deleted", 1)
	stop()
	<-ended
	losePart(t, ds)
	stderr, _, _ = beside(t, serve...)
	stderr.await(t, "that were stored are not in .* any more", 1)
	mustRun(t, exitOK, capturing(url, "--limit", "4")...)
	stderr.await(t, "its streams are deleted", 1)
	if n := stored(t, ds); n != "4,0" {
		t.Errorf("%s", n)
	}
}

func TestWhatLeftTheStreamIsMissingAndIsCapturedAgain(t *testing.T) {
	url, dir := plainServer(t), t.TempDir()
	mustRun(t, exitOK, capturing(url, "--limit", "4")...)
	mustRun(t, exitOK, storing(url, filepath.Join(dir, "first"), "--once")...)
	purge(t, url, "DS_r1_capture")
	second := filepath.Join(dir, "second")
	got, errs := mustRun(t, exitPartial, storing(url, second, "--once")...)
	if !strings.Contains(got, "0 sequences stored, 2 faults") || !strings.Contains(errs, "check=missing") || !strings.Contains(errs, "p0000") {
		t.Errorf("%s%s", got, errs)
	}
	if got, _ := mustRun(t, exitOK, capturing(url, "--limit", "4")...); !strings.Contains(got, "4 sequences published") {
		t.Errorf("%s", got)
	}
	// The faults stay, as what has happened.
	if got, _ := mustRun(t, exitPartial, storing(url, second, "--once")...); !strings.Contains(got, "4 sequences stored, 2 faults") {
		t.Errorf("%s", got)
	}
}

func TestARunWhoseBeginningWasPurgedUnreadIsNotCalledWhole(t *testing.T) {
	url, ds := plainServer(t), filepath.Join(t.TempDir(), "ds")
	mustRun(t, exitOK, capturing(url, "--limit", "4", "--partitions", "1")...)
	// The second message is the first sequence's first.
	purge(t, url, "DS_r1_capture", jetstream.WithPurgeSequence(3))
	got, errs := mustRun(t, exitPartial, storing(url, ds, "--once")...)
	if !strings.Contains(got, "3 sequences stored, 1 faults") || !strings.Contains(errs, "4 were published to partition 0 of the capture, 1 of them") {
		t.Errorf("%s%s", got, errs)
	}
}

func TestResultsThatWerePurgedUnreadAreMissing(t *testing.T) {
	url, ds := plainServer(t), filepath.Join(t.TempDir(), "ds")
	mustRun(t, exitOK, capturing(url, "--limit", "2", "--partitions", "1")...)
	mustRun(t, exitOK, "draft", "--nats", url, "--run", "r1", "--budgets", "8", "--once", "--group", "g")
	purge(t, url, pipeline.GroupStreamName("r1", "g", 0))
	got, errs := mustRun(t, exitPartial, storing(url, ds, "--once")...)
	if !strings.Contains(got, "2 sequences stored, 1 faults") || !strings.Contains(errs, "of the results of group g on partition 0 left their stream before they were read") {
		t.Errorf("%s%s", got, errs)
	}
}

func TestAStoreEndsWhenARunHasAgedOutAndSaysWhatIsMissing(t *testing.T) {
	url, ds := plainServer(t), filepath.Join(t.TempDir(), "ds")
	mustRun(t, exitOK, capturing(url, "--limit", "4", "--max-age", "1s")...)
	time.Sleep(2500 * time.Millisecond)
	got, errs := mustRun(t, exitPartial, storing(url, ds, "--once")...)
	if !strings.Contains(got, "0 sequences stored") || !strings.Contains(errs, "check=missing") {
		t.Errorf("%s%s", got, errs)
	}
}

func TestAStoreWhoseDatasetIsDeletedStopsAndAcknowledgesNothingMore(t *testing.T) {
	url, dir := plainServer(t), t.TempDir()
	ds := filepath.Join(dir, "ds")
	stderr, ended, _ := beside(t, storing(url, ds)...)
	mustRun(t, exitOK, capturing(url, "--limit", "2")...)
	stderr.await(t, "storing run r1", 1)
	time.Sleep(time.Second)
	if err := os.RemoveAll(ds); err != nil {
		t.Fatal(err)
	}
	mustRun(t, exitOK, capturing(url, "--limit", "5")...)
	select {
	case code := <-ended:
		if code != exitMissing || !strings.Contains(stderr.String(), "the dataset is gone") {
			t.Errorf("exit %d: %s", code, stderr.String())
		}
	case <-time.After(30 * time.Second):
		t.Fatalf("it goes on: %s", stderr.String())
	}
	if _, err := os.Stat(ds); !os.IsNotExist(err) {
		t.Errorf("the folder is there again: %v", err)
	}
	if got, _ := mustRun(t, exitOK, storing(url, filepath.Join(dir, "other"), "--once")...); !strings.Contains(got, "5 sequences stored, 0 faults") {
		t.Errorf("%s", got)
	}
}

// jetStreamAt talks to a server until the test ends.
func jetStreamAt(t *testing.T, url string) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// purge takes messages out of a stream, read or not.
func purge(t *testing.T, url, stream string, which ...jetstream.StreamPurgeOpt) {
	t.Helper()
	js := jetStreamAt(t, url)
	s, err := js.Stream(t.Context(), stream)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Purge(t.Context(), which...); err != nil {
		t.Fatal(err)
	}
}
