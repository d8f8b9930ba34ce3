//go:build cuda && cgo

package gpu

import (
	"os"
	"regexp"
	"strconv"
	"testing"
)

// TestLaunchesKnowTheKernelsConstants compares the constants of fasthead.go and
// attention.go with those of the kernels' sources.
func TestLaunchesKnowTheKernelsConstants(t *testing.T) {
	read := func(file, name string) int {
		t.Helper()
		text, err := os.ReadFile("../kernels/" + file)
		if err != nil {
			t.Fatal(err)
		}
		m := regexp.MustCompile(`(?m)^constexpr int (?:\w+ = \d+, )?` + name + ` = (\d+)`).FindSubmatch(text)
		if m == nil {
			t.Fatalf("%s has no constant %s", file, name)
		}
		n, err := strconv.Atoi(string(m[1]))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	const head, box = "fast_head.cu", 64 * 64 * 2
	if want := read(head, "kStages")*read(head, "kStage")*box + 1024 + 64 + 8*read("fast_head_row.cuh", "kInserters")*16 + 8; fastShared != want {
		t.Errorf("fastShared is %d, want %d", fastShared, want)
	}
	if want := read(head, "kBeginStages")*2*4*read(head, "kBeginRows")*128 + 1024; fastBeginShare != want {
		t.Errorf("fastBeginShare is %d, want %d", fastBeginShare, want)
	}
	for name, pair := range map[string][2]int{
		"kBeginRows": {fastBeginRows, read(head, "kBeginRows")},
		"kMergeRows": {fastMergeRows, read(head, "kMergeRows")},
		"kSlices":    {fastSlices, read(head, "kSlices")},
		"128 dims":   {fastAttentionShared128, read("fast_attention.cu", "kAttentionShared128")},
		"256 dims":   {fastAttentionShared256, read("fast_attention.cu", "kAttentionShared256")},
		"kParts":     {fastDeltaParts, read("fast_delta.cu", "kParts")*box + 1024},
		"kRows":      {fastDeltaChunk, read("fast_delta.cu", "kRows")},
		"STRIP":      {convStrip, read("conv.cu", "STRIP")},
		"KEYS":       {attentionKeys, read("attention.cu", "KEYS")},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s is %d here, %d in the kernel", name, pair[0], pair[1])
		}
	}
}
