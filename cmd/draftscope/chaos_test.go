//go:build fleet

package main

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/pipeline/proxytest"
)

var (
	chaosRuns  = flag.Int("chaos.runs", 2, "runs of the fault campaign")
	chaosFault = flag.Int("chaos.fault", -1, "always this fault, by its number in the code")
	chaosSeed  = flag.Uint64("chaos.seed", 1, "seed of its first run; each run has the next")
)

// chaosLimit is how long a run may take on a machine that does much else.
const chaosLimit = 3 * time.Minute

// chaosRoles are the processes of a run.
var chaosRoles = []string{"source", "worker0", "worker1", "store"}

// chaos is one disturbed run: a source, two workers and a store as processes,
// on a real NATS server, each behind a proxy that can cut it off and mistreat
// what it publishes. Whatever ends before its time is started again, as a
// supervisor would.
type chaos struct {
	t      *testing.T
	rng    *rand.Rand
	dir    string
	srv    *node
	links  map[string]*proxytest.Proxy // by role
	first  int                         // kind of the first fault, so that a campaign has all
	mu     sync.Mutex
	roles  map[string]*process
	down   map[string]bool // ended well, or is kept down
	starts map[string]int
	log    []string
	ends   []string // how roles ended before their time
	out    string

	ballast  string                 // a file that fills the server's disk
	messages map[proxytest.Fate]int // that were mistreated
}

const chaosOptions = "max_payload: 8MB\n"

// chaosCapture makes the run a little longer than the programs take to start.
var chaosCapture = []string{"--limit", "8", "--max-new", "64"}

func (c *chaos) note(format string, args ...any) {
	c.log = append(c.log, fmt.Sprintf(format, args...))
}

// args are the command lines of the roles.
func (c *chaos) args(role string) []string {
	url := c.links[role].URL()
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
	for _, role := range chaosRoles {
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
	what := c.rng.IntN(chaosKinds)
	if c.first >= 0 {
		what = c.first
	}
	if *chaosFault >= 0 {
		what = *chaosFault
	}
	switch what {
	case 0, 1:
		if p := c.victim(chaosRoles...); p != nil {
			c.note("kill -9 %s", p.name)
			p.kill()
		}
	case 2:
		if p := c.victim(chaosRoles...); p != nil {
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
		for _, l := range c.links {
			l.Cut(true)
		}
		time.Sleep(time.Duration(200+c.rng.IntN(2500)) * time.Millisecond)
		for _, l := range c.links {
			l.Cut(false)
		}
	case 8, 9, 10, 11:
		if p := c.victim(chaosRoles...); p != nil {
			c.mistreat(p.name, []proxytest.Fate{proxytest.Drop, proxytest.Double, proxytest.Delay, proxytest.Tear}[what-8])
		}
	case 12:
		c.fillServer()
	}
	if len(c.log) == before {
		return false
	}
	c.first = -1
	return true
}

// chaosKinds is the number of kinds of faults.
const chaosKinds = 13

// smallServer mounts a tmpfs for the server's store, which can be filled. It
// needs root; without, the fault is not in the campaign.
func (c *chaos) smallServer() {
	if os.Geteuid() != 0 {
		return
	}
	dir := filepath.Join(c.dir, "n")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		c.t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64m"); err != nil {
		return
	}
	c.ballast = filepath.Join(dir, "ballast")
	c.t.Cleanup(func() {
		c.srv.kill()
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			c.t.Errorf("unmounting: %v", err)
		}
	})
}

// fillServer fills the server's disk for a while. The server gives JetStream
// up when it cannot write, so that it is started again when there is room.
func (c *chaos) fillServer() {
	if c.ballast == "" {
		c.first = -1
		return
	}
	c.note("fill the server's disk")
	f, err := os.Create(c.ballast)
	if err != nil {
		c.t.Error(err)
		return
	}
	for size := 1 << 20; size > 0; size /= 16 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, syscall.ENOSPC) {
			c.t.Error(err)
		}
	}
	time.Sleep(time.Duration(500+c.rng.IntN(2500)) * time.Millisecond)
	if err := errors.Join(f.Close(), os.Remove(c.ballast)); err != nil {
		c.t.Error(err)
	}
	c.srv.kill()
	c.srv.up(c.t)
}

// mistreat drops, doubles, delays or tears some of what a role publishes: of
// the messages of sequences alone, or of all that it sends, acks, requests and
// leases too.
func (c *chaos) mistreat(role string, fate proxytest.Fate) {
	rng := rand.New(rand.NewPCG(c.rng.Uint64(), 1))
	left := 1
	if fate != proxytest.Tear {
		left = 1 + rng.IntN(20)
	}
	only := []string{"ds.", ""}[rng.IntN(2)]
	link, met := c.links[role], 0
	link.Disturb(func(m proxytest.Message) proxytest.Fate {
		if m.ToClient || !strings.HasPrefix(m.Subject, only) || left == 0 || rng.IntN(3) > 0 {
			return proxytest.Pass
		}
		left--
		met++
		return fate
	})
	time.Sleep(time.Duration(500+c.rng.IntN(1500)) * time.Millisecond)
	link.Disturb(nil)
	if met > 0 {
		c.messages[fate] += met
		c.note("%s %d publishes, of %s", fate, met, role)
	}
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
	c.smallServer()
	c.srv = startNode(c.t, c.dir, "n", freePort(c.t), chaosOptions)
	for _, role := range chaosRoles {
		c.links[role] = proxied(c.t, c.srv)
	}
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
	deadline := time.Now().Add(chaosLimit)
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
			return fmt.Errorf("%v did not end within %s", busy, chaosLimit)
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
	var all tallies
	t.Run("runs", func(t *testing.T) {
		for i := range *chaosRuns {
			seed := *chaosSeed + uint64(i)
			t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
				t.Parallel()
				all.add(chaosRun(t, seed, want))
			})
		}
	})
	t.Logf("%d runs: %s", *chaosRuns, all.String())
	if os.Geteuid() != 0 {
		t.Log("not root: no disk was filled")
	}
}

// chaosRun is one run of a campaign.
func chaosRun(t *testing.T, seed uint64, want string) *chaos {
	t.Helper()
	c := &chaos{
		t: t, rng: rand.New(rand.NewPCG(seed, 14)), dir: t.TempDir(), first: int(seed % chaosKinds),
		roles: map[string]*process{}, down: map[string]bool{}, starts: map[string]int{},
		links: map[string]*proxytest.Proxy{}, messages: map[proxytest.Fate]int{},
	}
	begin := time.Now()
	err := c.run(want)
	t.Logf("%.1f s: %s; starts %v", time.Since(begin).Seconds(), strings.Join(c.log, ", "), c.starts)
	for _, e := range c.ends {
		t.Log("  ", e)
	}
	if err != nil {
		t.Errorf("seed %d: %v", seed, err)
		for _, role := range chaosRoles {
			if p := c.roles[role]; p != nil {
				t.Logf("the end of what %s said:\n%s", role, p.tail())
			}
		}
		t.Logf("the end of what the server said:\n%s", c.srv.tail())
	}
	return c
}

// tallies counts what was done to the runs of a campaign.
type tallies struct {
	mu       sync.Mutex
	faults   map[string]int
	messages map[proxytest.Fate]int
}

func (a *tallies) add(c *chaos) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.faults == nil {
		a.faults, a.messages = map[string]int{}, map[proxytest.Fate]int{}
	}
	for _, l := range c.log {
		words := strings.FieldsFunc(l, func(r rune) bool { return r == ' ' || r == ',' })
		words = slices.DeleteFunc(words, func(w string) bool { return w[0] >= '0' && w[0] <= '9' })
		a.faults[strings.Join(words, " ")]++
	}
	for fate, n := range c.messages {
		a.messages[fate] += n
	}
}

func (a *tallies) String() string {
	var all []string
	for what, n := range a.faults {
		all = append(all, fmt.Sprintf("%s: %d", what, n))
	}
	slices.Sort(all)
	return fmt.Sprintf("%s; publishes: %v", strings.Join(all, ", "), a.messages)
}
