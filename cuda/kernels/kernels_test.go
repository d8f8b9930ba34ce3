package kernels_test

import (
	"os"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cuda/kernels"
)

func TestEveryKernelIsCompiledFromItsSource(t *testing.T) {
	if err := kernels.Check(os.DirFS(".")); err != nil {
		t.Fatal(err)
	}
	names, err := kernels.Names(os.DirFS("."))
	if err != nil || len(names) < 9 {
		t.Fatalf("kernels are %v, %v: want one for each operation", names, err)
	}
}

// TestAPlantedChangeIsFound changes a copy of the folder in every way that the
// guard is there for.
func TestAPlantedChangeIsFound(t *testing.T) {
	edit := func(t *testing.T, file string, change func(string) string) string {
		t.Helper()
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(".")); err != nil {
			t.Fatal(err)
		}
		if err := kernels.Check(os.DirFS(dir)); err != nil {
			t.Fatalf("before the change: %v", err)
		}
		path := dir + "/" + file
		text, err := os.ReadFile(path)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		changed := change(string(text))
		if changed == "" {
			err = os.Remove(path)
		} else {
			err = os.WriteFile(path, []byte(changed), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := kernels.Check(os.DirFS(dir)); err != nil {
			return err.Error()
		}
		return ""
	}
	for what, test := range map[string]struct {
		file   string
		change func(string) string
		want   string
	}{
		"a source":      {"gemm.cu", func(s string) string { return strings.Replace(s, "fmaf", "__fmaf_rn", 1) }, "gemm.cu, what it includes"},
		"an include":    {"element.cuh", func(s string) string { return s + "\n" }, "conv.cu, what it includes"},
		"PTX by hand":   {"conv.ptx", func(s string) string { return s + "\n" }, "conv.ptx is not what nvcc made"},
		"a new source":  {"more.cu", func(string) string { return "// nothing\n" }, "more.ptx"},
		"a lost source": {"conv.cu", func(string) string { return "" }, "conv.cu is gone"},
		"a lost image":  {"conv.ptx", func(string) string { return "" }, "conv.ptx"},
		"stray PTX":     {"stray.ptx", func(string) string { return "x" }, "stray.ptx has no source"},
		"a torn line":   {"kernels.sum", func(s string) string { return s + "gemm\n" }, "not a name and two hashes"},
	} {
		t.Run(what, func(t *testing.T) {
			if got := edit(t, test.file, test.change); !strings.Contains(got, test.want) {
				t.Errorf("Check says %q, want %q in it", got, test.want)
			}
		})
	}
}
