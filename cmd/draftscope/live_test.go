package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// liveTest is a live page over a made-up dataset.
type liveTest struct {
	*live
	srv     *httptest.Server
	changed atomic.Int64
	builds  atomic.Int64
	fail    atomic.Bool
}

func startLive(t *testing.T) *liveTest {
	t.Helper()
	lt := &liveTest{}
	lt.live = newLive("ds", 10*time.Millisecond, lt.changed.Load, func() string { return fmt.Sprintf("%d stored", lt.changed.Load()) }, func(context.Context) ([]byte, error) {
		n := lt.builds.Add(1)
		if lt.fail.Load() {
			return nil, errors.New("<no> dataset & no report")
		}
		return fmt.Appendf(nil, "<main>\nreport %d of %d</main>", n, lt.changed.Load()), nil
	})
	mux := http.NewServeMux()
	lt.register(mux)
	lt.srv = httptest.NewServer(mux)
	t.Cleanup(func() { lt.srv.CloseClientConnections(); lt.close(); lt.srv.Close() })
	return lt
}

// events reads events as "name: data" until the test ends.
func (lt *liveTest) events(t *testing.T) <-chan string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, lt.srv.URL+"/live/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req) //nolint:bodyclose // the goroutine below does
	if err != nil {
		t.Fatal(err)
	}
	if got := resp.Header.Get("Content-Type"); got != "text/event-stream" {
		t.Fatalf("content type %q", got)
	}
	out := make(chan string, 100)
	go func() {
		defer resp.Body.Close()
		defer close(out)
		name, data := "", []string{}
		for s := bufio.NewScanner(resp.Body); s.Scan(); {
			switch line := s.Text(); {
			case strings.HasPrefix(line, "event: "):
				name = line[7:]
			case strings.HasPrefix(line, "data: "):
				data = append(data, line[6:])
			case line == "":
				out <- name + ": " + strings.Join(data, "\n")
				data = nil
			}
		}
	}()
	return out
}

// expect waits until all of want have come, in any order.
func expect(t *testing.T, events <-chan string, want ...string) {
	t.Helper()
	var got []string
	for len(want) > 0 {
		select {
		case e, ok := <-events:
			if !ok {
				t.Fatalf("the stream ended; want %q after %q", want, got)
			}
			got = append(got, e)
			want = slices.DeleteFunc(want, func(w string) bool { return w == e })
		case <-time.After(10 * time.Second):
			t.Fatalf("no event %q, but %q", want, got)
		}
	}
}

func TestALivePageFollowsTheDataset(t *testing.T) {
	lt := startLive(t)
	lt.changed.Store(1)
	time.Sleep(50 * time.Millisecond)
	if n := lt.builds.Load(); n != 0 {
		t.Errorf("%d reports were made for nobody", n)
	}
	first := lt.events(t)
	expect(t, first, "report: <main>\nreport 1 of 1</main>")
	second := lt.events(t) // gets the one that there is
	expect(t, second, "report: <main>\nreport 1 of 1</main>")
	time.Sleep(60 * time.Millisecond)
	if n := lt.builds.Load(); n != 1 {
		t.Errorf("%d reports of a dataset that has not changed", n)
	}
	lt.changed.Store(2)
	expect(t, first, "now: 2 stored", "report: <main>\nreport 2 of 2</main>")
	expect(t, second, "report: <main>\nreport 2 of 2</main>")
}

func TestAReportThatFailsIsSaidAndTriedAgain(t *testing.T) {
	lt := startLive(t)
	lt.fail.Store(true)
	events := lt.events(t)
	expect(t, events, `report: <main><h1>draftscope</h1><p class="verdict warn">&lt;no&gt; dataset &amp; no report</p></main>`)
	lt.fail.Store(false)
	for e := range events {
		if strings.Contains(e, "of 0</main>") {
			return
		}
	}
	t.Error("it was not tried again")
}

func TestLiveReadersAreBounded(t *testing.T) {
	lt := startLive(t)
	for range liveReaders {
		lt.events(t)
	}
	resp, err := http.Get(lt.srv.URL + "/live/events") //nolint:noctx // it is refused at once
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("status %d for one reader too many", resp.StatusCode)
	}
}

func TestClosingALivePageEndsItsStreams(t *testing.T) {
	lt := startLive(t)
	events := lt.events(t)
	expect(t, events, "report: <main>\nreport 1 of 0</main>")
	lt.close()
	for range events {
	}
	if resp, err := http.Get(lt.srv.URL + "/live/events"); err == nil { //nolint:noctx // it is refused at once
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("status %d after the end", resp.StatusCode)
		}
	}
}

func TestTheLivePageFetchesNothingButItsEvents(t *testing.T) {
	lt := startLive(t)
	resp, err := http.Get(lt.srv.URL + "/live") //nolint:noctx // a page of this process
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if policy := resp.Header.Get("Content-Security-Policy"); !strings.HasPrefix(policy, "default-src 'none'") {
		t.Errorf("policy %q", policy)
	}
}
