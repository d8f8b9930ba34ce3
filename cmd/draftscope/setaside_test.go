package main

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/safetensors/safetensorstest"
)

// What is wrong with states or answers sets a sequence aside, in the store and
// in the stage, and the others are scored to the bit as without it.
func TestFaultySequencesAreSetAsideAndTheRestIsScoredAsWithoutThem(t *testing.T) {
	dir := t.TempDir()
	clean := filepath.Join(dir, "clean")
	mustRun(t, exitOK, "run", "--limit", "6", "--max-new", "40", "--budgets", "8", "--out", clean)
	url := plainServer(t)
	plant(t, url, clean, func(q *plantedSequence) {
		switch q.ID {
		case "p0001": // a row that was never written
			clear(q.row(4, 20))
		case "p0002": // a row that was written twice
			copy(q.row(5, 20), q.row(5, 19))
		case "p0003": // another scale
			for i := range q.States[6] {
				q.States[6][i] *= 2
			}
		case "p0004": // answers of another target
			for i := range q.Tokens {
				q.Tokens[i].TargetArgmax = new(int32(7))
			}
		}
	})
	ds := filepath.Join(dir, "ds")
	mustRun(t, exitOK, "draft", "--nats", url, "--run", "r1", "--budgets", "8", "--once", "--lease", "1s")
	out, errs := mustRun(t, exitPartial, storing(url, ds, "--once")...)
	if !strings.Contains(out, "3 sequences stored") {
		t.Errorf("%s%s", out, errs)
	}
	faults, _ := mustRun(t, exitOK, "query", "--dataset", ds, "--format", "csv", `SELECT DISTINCT seq_id, "check", split_part(detail, ';', 1) FROM faults ORDER BY ALL`)
	for _, want := range []string{
		`p0001,K2,"state 4, row 20: 1 of `,
		`p0002,K2,"state 5, row 20: 1 of `,
		`p0003,K7,"state 6, row 0: rows of RMS `,
		`p0004,K5,`,
	} {
		if !strings.Contains(faults, want) {
			t.Errorf("no %s in %s", want, faults)
		}
	}
	for _, table := range []string{"slots", "rounds", "drafts", "tokens"} {
		ask := func(ds string) string {
			got, _ := mustRun(t, exitOK, "query", "--dataset", ds, "--format", "csv", "SELECT * FROM "+table+" WHERE seq_id IN ('p0000', 'p0005') ORDER BY ALL")
			return got
		}
		if a, b := ask(clean), ask(ds); a != b || len(a) < 200 {
			t.Errorf("%s of the sound sequences differ, or are none:\n%.300s\n%.300s", table, a, b)
		}
	}
	if got, _ := mustRun(t, exitOK, "query", "--dataset", ds, "--format", "csv", "SELECT count(DISTINCT seq_id) FROM rounds"); !strings.Contains(got, "\n2\n") {
		t.Errorf("faulty sequences were scored: %s", got)
	}
	lines, _ := mustRun(t, exitPartial, "validate", "--nats", url, "--target", "demo")
	for _, want := range []string{"sample p0001, row 20, state 4, K2", "sample p0002, row 20, state 5, K2", "sample p0003, state 6, K7", "sample p0004, state 8, K5"} {
		if strings.Count(lines, want) != 1 {
			t.Errorf("no %s in %s", want, lines)
		}
	}
	if lines, _ := mustRun(t, exitPartial, "validate", "--nats", url); !strings.Contains(lines, "sample p0003, state 6, K7") {
		t.Errorf("K7 needs no target where the run has a profile: %s", lines)
	}
}

// An import holds every sample against the sizes of the target's own states,
// also those that it does not run again.
func TestAnImportHoldsSizesAgainstTheTarget(t *testing.T) {
	dir := t.TempDir()
	clean, files := filepath.Join(dir, "clean"), filepath.Join(dir, "files")
	mustRun(t, exitOK, "capture", "--limit", "3", "--max-new", "24", "--states", "2,5,8", "--dtype", "bf16", "--out", clean)
	mustRun(t, exitOK, "export", "--dataset", clean, "--format", "vllm", "--to", files)
	names, err := filepath.Glob(filepath.Join(files, "*.safetensors"))
	if err != nil || len(names) != 3 {
		t.Fatal(names, err)
	}
	last := names[2]
	ckpt, err := safetensors.OpenFile(os.DirFS(files), filepath.Base(last))
	if err != nil {
		t.Fatal(err)
	}
	var list []safetensorstest.Tensor
	for _, name := range ckpt.Names() {
		info, _ := ckpt.Info(name)
		raw, err := ckpt.Raw(name)
		if err != nil {
			t.Fatal(err)
		}
		raw = slices.Clone(raw)
		if info.DType == safetensors.BF16 {
			for at := 0; at < len(raw); at += 2 { // four times as large
				if code := binary.LittleEndian.Uint16(raw[at:]); code&0x7fff != 0 {
					binary.LittleEndian.PutUint16(raw[at:], code+2<<7)
				}
			}
		}
		list = append(list, safetensorstest.Tensor{Name: name, DType: string(info.DType), Shape: info.Shape, Data: raw})
	}
	if err := ckpt.Close(); err != nil {
		t.Fatal(err)
	}
	writeTo(t, last, safetensorstest.File(list...))
	ds := filepath.Join(dir, "ds")
	out, errs := mustRun(t, exitPartial, "import", "--format", "vllm", "--target", "demo", "--states", "2,5,8", "--out", ds, files)
	if !strings.Contains(out, "2 of 3 samples stored") || !strings.Contains(errs, "set aside by check K7, sequences: 1") {
		t.Errorf("%s%s", out, errs)
	}
}
