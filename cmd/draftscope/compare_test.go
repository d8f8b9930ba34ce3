package main

import (
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cuda/backendtest"
)

func TestRowsAreMeasuredTileByTileAndZerosHaveNoCosine(t *testing.T) {
	const width = 1 << 20
	rng := rand.New(rand.NewPCG(1, 2))
	a := make([]float32, (measureValues/width+1)*width) // two tiles
	for i := range a {
		a[i] = rng.Float32()
	}
	b := append([]float32(nil), a...)
	clear(a[:width])
	clear(b[width : 2*width])
	b[len(b)-1] += 3
	m := measure{dev: backendtest.Open(t)}
	defer m.close()
	rows, err := m.rows(a, b, width)
	if err != nil || len(rows) != len(a)/width {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	if r := rows[0]; r.Cosine != nil || r.RelL2 != nil || r.NormA != 0 || r.NormB == 0 || r.MaxAbs == 0 {
		t.Errorf("a row of zeros against others: %+v", r)
	}
	if r := rows[1]; r.Cosine != nil || r.RelL2 == nil || *r.RelL2 != 1 {
		t.Errorf("a row against zeros: %+v", r)
	}
	if r := rows[2]; *r.Cosine != 1 || *r.RelL2 != 0 || r.MaxAbs != 0 {
		t.Errorf("a row against itself: %+v", r)
	}
	if r := rows[len(rows)-1]; r.MaxAbs < 2.99 || *r.Cosine == 1 {
		t.Errorf("the last row, of the second tile: %+v", r)
	}
}

func TestABackendThatWouldDoNothingIsRefused(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"compare", dir, dir, "--backend", "cuda"},
		{"compare", dir, "--drafters", "a,b", "--backend", "cuda"},
		{"validate", dir, "--backend", "cuda"},
		{"validate", dir, "--precision", "bf16"},
	} {
		var stderr strings.Builder
		if code := run(t.Context(), args, io.Discard, &stderr); code != exitUsage || !strings.Contains(stderr.String(), "leave") {
			t.Errorf("%v: exit %d, %s", args, code, &stderr)
		}
	}
}
