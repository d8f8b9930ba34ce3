//go:build engines && fleet

package main

import (
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"
)

// The test with SGLang runs it on the CPU, without its CPU kernels, which are
// not on PyPI: drive_sglang.py says how. `task test:engines:sglang` makes the
// environment and names its Python in DRAFTSCOPE_SGLANG_PYTHON. SGLang kills
// its processes when it ends, so that they print no counts.
func TestStatesFromSGLangAreThoseOfANativeRun(t *testing.T) {
	const n = 24
	b := rigOf(t, "sglang")
	ds := filepath.Join(b.dir, "ds")
	daemon := b.tap("--out", ds, "--once", "--states", "0,2,4,5,6,8", "--probe-every", "4")
	// Its prefix cache is on: the second round has hits.
	engine := b.driven("sglang", "--count", "24", "--rounds", "2")
	list := b.finished(daemon, engine, exitOK)
	b.asReference(slices.Clone(list[:n]), n)
	if completed, _ := b.lent(ds); completed < n {
		t.Errorf("%d sequences were completed, want the second round's %d at least", completed, n)
	}
	b.nearNative(ds, list, 0.9999)
}

func TestSGLangsServerIsTappedAsItsClientsComeAndGo(t *testing.T) {
	b := rigOf(t, "sglang")
	ds := filepath.Join(b.dir, "ds")
	daemon := b.tap("--out", ds, "--once", "--states", "0,2,4,5,6,8")
	port := strconv.Itoa(freePort(t))
	v := b.served(b.driven("sglang", "--serve", port, "--template", b.template()), port)
	// It gives no ids of streamed chats.
	clients := b.crowd(v, "--xargs", "custom_params", "--kinds", "ids,text,chat")
	clients.succeed(t, vllmTime)
	v.stop(t)
	if code := daemon.exit(t, time.Minute); code != exitPartial {
		t.Fatalf("the daemon: exit %d, want %d: %s", code, exitPartial, lastLines(daemon))
	}
	got := last[httpAnswers](t, clients)
	b.cameAndWent(ds, got)
	// One request wants two answers, for which SGLang first runs the prompt.
	b.nearNative(ds, b.checked(ds, got.Served, 1), 0.9999)
}
