//go:build fleet

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/draftscope/draftscope/pipeline/proxytest"
)

// natsServer builds the NATS server of our go.mod once, and returns its path.
var natsServer = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "nats-server")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "nats-server")
	out, err := exec.Command("go", "build", "-o", path, "github.com/nats-io/nats-server/v2").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building nats-server: %w: %s", err, out)
	}
	return path, nil
})

// process is one process of a fleet, started again when it is killed.
type process struct {
	name string
	cmd  *exec.Cmd
	log  *lockedBuffer
	done chan struct{}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start runs a program; it is killed when the test ends.
func start(t *testing.T, name, path string, args ...string) *process {
	t.Helper()
	p := &process{name: name, cmd: exec.Command(path, args...), log: &lockedBuffer{}, done: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), asProgram+"=1")
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // the exit code says it
	}()
	t.Cleanup(func() { p.kill() })
	return p
}

// draftscope runs this test binary as the program.
func draftscope(t *testing.T, name string, args ...string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return start(t, name, self, args...)
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.done
}

func (p *process) signal(sig syscall.Signal) { _ = p.cmd.Process.Signal(sig) }

func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// exit waits for the end and returns the exit code, -1 for a kill.
func (p *process) exit(t *testing.T, within time.Duration) int {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(within):
		p.signal(syscall.SIGQUIT) // prints its goroutines
		<-p.done
		t.Fatalf("%s did not end within %s:\n%s", p.name, within, p.log.String())
	}
	return p.cmd.ProcessState.ExitCode()
}

// said waits until a process has said something.
func said(t *testing.T, p *process, what string) {
	t.Helper()
	for end := time.Now().Add(chaosLimit); !strings.Contains(p.log.String(), what); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) || !p.running() {
			t.Fatalf("%s did not say %q:\n%s", p.name, what, p.log.String())
		}
	}
}

func (p *process) succeed(t *testing.T, within time.Duration) {
	t.Helper()
	if code := p.exit(t, within); code != exitOK {
		t.Fatalf("%s: exit %d:\n%s", p.name, code, p.log.String())
	}
}

// lastPort is the last port that freePort has looked at. It looks below those
// that outgoing connections are given, so that a server that is killed finds
// its port free again.
var lastPort atomic.Int32

// freePort finds a port that nobody listens on, another each time.
func freePort(t *testing.T) int {
	t.Helper()
	lastPort.CompareAndSwap(0, int32(10_000+os.Getpid()*101%20_000))
	for range 1000 {
		port := int(lastPort.Add(1))
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no port is free")
	return 0
}

// node is a real NATS server, which may be started again on the same store.
type node struct {
	*process
	conf string
	port int
}

func startNode(t *testing.T, dir, name string, port int, more string) *node {
	t.Helper()
	n := &node{port: port, conf: filepath.Join(dir, name+".conf")}
	conf := fmt.Sprintf("server_name: %s\nhost: 127.0.0.1\nport: %d\njetstream { store_dir: %q }\n%s\n", name, port, filepath.Join(dir, name), more)
	if err := os.WriteFile(n.conf, []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	n.up(t)
	return n
}

// up starts the server and waits until it answers.
func (n *node) up(t *testing.T) {
	t.Helper()
	path, err := natsServer()
	if err != nil {
		t.Fatal(err)
	}
	n.process = start(t, "nats-server", path, "-c", n.conf)
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(25 * time.Millisecond) {
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", n.port))
		if err == nil {
			c.Close()
			return
		}
	}
	t.Fatalf("nats-server did not start:\n%s", n.log.String())
}

func (n *node) url() string { return fmt.Sprintf("nats://127.0.0.1:%d", n.port) }

// proxied puts a proxy before a server.
func proxied(t *testing.T, n *node) *proxytest.Proxy {
	t.Helper()
	p, err := proxytest.New(fmt.Sprintf("127.0.0.1:%d", n.port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// tail is the end of a process's log.
func (p *process) tail() string {
	lines := strings.Split(strings.TrimSpace(p.log.String()), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}

// The light run of the tests of many processes.
var (
	fleetCapture = []string{"--limit", "4", "--max-new", "24", "--batch-rows", "16"}
	fleetDraft   = []string{"--anchors", "rounds", "--budgets", "8"}
)

// undisturbed is what one process makes of the light run.
func undisturbed(t *testing.T, dir string, more ...string) string {
	t.Helper()
	out := filepath.Join(dir, "undisturbed")
	var stdout, stderr bytes.Buffer
	args := slices.Concat([]string{"run", "--out", out}, fleetCapture, fleetDraft, more)
	if code := run(context.Background(), args, &stdout, &stderr); code != exitOK {
		t.Fatalf("exit %d: %s", code, stderr.String())
	}
	return answers(t, out)
}

// differ says where two sets of answers part.
func differ(got, want string) error {
	if got == want {
		return nil
	}
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			return fmt.Errorf("line %d of %d (want %d):\n got %.300s\nwant %.300s", i, len(g), len(w), g[i], w[i])
		}
	}
	return errors.New("one has more lines than the other")
}
