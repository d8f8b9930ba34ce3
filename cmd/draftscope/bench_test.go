package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cmd/draftscope/bench"
)

func TestBenchPrintsItsFiguresAsJSON(t *testing.T) {
	var stdout, stderr bytes.Buffer
	args := []string{"bench", "--hidden", "64", "--states", "2", "--bytes", "20MB", "--rounds", "1", "--dir", t.TempDir(), "--json"}
	if code := run(t.Context(), args, &stdout, &stderr); code != exitOK {
		t.Fatalf("exit %d: %s", code, stderr.String())
	}
	var got bench.Result
	if err := json.Unmarshal(stdout.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Shape != (bench.Shape{Name: "custom", Hidden: 64, States: 2}) || got.Bytes != 20e6 || len(got.Stages) == 0 {
		t.Errorf("got %+v", got)
	}
	if !strings.Contains(stderr.String(), "round 1 of 1: source to renamed Parquet to ack") {
		t.Errorf("no progress: %s", stderr.String())
	}
}

func TestBenchRefusesWhatItCannotMeasure(t *testing.T) {
	for _, args := range [][]string{
		{"--shape", "gpt"},
		{"--hidden", "-1"},
		{"--states", "1"},
		{"--bytes", "much"},
		{"--bytes", "0"},
		{"--rounds", "0"},
		{"--only", "copy"},
		{"--stream-bytes", "1MB"},
		{"--dir", "/no/such/folder"},
		{"stray"},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), append([]string{"bench"}, args...), &stdout, &stderr); code != exitUsage {
			t.Errorf("%v: exit %d, stderr %q", args, code, stderr.String())
		}
	}
}

func TestSizesHaveUnits(t *testing.T) {
	for text, want := range map[string]int64{"200": 200, "2GB": 2e9, "1.5 MB": 1.5e6, "256MiB": 256 << 20, "1 GiB": 1 << 30, "10kB": 1e4, "7B": 7} {
		var v sizeFlag
		if err := v.Set(text); err != nil || int64(v) != want {
			t.Errorf("%q is %d, %v, want %d", text, v, err, want)
		}
		var again sizeFlag
		if err := again.Set(v.String()); err != nil || again != v {
			t.Errorf("%q prints as %q", text, v.String())
		}
	}
	for _, text := range []string{"", "GB", "-1MB", "1XB", "NaN", "1e30GB"} {
		var v sizeFlag
		if err := v.Set(text); err == nil {
			t.Errorf("%q is %d", text, v)
		}
	}
}
