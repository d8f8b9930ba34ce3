//go:build fleet && browser

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// These tests look at the pages in Chromium; "task test:browser" installs what
// they need. DRAFTSCOPE_BROWSER_MODULES is where npm has put it,
// DRAFTSCOPE_BROWSER_SHOTS takes screenshots.

func browse(t *testing.T, args ...string) *process {
	t.Helper()
	if os.Getenv("DRAFTSCOPE_BROWSER_MODULES") == "" {
		t.Fatal("DRAFTSCOPE_BROWSER_MODULES is not set; use: task test:browser")
	}
	return start(t, "browser", "node", append([]string{filepath.Join("testdata", "browser", "pages.mjs")}, args...)...)
}

func shots(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("DRAFTSCOPE_BROWSER_SHOTS"); dir != "" {
		return dir
	}
	return t.TempDir()
}

// await waits for a word of a process.
func await(t *testing.T, p *process, word string, within time.Duration) {
	t.Helper()
	for end := time.Now().Add(within); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if strings.Contains(p.log.String(), word) {
			return
		}
		if !p.running() {
			break
		}
	}
	t.Fatalf("%s did not say %q:\n%s", p.name, word, p.log.String())
}

// prompts are n prompts with tags.
func taggedPrompts(t *testing.T, n int) string {
	t.Helper()
	var b bytes.Buffer
	for i := range n {
		fmt.Fprintf(&b, `{"id":"q%02d","prompt":"// Reset%d resets the buffer.\nfunc (b *Buffer) Reset%d() {","tags":{"kind":"%s"}}`+"\n", i, i, i, []string{"plain", "other"}[i%2])
	}
	path := filepath.Join(t.TempDir(), "prompts.jsonl")
	if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAReportIsReadableInABrowser(t *testing.T) {
	dir := t.TempDir()
	ds, prompts := filepath.Join(dir, "ds"), taggedPrompts(t, 12)
	draftscope(t, "run", "run", "--prompts", prompts, "--out", ds, "--run", "a").succeed(t, 3*time.Minute)
	draftscope(t, "capture", "capture", "--prompts", prompts, "--out", ds, "--run", "b", "--dtype", "bf16").succeed(t, 3*time.Minute)
	draftscope(t, "compare", "compare", ds+":a", ds+":b").succeed(t, time.Minute)
	page := filepath.Join(dir, "report.html")
	draftscope(t, "report", "report", "--dataset", ds, "--html", page).succeed(t, time.Minute)
	b := browse(t, "report", page, shots(t))
	b.succeed(t, 3*time.Minute)
	t.Log("\n" + b.log.String())
}

func TestTheLivePageFollowsARunInABrowser(t *testing.T) {
	dir := t.TempDir()
	page := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	url := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	serve := draftscope(t, "serve", "serve", "--listen", url, "--http", page, "--out", filepath.Join(dir, "ds"), "--commit-idle", "300ms")
	await(t, serve, "storing into", time.Minute)
	b := browse(t, "live", "http://"+page+"/", shots(t), "6")
	prompts := taggedPrompts(t, 6)
	for _, r := range []struct{ run, word string }{{"r1", "READY"}, {"r2", "SECOND"}} {
		await(t, b, r.word, 3*time.Minute)
		capture := draftscope(t, "capture", "capture", "--stream-only", "--nats", "nats://"+url, "--run", r.run, "--prompts", prompts)
		worker := draftscope(t, "worker", "draft", "--nats", "nats://"+url, "--run", r.run, "--once")
		capture.succeed(t, 3*time.Minute)
		worker.succeed(t, 3*time.Minute)
	}
	await(t, b, "STOP", 4*time.Minute)
	serve.kill()
	b.succeed(t, 2*time.Minute)
	t.Log("\n" + b.log.String())
}
