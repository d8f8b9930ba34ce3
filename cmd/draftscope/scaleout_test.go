//go:build fleet

package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func captureArgs(url string, more ...string) []string {
	return slices.Concat([]string{"capture", "--stream-only", "--nats", url}, fleetCapture, more)
}

func draftArgs(url string, more ...string) []string {
	return slices.Concat([]string{"draft", "--nats", url, "--once", "--lease", "1s"}, fleetDraft, more)
}

func storeArgs(url, out string, more ...string) []string {
	return slices.Concat([]string{"store", "--nats", url, "--out", out, "--once", "--groups", "1", "--run", "r1", "--lease", "1s"}, more)
}

// TestAnyNumberOfWorkersGiveTheSameTables runs one, two and four workers as
// processes on an external server, and two with one killed at work.
func TestAnyNumberOfWorkersGiveTheSameTables(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	dir := t.TempDir()
	want := undisturbed(t, dir)
	for _, test := range []struct {
		workers int
		kill    bool
	}{{1, false}, {2, false}, {4, false}, {2, true}} {
		t.Run(fmt.Sprintf("%d workers, killed %t", test.workers, test.kill), func(t *testing.T) {
			here := t.TempDir()
			srv := startNode(t, here, "n", freePort(t), "")
			out := filepath.Join(here, "ds")
			store := draftscope(t, "store", storeArgs(srv.url(), out)...)
			capture := draftscope(t, "capture", captureArgs(srv.url(), "--partitions", "4")...)
			capture.succeed(t, chaosLimit)
			var workers []*process
			for i := range test.workers {
				workers = append(workers, draftscope(t, fmt.Sprint("worker ", i), draftArgs(srv.url())...))
			}
			if test.kill {
				said(t, workers[0], "drafting on run")
				time.Sleep(30 * time.Millisecond)
				workers[0].kill()
				workers = workers[1:]
			}
			for _, w := range workers {
				w.succeed(t, chaosLimit)
			}
			store.succeed(t, chaosLimit)
			if err := differ(answers(t, out), want); err != nil {
				t.Errorf("the tables differ from one process's: %v\nthe end of what the store said:\n%s", err, store.tail())
			}
		})
	}
}

// TestAClusterThatLosesItsLeaderGivesTheSameTables runs three NATS servers
// with three replicas, and kills the one that leads the capture stream.
func TestAClusterThatLosesItsLeaderGivesTheSameTables(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	dir := t.TempDir()
	longer := []string{"--limit", "10", "--max-new", "144", "--batch-rows", "8"}
	want := undisturbed(t, dir, longer...)
	var ports, routes [3]int
	for i := range ports {
		ports[i], routes[i] = freePort(t), freePort(t)
	}
	var peers []string
	for _, p := range routes {
		peers = append(peers, fmt.Sprintf("nats://127.0.0.1:%d", p))
	}
	var nodes [3]*node
	var urls []string
	for i := range nodes {
		nodes[i] = startNode(t, dir, fmt.Sprint("n", i), ports[i],
			fmt.Sprintf("cluster { name: c, listen: \"127.0.0.1:%d\", routes: [%s] }", routes[i], strings.Join(peers, ", ")))
		urls = append(urls, nodes[i].url())
	}
	url := strings.Join(urls, ",")
	out := filepath.Join(dir, "ds")
	store := draftscope(t, "store", storeArgs(url, out, "--replicas", "3")...)
	capture := draftscope(t, "capture", captureArgs(url, append(longer, "--replicas", "3")...)...)
	worker := draftscope(t, "worker", draftArgs(url, "--replicas", "3")...)
	// The leader is found and killed while the source publishes, which stands
	// still for that moment.
	led := leader(t, url)
	capture.signal(syscall.SIGSTOP)
	if !capture.running() {
		t.Fatalf("the source ended before its server was killed:\n%s", capture.tail())
	}
	nodes[led].kill()
	capture.signal(syscall.SIGCONT)
	time.Sleep(2 * time.Second)
	nodes[led].up(t)
	for _, p := range []*process{capture, worker, store} {
		p.succeed(t, 2*chaosLimit)
	}
	if err := differ(answers(t, out), want); err != nil {
		t.Errorf("the tables differ from an undisturbed run's: %v\nthe end of what the store said:\n%s", err, store.tail())
	}
}

// leader waits until the capture stream has a leader and returns its number.
func leader(t *testing.T, url string) int {
	t.Helper()
	nc, err := nats.Connect(url, nats.MaxReconnects(-1))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	for range 6000 {
		stream, err := js.Stream(t.Context(), "DS_r1_capture")
		if err == nil && stream.CachedInfo().Cluster != nil && stream.CachedInfo().State.Msgs > 6 {
			var i int
			if _, err := fmt.Sscanf(stream.CachedInfo().Cluster.Leader, "n%d", &i); err == nil {
				return i
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatal("the capture stream has no leader")
	return 0
}
