//go:build fleet

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// TestMetricsAreInTheTextFormatAndTellOfTheRun serves a run and reads what
// Prometheus would.
func TestMetricsAreInTheTextFormatAndTellOfTheRun(t *testing.T) {
	dir := t.TempDir()
	page := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	url := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	serve := draftscope(t, "serve", "serve", "--listen", url, "--http", page, "--out", filepath.Join(dir, "ds"), "--commit-idle", "50ms")
	for range 200 {
		if strings.Contains(serve.log.String(), "storing into") {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	capture := draftscope(t, "capture", captureArgs("nats://"+url)...)
	worker := draftscope(t, "worker", draftArgs("nats://"+url)...)
	capture.succeed(t, time.Minute)
	worker.succeed(t, time.Minute)
	var text string
	for range 100 {
		text = get(t, "http://"+page+"/metrics")
		if strings.Contains(text, `draftscope_stored_results_total{run="r1"} 4`) {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	line := regexp.MustCompile(`^(# (HELP|TYPE) [a-z_]+ .+|[a-z_]+(\{([a-z]+="[^"]*",?)*\})? [-+0-9.e]+)$`)
	for l := range strings.SplitSeq(strings.TrimSpace(text), "\n") {
		if !line.MatchString(l) {
			t.Errorf("not the text format: %q", l)
		}
	}
	for _, want := range []string{
		`draftscope_stored_sequences_total{run="r1"} 4`, `draftscope_stored_results_total{run="r1"} 4`,
		`draftscope_faults_total{run="r1"} 0`, `draftscope_server_up{run="r1"} 1`,
		`draftscope_lag_messages{run="r1",stream="capture",reader="store",partition="0"} 0`,
		`draftscope_stream_bytes{run="r1",stream="DS_r1_capture"} `,
		`draftscope_commit_seconds_count{stream="capture"} `, `draftscope_stored_bytes_total{stream="results"} `,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
	if status := get(t, "http://"+page+"/"); !strings.Contains(status, "run r1") || !strings.Contains(status, "results of 4 stored") {
		t.Errorf("the status page says\n%s", status)
	}
}

func get(t *testing.T, url string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestLabelsAreEscaped(t *testing.T) {
	if got, want := labels("a", "x\"y\\z\n", "none", "", "b", "1"), `a="x\"y\\z\n",b="1"`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
