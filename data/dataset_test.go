package data

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/draftscope/draftscope/schemas"
	"github.com/google/go-cmp/cmp"
)

func TestARunIsRememberedAndResumed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "out")
	d := mustCreate(t, dir)
	want := testRun("r1", 64, schemas.BF16)
	want.CreatedAt = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	if err := d.AddRun(want); err != nil {
		t.Fatal(err)
	}
	dr := Drafter{Name: "good", Source: "demo", Fingerprint: "f1", CreatedAt: want.CreatedAt, Options: map[string]string{"anchors": "every"}}
	if err := d.AddDrafter("r1", dr); err != nil {
		t.Fatal(err)
	}
	want.Drafters = []Drafter{dr}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d = mustCreate(t, dir)
	again := testRun("r1", 64, schemas.BF16)
	again.Target = "/elsewhere" // a moved folder is the same target
	if err := d.AddRun(again); err != nil {
		t.Errorf("resuming: %v", err)
	}
	if err := d.AddDrafter("r1", Drafter{Name: "good", Fingerprint: "f1", Options: dr.Options}); err != nil {
		t.Errorf("resuming the drafter: %v", err)
	}
	reader, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []*Dataset{d, reader} {
		got, err := d.Run("r1")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("run (-want +got):\n%s", diff)
		}
	}
	if _, err := reader.Run("r2"); !errors.Is(err, ErrUnknownRun) {
		t.Errorf("an unknown run: %v", err)
	}
}

func TestAnotherCaptureUnderTheSameNameIsRefused(t *testing.T) {
	d := mustCreate(t, t.TempDir())
	if err := d.AddRun(testRun("r1", 64, schemas.BF16)); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		change func(*Run)
		names  string
	}{
		"weights":   {func(r *Run) { r.Fingerprints.Weights = "w2" }, "weights was w1 and is now w2"},
		"tokenizer": {func(r *Run) { r.Fingerprints.Tokenizer = "" }, "tokenizer was t1"},
		"template":  {func(r *Run) { r.Fingerprints.Template = "x" }, "chat template"},
		"options":   {func(r *Run) { r.Options = map[string]string{"max_new": "17"} }, "max_new was 16 and is now 17"},
		"states":    {func(r *Run) { r.States = []int{0, 2} }, "states was [0 2 4] and is now [0 2]"},
		"dtype":     {func(r *Run) { r.DType = schemas.F32 }, "dtype was bf16 and is now f32"},
		"engine":    {func(r *Run) { r.Engine = "vllm" }, "engine"},
	} {
		r := testRun("r1", 64, schemas.BF16)
		tt.change(&r)
		err := d.AddRun(r)
		if !errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), tt.names) || !strings.Contains(err.Error(), "--run") {
			t.Errorf("%s: %v, want a mismatch that says %q and the remedy", name, err, tt.names)
		}
	}
	if err := d.AddDrafter("r1", Drafter{Name: "good", Fingerprint: "f1"}); err != nil {
		t.Fatal(err)
	}
	if err := d.AddDrafter("r1", Drafter{Name: "good", Fingerprint: "f2"}); !errors.Is(err, ErrMismatch) {
		t.Errorf("another drafter of the same name: %v", err)
	}
	if err := d.AddDrafter("r9", Drafter{Name: "good"}); !errors.Is(err, ErrUnknownRun) {
		t.Errorf("a drafter of no run: %v", err)
	}
}

func TestRunsThatCannotBeStoredAreRefused(t *testing.T) {
	d := mustCreate(t, t.TempDir())
	for name, change := range map[string]func(*Run){
		"a name that leaves the folder": func(r *Run) { r.Name = "../x" },
		"a name with a slash":           func(r *Run) { r.Name = "a/b" },
		"a hidden name":                 func(r *Run) { r.Name = ".x" },
		"a name with an equals sign":    func(r *Run) { r.Name = "a=b" },
		"no name":                       func(r *Run) { r.Name = "" },
		"a long name":                   func(r *Run) { r.Name = strings.Repeat("x", 101) },
		"states out of order":           func(r *Run) { r.States = []int{2, 0} },
		"a state twice":                 func(r *Run) { r.States = []int{2, 2} },
		"a state past the depth":        func(r *Run) { r.States = []int{5} },
		"no states":                     func(r *Run) { r.States = nil },
		"no width":                      func(r *Run) { r.Hidden = 0 },
		"an unknown dtype":              func(r *Run) { r.DType = "fp8" },
		"a normed final state":          func(r *Run) { r.FinalNorm = "post" },
	} {
		r := testRun("r1", 8, schemas.F32)
		change(&r)
		if err := d.AddRun(r); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if got := d.Runs(); len(got) > 0 {
		t.Errorf("runs %v were added", got)
	}
}

func TestOnlyOneWriterAtATime(t *testing.T) {
	dir := t.TempDir()
	d := mustCreate(t, dir)
	if _, err := Create(dir, nil); !errors.Is(err, ErrLocked) {
		t.Errorf("a second writer: %v, want ErrLocked", err)
	}
	if _, err := Open(dir); err != nil {
		t.Errorf("a reader beside the writer: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d2, err := Create(dir, nil)
	if err != nil {
		t.Fatalf("after Close: %v", err)
	}
	if err := d2.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestAReaderCannotWrite(t *testing.T) {
	dir := t.TempDir()
	if err := mustCreate(t, dir).AddRun(testRun("r1", 8, schemas.F32)); err != nil {
		t.Fatal(err)
	}
	d, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.CaptureSink("r1", 0, SinkConfig{})
	_, err2 := d.ResultSink("r1", 0, SinkConfig{})
	for _, err := range []error{d.AddRun(testRun("r2", 8, schemas.F32)), d.AddDrafter("r1", Drafter{Name: "x"}), err, err2} {
		if !errors.Is(err, ErrReadOnly) {
			t.Errorf("got %v, want ErrReadOnly", err)
		}
	}
}

func TestADatasetThatCannotBeUsedIsLeftAlone(t *testing.T) {
	for name, tt := range map[string]struct {
		content string
		want    error
		says    []string
	}{
		"a newer format":   {`{"format_version": 2, "runs": {"shape": "unknown"}}`, ErrNewer, []string{"version 2", "up to 1", "update draftscope"}},
		"half a file":      {`{"format_version": 1, "runs": [{"na`, ErrNotDataset, []string{"damaged", "--out"}},
		"empty":            {``, ErrNotDataset, []string{"damaged"}},
		"no version":       {`{"runs": []}`, ErrNotDataset, []string{"no format version"}},
		"runs of a number": {`{"format_version": 1, "runs": 7}`, ErrNotDataset, []string{"damaged"}},
		"a run outside":    {`{"format_version": 1, "runs": [{"name": "../../x"}]}`, ErrNotDataset, []string{"damaged", "../../x"}},
		"a run twice":      {`{"format_version": 1, "runs": [` + runJSON(t) + `,` + runJSON(t) + `]}`, ErrNotDataset, []string{"twice"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, manifestName)
			tmp := filepath.Join(dir, "tokens", "run=r1", "part-00-000000000001-000000000002.parquet.tmp")
			if err := errors.Join(os.MkdirAll(filepath.Dir(tmp), 0o755), os.WriteFile(tmp, []byte("x"), 0o644), os.WriteFile(path, []byte(tt.content), 0o644)); err != nil {
				t.Fatal(err)
			}
			_, errOpen := Open(dir)
			_, errCreate := Create(dir, nil)
			for _, err := range []error{errOpen, errCreate} {
				if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), path) {
					t.Errorf("got %v, want %v naming %s", err, tt.want, path)
					continue
				}
				for _, s := range tt.says {
					if !strings.Contains(err.Error(), s) {
						t.Errorf("%v does not say %q", err, s)
					}
				}
			}
			if got, err := os.ReadFile(path); err != nil || string(got) != tt.content || !exists(tmp) || exists(filepath.Join(dir, lockName)) {
				t.Errorf("the folder was touched: %q, %v", got, err)
			}
		})
	}
}

func runJSON(t *testing.T) string {
	t.Helper()
	b, err := json.Marshal(testRun("r1", 8, schemas.F32))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestAFolderWithoutADatasetIsNotRead(t *testing.T) {
	_, err := Open(t.TempDir())
	if !errors.Is(err, ErrNotDataset) || !strings.Contains(err.Error(), "--out") {
		t.Errorf("an empty folder: %v", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(file, nil); err == nil {
		t.Error("a file was taken for a folder")
	}
}

func FuzzManifest(f *testing.F) {
	f.Add([]byte(`{"format_version": 1, "runs": []}`))
	f.Add([]byte(`{"format_version": 1, "runs": [{"name": "r", "states": [0], "layers": 1, "hidden": 1, "final_norm": "pre", "dtype": "bf16"}]}`))
	f.Add([]byte(`{"format_version": 1e400}`))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, content []byte) {
		if err := os.WriteFile(filepath.Join(dir, manifestName), content, 0o644); err != nil {
			t.Fatal(err)
		}
		d, err := Open(dir)
		if err != nil {
			if !errors.Is(err, ErrNotDataset) && !errors.Is(err, ErrNewer) {
				t.Fatalf("an error of no kind: %v", err)
			}
			return
		}
		for _, r := range d.Runs() {
			if err := r.validate(); err != nil {
				t.Fatalf("an unusable run was accepted: %v", err)
			}
		}
	})
}
