package pipeline

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/draftscope/draftscope/pipeline/proxytest"
	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sync/errgroup"
)

// proxied puts a proxy before a server.
func proxied(t *testing.T, srv *server.Server) *proxytest.Proxy {
	t.Helper()
	p, err := proxytest.New(srv.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// some lets one in every n messages that are chosen meet a fate.
func some(seed uint64, n int, fate proxytest.Fate, chosen func(proxytest.Message) bool) func(proxytest.Message) proxytest.Fate {
	rng := rand.New(rand.NewPCG(seed, 7))
	return func(m proxytest.Message) proxytest.Fate {
		if !chosen(m) || rng.IntN(n) > 0 {
			return proxytest.Pass
		}
		return fate
	}
}

// What the fates are for: what a publisher sends to its stream, and the
// server's answers to it.
func toStream(m proxytest.Message) bool { return !m.ToClient && strings.HasPrefix(m.Subject, "ds.") }

func answers(m proxytest.Message) bool {
	return m.ToClient && strings.Contains(string(m.Wire), `"stream":"DS_`)
}

// TestMistreatedPublishesLoseAndDoubleNothing drops, doubles, reorders and
// tears what a job publishes, and drops the server's answers.
func TestMistreatedPublishesLoseAndDoubleNothing(t *testing.T) {
	for _, test := range []struct {
		name   string
		fate   proxytest.Fate
		chosen func(proxytest.Message) bool
		every  int
	}{
		{"dropped", proxytest.Drop, toStream, 12},
		{"doubled", proxytest.Double, toStream, 3},
		{"reordered", proxytest.Delay, toStream, 8},
		{"torn", proxytest.Tear, toStream, 60},
		{"not answered", proxytest.Drop, answers, 12},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			mem := checked(t)
			proxy := proxied(t, external(t, server.Options{JetStream: true, StoreDir: t.TempDir()}))
			sh, _ := openShelf("")
			src := &testSource{mem: mem, ids: ids(24), records: 3, rows: 60}
			begun := false
			src.onNext = func(string, int) error {
				if !begun {
					proxy.Disturb(some(1, test.every, test.fate, test.chosen))
				}
				begun = true
				return nil
			}
			cfg := Config{
				Run: "r", URL: proxy.URL(), Allocator: mem, ChunkBytes: 2500, CommitSequences: 4, CommitIdle: 50 * time.Millisecond,
				ConnectTimeout: time.Second, ackTimeout: 500 * time.Millisecond,
			}
			start := time.Now()
			sum, err := Run(t.Context(), cfg, src, stages(mem, nil), sh.sink)
			if err != nil {
				t.Fatal(err)
			}
			capture, results := want(ids(24), 3, 60)
			sh.check(t, CaptureStream, capture)
			sh.check(t, ResultsStream, results)
			if sum.Faults != 0 || proxy.Counts()[test.fate] == 0 {
				t.Errorf("summary %+v, messages %v", sum, proxy.Counts())
			}
			t.Logf("%s, messages %v", time.Since(start), proxy.Counts())
		})
	}
}

// TestRolesBearThatAnythingTheySayIsLost drops, doubles and reorders whatever
// the processes of a run send: captures, results, acks, requests, leases.
func TestRolesBearThatAnythingTheySayIsLost(t *testing.T) {
	for _, fate := range []proxytest.Fate{proxytest.Drop, proxytest.Double, proxytest.Delay} {
		t.Run(fate.String(), func(t *testing.T) {
			t.Parallel()
			mem := checked(t)
			proxy := proxied(t, external(t, server.Options{JetStream: true, StoreDir: t.TempDir()}))
			cfg := roleConfig(proxy.URL())
			cfg.ConnectTimeout, cfg.ackTimeout = time.Second, 500*time.Millisecond
			var kept shelves
			group(t, role(t, cfg), "a")
			sessions := []*Session{role(t, cfg), role(t, cfg), role(t, cfg), role(t, cfg)} // a lost question at the start is an error
			proxy.Disturb(some(2, 40, fate, func(m proxytest.Message) bool { return !m.ToClient }))
			var g errgroup.Group
			g.Go(func() error { return sessions[0].Store(t.Context(), kept.sink) })
			for _, s := range sessions[1:3] {
				g.Go(func() error { return s.Work(t.Context(), "a", stages(mem, nil)) })
			}
			g.Go(func() error {
				_, err := sessions[3].Publish(t.Context(), &testSource{mem: mem, ids: ids(30), records: 3, rows: 40})
				return err
			})
			start := time.Now()
			if err := g.Wait(); err != nil {
				t.Fatal(err)
			}
			capture, results := want(ids(30), 3, 40)
			kept.of("").check(t, CaptureStream, capture)
			kept.of("a").check(t, ResultsStream, results)
			t.Logf("%s, messages %v", time.Since(start), proxy.Counts())
		})
	}
}

// cluster starts three servers that keep three copies.
func cluster(t *testing.T) []*server.Server {
	t.Helper()
	var routes []*url.URL
	var ports [3]int
	for i := range ports {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		ports[i] = l.Addr().(*net.TCPAddr).Port
		routes = append(routes, &url.URL{Scheme: "nats", Host: l.Addr().String()})
		l.Close()
	}
	var nodes []*server.Server
	for i, port := range ports {
		opts := &server.Options{
			ServerName: fmt.Sprint("n", i), Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true,
			JetStream: true, StoreDir: t.TempDir(),
			Cluster: server.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: port}, Routes: routes,
		}
		srv, err := server.NewServer(opts)
		if err != nil {
			t.Fatal(err)
		}
		go srv.Start()
		t.Cleanup(func() { stop(srv) })
		nodes = append(nodes, srv)
	}
	for _, srv := range nodes {
		if !srv.ReadyForConnections(20 * time.Second) {
			t.Fatal("a server of the cluster did not start")
		}
	}
	return nodes
}

// TestAClusterThatLosesPublishesIsSentThemAgain is the case of its own that a
// cluster makes of a refused message: it remembers its id, and calls what is
// sent again under it a duplicate that it is still storing.
func TestAClusterThatLosesPublishesIsSentThemAgain(t *testing.T) {
	mem := checked(t)
	proxy := proxied(t, cluster(t)[0])
	sh, _ := openShelf("")
	src := &testSource{mem: mem, ids: ids(12), records: 3, rows: 60}
	begun := false
	src.onNext = func(string, int) error {
		if !begun {
			proxy.Disturb(some(1, 20, proxytest.Drop, toStream))
		}
		begun = true
		return nil
	}
	cfg := Config{
		Run: "r", URL: proxy.URL(), Replicas: 3, Allocator: mem, ChunkBytes: 2500, CommitSequences: 4, CommitIdle: 50 * time.Millisecond,
		ackTimeout: time.Second,
	}
	start := time.Now()
	sum, err := Run(t.Context(), cfg, src, stages(mem, nil), sh.sink)
	if err != nil {
		t.Fatal(err)
	}
	capture, results := want(ids(12), 3, 60)
	sh.check(t, CaptureStream, capture)
	sh.check(t, ResultsStream, results)
	if sum.Faults != 0 || proxy.Counts()[proxytest.Drop] == 0 {
		t.Errorf("summary %+v, messages %v", sum, proxy.Counts())
	}
	t.Logf("%s, messages %v", time.Since(start), proxy.Counts())
}
