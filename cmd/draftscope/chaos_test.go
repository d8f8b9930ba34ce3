//go:build fleet

package main

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/draftscope/draftscope/data"
)

var (
	chaosRuns  = flag.Int("chaos.runs", 2, "runs of the fault campaign")
	chaosFault = flag.Int("chaos.fault", -1, "always this fault, by its number in the code")
	chaosSeed  = flag.Uint64("chaos.seed", 1, "seed of its first run; each run has the next")
)

// chaos is one disturbed run: a source, two workers and a store as processes,
// on a real NATS server behind a link that can be cut. Whatever ends before
// its time is started again, as a supervisor would.
type chaos struct {
	t      *testing.T
	rng    *rand.Rand
	dir    string
	srv    *node
	link   *link
	mu     sync.Mutex
	roles  map[string]*process
	down   map[string]bool // ended well, or is kept down
	starts map[string]int
	log    []string
	ends   []string // how roles ended before their time
	out    string
}

const chaosOptions = "max_payload: 8MB\n"

// chaosCapture makes the run a little longer than the programs take to start.
var chaosCapture = []string{"--limit", "8", "--max-new", "64"}

func (c *chaos) note(format string, args ...any) {
	c.log = append(c.log, fmt.Sprintf(format, args...))
}

// args are the command lines of the roles.
func (c *chaos) args(role string) []string {
	url := c.link.url()
	switch role {
	case "source":
		return captureArgs(url, chaosCapture...)
	case "store":
		return storeArgs(url, c.out, "--ack-wait", "1s", "--commit-idle", "50ms")
	}
	return draftArgs(url, "--ack-wait", "1s")
}

// mind starts what is not running until everything has ended well. It returns
// the names of those still at work.
func (c *chaos) mind() (busy []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, role := range []string{"source", "worker0", "worker1", "store"} {
		p := c.roles[role]
		if p != nil && !p.running() && p.cmd.ProcessState.ExitCode() == exitOK {
			c.down[role] = true
		}
		if c.down[role] {
			continue
		}
		busy = append(busy, role)
		if p == nil || !p.running() {
			c.starts[role]++
			if p != nil && c.starts[role] < 5 {
				lines := strings.Split(strings.TrimSpace(p.log.String()), "\n")
				c.ends = append(c.ends, fmt.Sprintf("%s ended with %d: %s", role, p.cmd.ProcessState.ExitCode(), lines[len(lines)-1]))
			}
			c.roles[role] = draftscope(c.t, role, c.args(role)...)
		}
	}
	return busy
}

// victim picks a role that is running.
func (c *chaos) victim(roles ...string) *process {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.roles[roles[c.rng.IntN(len(roles))]]
	if p == nil || !p.running() {
		return nil
	}
	return p
}

// idle says that everything has ended well.
func (c *chaos) idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.down) == len(c.roles)
}

// disturb does one of the faults, and says whether it met a victim.
func (c *chaos) disturb() bool {
	if c.idle() {
		return false
	}
	before := len(c.log)
	all := []string{"source", "worker0", "worker1", "store"}
	what := c.rng.IntN(8)
	if *chaosFault >= 0 {
		what = *chaosFault
	}
	switch what {
	case 0, 1:
		if p := c.victim(all...); p != nil {
			c.note("kill -9 %s", p.name)
			p.kill()
		}
	case 2:
		if p := c.victim(all...); p != nil {
			c.note("stop %s", p.name)
			p.signal(syscall.SIGTERM)
		}
	case 3:
		c.note("kill -9 server")
		c.srv.kill()
		time.Sleep(time.Duration(c.rng.IntN(400)) * time.Millisecond)
		c.srv.up(c.t)
	case 4:
		c.note("stop server")
		c.srv.signal(syscall.SIGTERM)
		c.srv.exit(c.t, 20*time.Second)
		time.Sleep(time.Duration(c.rng.IntN(400)) * time.Millisecond)
		c.srv.up(c.t)
	case 5:
		if p := c.victim("worker0", "worker1", "store"); p != nil {
			c.note("freeze %s", p.name)
			p.signal(syscall.SIGSTOP)
			time.Sleep(1500*time.Millisecond + time.Duration(c.rng.IntN(1500))*time.Millisecond)
			p.signal(syscall.SIGCONT)
		}
	case 6:
		limit := []string{"64KB", "96KB", "256KB"}[c.rng.IntN(3)]
		c.note("max_payload %s and restart", limit)
		conf, err := os.ReadFile(c.srv.conf)
		if err != nil {
			c.t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(string(conf)), "\n")
		lines[len(lines)-1] = "max_payload: " + limit + "\n"
		if err := os.WriteFile(c.srv.conf, []byte(strings.Join(lines, "\n")), 0o644); err != nil {
			c.t.Fatal(err)
		}
		c.srv.kill()
		c.srv.up(c.t)
	case 7:
		c.note("cut the server off")
		c.link.cut(true)
		time.Sleep(time.Duration(200+c.rng.IntN(2500)) * time.Millisecond)
		c.link.cut(false)
	}
	return len(c.log) > before
}

// smallDisk mounts a tmpfs of a few pages at the dataset's folder, and gives
// it room later. It needs root; without, the fault is not in the campaign.
func (c *chaos) smallDisk() (grow func(), ok bool) {
	if os.Geteuid() != 0 {
		return nil, false
	}
	if err := os.MkdirAll(c.out, 0o755); err != nil {
		c.t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", c.out, "tmpfs", 0, "size=64k"); err != nil {
		return nil, false
	}
	c.note("dataset on a full disk")
	c.t.Cleanup(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, p := range c.roles {
			p.kill()
		}
		if err := syscall.Unmount(c.out, syscall.MNT_DETACH); err != nil {
			c.t.Errorf("unmounting: %v", err)
		}
	})
	return func() {
		if err := syscall.Mount("tmpfs", c.out, "tmpfs", syscall.MS_REMOUNT, "size=256m"); err != nil {
			c.t.Errorf("giving the disk room: %v", err)
		}
		c.note("disk has room again")
	}, true
}

// readable looks at every Parquet file as it appears, until stop is closed:
// none may be unreadable at any instant.
func readable(dir string, stop <-chan struct{}) (files int, err error) {
	seen := map[string]bool{}
	for done := false; !done; {
		select {
		case <-stop:
			done = true
		case <-time.After(50 * time.Millisecond):
		}
		paths, gerr := filepath.Glob(filepath.Join(dir, "*", "*", "*", "*.parquet"))
		flat, ferr := filepath.Glob(filepath.Join(dir, "*", "*", "*.parquet"))
		if err = errors.Join(err, gerr, ferr); err != nil {
			return len(seen), err
		}
		for _, path := range append(paths, flat...) {
			if seen[path] {
				continue
			}
			seen[path] = true
			if _, err := data.Describe(path); err != nil {
				return len(seen), err
			}
		}
	}
	return len(seen), err
}

func (c *chaos) run(want string) error {
	c.srv = startNode(c.t, c.dir, "n", freePort(c.t), chaosOptions)
	c.link = newLink(c.t, net.JoinHostPort("127.0.0.1", strconv.Itoa(c.srv.port)))
	c.out = filepath.Join(c.dir, "ds")
	grow := func() {}
	if c.rng.IntN(8) == 0 {
		if g, ok := c.smallDisk(); ok {
			grow = g
		}
	}
	stop, watched := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := readable(c.out, stop)
		watched <- err
	}()
	disturbed := make(chan struct{})
	go func() {
		defer close(disturbed)
		time.Sleep(300 * time.Millisecond) // the programs start
		for n := 1 + c.rng.IntN(3); n > 0; {
			time.Sleep(time.Duration(c.rng.IntN(900)) * time.Millisecond)
			if c.disturb() || c.idle() {
				n--
			}
		}
		grow()
	}()
	deadline := time.Now().Add(90 * time.Second)
	for {
		busy := c.mind()
		if len(busy) == 0 {
			break
		}
		if time.Now().After(deadline) {
			for _, role := range busy {
				c.roles[role].signal(syscall.SIGQUIT) // prints its goroutines
				<-c.roles[role].done
				c.t.Logf("%s:\n%s", role, c.roles[role].log.String())
			}
			return fmt.Errorf("%v did not end", busy)
		}
		time.Sleep(20 * time.Millisecond)
	}
	<-disturbed
	close(stop)
	if err := <-watched; err != nil {
		return fmt.Errorf("a file was unreadable: %w", err)
	}
	return differ(answers(c.t, c.out), want)
}

// TestChaosLosesAndDoublesNothing disturbs runs at random moments and compares
// every row with an undisturbed run's. "task chaos" makes it a campaign.
func TestChaosLosesAndDoublesNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	want := undisturbed(t, t.TempDir(), chaosCapture...)
	faults := map[string]int{}
	for i := range *chaosRuns {
		seed := *chaosSeed + uint64(i)
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			c := &chaos{
				t: t, rng: rand.New(rand.NewPCG(seed, 14)), dir: t.TempDir(),
				roles: map[string]*process{}, down: map[string]bool{}, starts: map[string]int{},
			}
			begin := time.Now()
			err := c.run(want)
			t.Logf("%.1f s: %s; starts %v", time.Since(begin).Seconds(), strings.Join(c.log, ", "), c.starts)
			for _, e := range c.ends {
				t.Log("  ", e)
			}
			if err != nil {
				t.Error(err)
			}
			for _, l := range c.log {
				faults[strings.Join(strings.Fields(l)[:min(3, len(strings.Fields(l)))], " ")]++
			}
		})
	}
	t.Logf("%d runs: %v", *chaosRuns, faults)
}
