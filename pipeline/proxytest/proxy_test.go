package proxytest

import (
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// behind starts a server and a client that talks to it through a proxy.
func behind(t *testing.T) (*Proxy, *nats.Conn) {
	t.Helper()
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	go srv.Start()
	t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
	if !srv.ReadyForConnections(20 * time.Second) {
		t.Fatal("the server did not start")
	}
	p, err := New(srv.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	nc, err := nats.Connect(p.URL(), nats.ReconnectWait(10*time.Millisecond), nats.MaxReconnects(-1))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return p, nc
}

func TestMessagesMeetTheirFates(t *testing.T) {
	for _, test := range []struct {
		fate Fate // of the third of eight messages
		want string
	}{{Pass, "abcdefgh"}, {Drop, "abdefgh"}, {Double, "abccdefgh"}, {Delay, "abdefcgh"}} {
		for _, toClient := range []bool{false, true} {
			t.Run(test.fate.String(), func(t *testing.T) {
				p, nc := behind(t)
				sub, err := nc.SubscribeSync("x")
				if err != nil {
					t.Fatal(err)
				}
				if err := nc.Flush(); err != nil {
					t.Fatal(err)
				}
				n := 0
				p.Disturb(func(m Message) Fate {
					if m.ToClient != toClient || m.Subject != "x" {
						return Pass
					}
					if n++; n == 3 {
						return test.fate
					}
					return Pass
				})
				for _, c := range "abcdefgh" {
					msg := &nats.Msg{Subject: "x", Data: []byte{byte(c)}}
					if c%2 == 0 {
						msg.Header = nats.Header{"A": {"b"}}
					}
					if err := nc.PublishMsg(msg); err != nil {
						t.Fatal(err)
					}
				}
				var got []byte
				for range len(test.want) {
					m, err := sub.NextMsg(5 * time.Second)
					if err != nil {
						t.Fatalf("%v after %q", err, got)
					}
					got = append(got, m.Data...)
				}
				if string(got) != test.want {
					t.Errorf("got %q, want %q", got, test.want)
				}
				if c := p.Counts(); test.fate != Pass && c[test.fate] != 1 {
					t.Errorf("counts %v", c)
				}
			})
		}
	}
}

func TestADelayedMessageComesWhenNoOtherFollows(t *testing.T) {
	p, nc := behind(t)
	sub, err := nc.SubscribeSync("x")
	if err != nil {
		t.Fatal(err)
	}
	p.Disturb(func(m Message) Fate {
		if m.ToClient {
			return Pass
		}
		return Delay
	})
	if err := nc.Publish("x", []byte("late")); err != nil {
		t.Fatal(err)
	}
	if m, err := sub.NextMsg(5 * time.Second); err != nil || string(m.Data) != "late" {
		t.Errorf("got %v, %v", m, err)
	}
}

func TestATornMessageEndsTheConnectionAndDoesNotArrive(t *testing.T) {
	p, nc := behind(t)
	back := make(chan struct{}, 1)
	nc.SetReconnectHandler(func(*nats.Conn) { back <- struct{}{} })
	sub, err := nc.SubscribeSync("x")
	if err != nil {
		t.Fatal(err)
	}
	torn := false
	p.Disturb(func(m Message) Fate {
		if m.ToClient || torn {
			return Pass
		}
		torn = true
		return Tear
	})
	if err := nc.Publish("x", slices.Repeat([]byte("z"), 1000)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-back:
	case <-time.After(10 * time.Second):
		t.Fatal("the client did not connect again")
	}
	if err := nc.Publish("x", []byte("next")); err != nil {
		t.Fatal(err)
	}
	if m, err := sub.NextMsg(5 * time.Second); err != nil || string(m.Data) != "next" {
		t.Errorf("got %v, %v", m, err)
	}
}
