//go:build fleet

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// drained says that the server has nothing left that the store has not.
func drained(t *testing.T, url, out string, sequences int) bool {
	t.Helper()
	var stdout, stderr bytes.Buffer
	if run(t.Context(), []string{"inspect", "--nats", url, "--json", out}, &stdout, &stderr) != exitOK {
		return false
	}
	var found serverFound
	if err := json.Unmarshal(stdout.Bytes(), &found); err != nil {
		t.Fatal(err)
	}
	if len(found.Runs) == 0 {
		return true // serve has deleted the streams of the run, which is over
	}
	if len(found.Runs) != 1 || found.Runs[0].Captured != sequences || found.Runs[0].Stored != sequences {
		return false
	}
	for _, s := range found.Runs[0].Streams {
		if lag, ok := s.Lag["store"]; lag > 0 || !ok {
			return false
		}
	}
	return true
}

// TestChaosOfServeLosesAndDoublesNothing kills, stops and freezes "draftscope
// serve", server and store in one, while a source and two workers use it.
func TestChaosOfServeLosesAndDoublesNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	want := undisturbed(t, t.TempDir(), chaosCapture...)
	for i := range max(1, *chaosRuns/5) {
		seed := *chaosSeed + uint64(i)
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(seed, 15))
			out := filepath.Join(t.TempDir(), "ds")
			addr := "127.0.0.1:" + strconv.Itoa(freePort(t))
			up := func() *process {
				return draftscope(t, "serve", "serve", "--listen", addr, "--http", "", "--out", out, "--lease", "1s", "--ack-wait", "1s", "--commit-idle", "50ms")
			}
			serve := up()
			said(t, serve, "storing into")
			stop, watched := make(chan struct{}), make(chan error, 1)
			go func() {
				_, err := readable(out, stop)
				watched <- err
			}()
			others := []*process{
				draftscope(t, "source", captureArgs("nats://"+addr, chaosCapture...)...),
				draftscope(t, "worker0", draftArgs("nats://"+addr)...), draftscope(t, "worker1", draftArgs("nats://"+addr)...),
			}
			var log []string
			for range 1 + rng.IntN(3) {
				time.Sleep(time.Duration(300+rng.IntN(1200)) * time.Millisecond)
				switch rng.IntN(3) {
				case 0:
					log = append(log, "kill -9")
					serve.kill()
					serve = up()
				case 1:
					log = append(log, "stop")
					serve.signal(syscall.SIGTERM)
					serve.succeed(t, chaosLimit)
					serve = up()
				case 2:
					log = append(log, "freeze")
					serve.signal(syscall.SIGSTOP)
					time.Sleep(time.Duration(500+rng.IntN(1500)) * time.Millisecond)
					serve.signal(syscall.SIGCONT)
				}
			}
			for _, p := range others {
				p.succeed(t, chaosLimit)
			}
			for end := time.Now().Add(chaosLimit); !drained(t, "nats://"+addr, out, 8); time.Sleep(50 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("seed %d: serve has not stored everything after %s:\n%s", seed, chaosLimit, serve.tail())
				}
			}
			serve.signal(syscall.SIGTERM)
			serve.succeed(t, chaosLimit)
			close(stop)
			if err := <-watched; err != nil {
				t.Errorf("a file was unreadable: %v", err)
			}
			t.Logf("serve: %s", strings.Join(log, ", "))
			if err := differ(answers(t, out), want); err != nil {
				t.Errorf("seed %d: %v\nthe end of what serve said:\n%s", seed, err, serve.tail())
			}
		})
	}
}
