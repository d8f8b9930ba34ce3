package main

import (
	"bytes"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
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
			capture.succeed(t, time.Minute)
			var workers []*process
			for i := range test.workers {
				workers = append(workers, draftscope(t, fmt.Sprint("worker ", i), draftArgs(srv.url())...))
			}
			if test.kill {
				for range 200 {
					if strings.Contains(workers[0].log.String(), "drafting on run") {
						break
					}
					time.Sleep(10 * time.Millisecond)
				}
				time.Sleep(30 * time.Millisecond)
				workers[0].kill()
				workers = workers[1:]
			}
			for _, w := range workers {
				w.succeed(t, time.Minute)
			}
			store.succeed(t, time.Minute)
			if err := differ(answers(t, out), want); err != nil {
				t.Errorf("the tables differ from one process's: %v", err)
			}
		})
	}
}

// TestAClusterThatLosesItsLeaderGivesTheSameTables runs three NATS servers
// with three replicas, and kills the one that leads the capture stream.
func TestAClusterThatLosesItsLeaderGivesTheSameTables(t *testing.T) {
	dir := t.TempDir()
	want := undisturbed(t, dir)
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
	capture := draftscope(t, "capture", captureArgs(url, "--replicas", "3")...)
	worker := draftscope(t, "worker", draftArgs(url, "--replicas", "3")...)
	// The leader is found and killed while the source publishes.
	led := leader(t, url, capture)
	nodes[led].kill()
	time.Sleep(2 * time.Second)
	nodes[led].up(t)
	for _, p := range []*process{capture, worker, store} {
		p.succeed(t, 2*time.Minute)
	}
	if err := differ(answers(t, out), want); err != nil {
		t.Errorf("the tables differ from an undisturbed run's: %v", err)
	}
}

// leader waits until the capture stream has its three replicas and returns
// the number of the server that leads it.
func leader(t *testing.T, url string, capture *process) int {
	t.Helper()
	var out, errs bytes.Buffer
	for range 300 {
		out.Reset()
		errs.Reset()
		code := run(t.Context(), []string{"inspect", "--nats", url, "--json"}, &out, &errs)
		for i := range 3 {
			if code == exitOK && strings.Contains(out.String(), fmt.Sprintf(`"leader": "n%d"`, i)) {
				return i
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("the capture stream did not appear: %s%s%s", out.String(), errs.String(), capture.log.String())
	return 0
}
