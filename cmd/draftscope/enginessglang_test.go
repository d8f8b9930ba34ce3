//go:build engines && fleet

package main

import (
	"path/filepath"
	"slices"
	"testing"
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
