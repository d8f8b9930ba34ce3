//go:build engines && fleet

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/draftscope/draftscope/cmd/demo"
	"github.com/draftscope/draftscope/cmd/demo/demotest"
)

// The tests with engines run Hugging Face transformers, from PyPI, as the
// engine. `task test:engines` makes the environment.

// served is a sequence as the engine's front end has it.
type served struct {
	ID        string  `json:"id"`
	PromptLen int     `json:"prompt_len"`
	InputIDs  []int32 `json:"input_ids"`

	Stop       []string `json:"stop,omitempty"`        // stop strings of the request
	StopReason any      `json:"stop_reason,omitempty"` // the one that ended it, or a token's id
}

// tapCounts are what both sides of the socket count.
type tapCounts struct {
	Begun, Finished, Aborted, Shed, Steps, Rows, Lost int64
}

// driven is what drive.py prints at its end.
type driven struct {
	Served  []served
	GivenUp []string `json:"given_up"`
	Engine  tapCounts
	Daemon  *tapCounts
	Refused *string
	Seconds float64
}

// rig is a folder with the shipped target, its sequences, and a place for
// the socket.
type rig struct {
	t                              *testing.T
	python, dir, model, socket, in string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	python := os.Getenv("DRAFTSCOPE_PYTHON")
	if python == "" {
		t.Fatal("DRAFTSCOPE_PYTHON must name a Python with torch and transformers; `task test:engines` sees to that")
	}
	b := &rig{t: t, python: python, dir: t.TempDir()}
	if err := os.CopyFS(filepath.Join(b.dir, "demo"), unpackedNames{demo.FS()}); err != nil {
		t.Fatal(err)
	}
	b.model, b.in = filepath.Join(b.dir, "demo", "target"), filepath.Join(b.dir, "sequences.jsonl")
	// A socket's path is short.
	short, err := os.MkdirTemp("", "tap")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(short) })
	b.socket = filepath.Join(short, "s")
	if err := os.WriteFile(b.in, demotest.Read(t, "sequences.jsonl"), 0o600); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *rig) drive(mode string, args ...string) *process {
	b.t.Helper()
	script, err := filepath.Abs("../../extract/tap/python/tests/drive.py")
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Setenv("PYTHONPATH", filepath.Join(filepath.Dir(filepath.Dir(script)), "src"))
	return start(b.t, "engine", b.python, append([]string{script, mode, "--model", b.model, "--socket", b.socket, "--sequences", b.in}, args...)...)
}

// last is the JSON object that an engine printed last.
func last[T any](t *testing.T, p *process) (out T) {
	t.Helper()
	lines := slices.DeleteFunc(strings.Split(p.log.String(), "\n"), func(l string) bool { return !strings.HasPrefix(l, "{") })
	if len(lines) == 0 {
		t.Fatalf("the engine printed nothing:\n%s", p.log.String())
	}
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &out); err != nil {
		t.Fatalf("%v in %s", err, lines[len(lines)-1])
	}
	return out
}

func (b *rig) tap(args ...string) *process {
	b.t.Helper()
	return draftscope(b.t, "tap", append([]string{"tap", "--socket", b.socket, "--target", b.model}, args...)...)
}

// program runs a command in this process and returns its stdout.
func (b *rig) program(want int, args ...string) string {
	b.t.Helper()
	var stdout, stderr bytes.Buffer
	if code := run(context.Background(), args, &stdout, &stderr); code != want {
		b.t.Fatalf("%q: exit %d, want %d: %s", args, code, want, stderr.String())
	}
	return stdout.String()
}

// fed writes what an engine fed to its model: all tokens but the last.
func (b *rig) fed(list []served) string {
	b.t.Helper()
	var out []byte
	for _, s := range list {
		s.InputIDs = s.InputIDs[:len(s.InputIDs)-1]
		s.PromptLen = min(s.PromptLen, len(s.InputIDs))
		line, err := json.Marshal(s)
		if err != nil {
			b.t.Fatal(err)
		}
		out = append(append(out, line...), '\n')
	}
	name := filepath.Join(b.dir, "fed.jsonl")
	if err := os.WriteFile(name, out, 0o600); err != nil {
		b.t.Fatal(err)
	}
	return name
}

func (b *rig) query(ds, sql string) string {
	b.t.Helper()
	return strings.TrimSpace(b.program(exitOK, "query", "--dataset", ds, "--format", "csv", sql))
}

// likeNative captures what was fed natively, as run native of the dataset,
// and compares every row of run r1 with it.
func (b *rig) likeNative(ds string, list []served, least float64, more ...string) {
	b.t.Helper()
	args := append([]string{"capture", "--target", b.model, "--sequences", b.fed(list), "--run", "native", "--states", "2,4,5,6,8", "--out", ds}, more...)
	b.program(exitOK, args...)
	got := b.query(ds, `SELECT a.state, count(*) AS n, min(list_cosine_similarity(a.vec, b.vec)) AS least,
		(SELECT count(*) FROM states c WHERE c.run = 'native' AND c.state = a.state) AS native,
		(SELECT count(*) FROM states c WHERE c.run = 'r1' AND c.state = a.state) AS tapped
		FROM states a JOIN states b USING (seq_id, pos, state) JOIN tokens ta USING (seq_id, pos) JOIN tokens tb USING (seq_id, pos)
		WHERE a.run = 'r1' AND b.run = 'native' AND ta.run = 'r1' AND tb.run = 'native' AND ta.token_id = tb.token_id AND ta.loss_mask = tb.loss_mask
		GROUP BY a.state ORDER BY a.state`)
	b.t.Logf("every row against the native capture:\n%s", got)
	lines := strings.Split(got, "\n")[1:]
	if len(lines) != 5 {
		b.t.Fatalf("%d states compare, want 5", len(lines))
	}
	for _, line := range lines {
		var state, n, native, tapped int
		var cosine float64
		if _, err := fmt.Sscanf(strings.ReplaceAll(line, ",", " "), "%d %d %g %d %d", &state, &n, &cosine, &native, &tapped); err != nil {
			b.t.Fatal(err)
		}
		if n != native || n != tapped || cosine < least {
			b.t.Errorf("state %d: %d rows compare of %d native and %d tapped, least cosine %v, want %v", state, n, native, tapped, cosine, least)
		}
	}
}

func TestStatesAndAcceptanceFromTransformersAreThoseOfANativeRun(t *testing.T) {
	b := newRig(t)
	ds := filepath.Join(b.dir, "ds")
	drafters := []string{"--drafter", "good=" + filepath.Join(b.dir, "demo/drafters/good"), "--drafter", "early=" + filepath.Join(b.dir, "demo/drafters/early"), "--budgets", "8,16"}
	daemon := b.tap(append([]string{"--out", ds, "--once"}, drafters...)...)
	engine := b.drive("generate", "--count", "24", "--batch", "8")
	engine.succeed(t, 5*time.Minute)
	daemon.succeed(t, 2*time.Minute)
	got := last[driven](t, engine)
	if got.Daemon == nil || *got.Daemon != got.Engine || got.Engine.Finished != 24 {
		t.Errorf("counts: engine %+v, daemon %+v", got.Engine, got.Daemon)
	}
	// The engine's text is the reference's.
	lines := strings.Split(strings.TrimSpace(string(demotest.Read(t, "sequences.jsonl"))), "\n")
	for i, s := range got.Served {
		var want served
		if err := json.Unmarshal([]byte(lines[i]), &want); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(s.InputIDs, want.InputIDs) {
			t.Errorf("%s: the engine generated other tokens than the reference", s.ID)
		}
	}
	b.likeNative(ds, got.Served, 0.9999)
	b.program(exitOK, append([]string{"replay", "--dataset", ds, "--run", "native", "--target", b.model}, drafters...)...)
	rounds := "SELECT drafter, seq_id, method, budget, round, anchor, proposed, accepted, accept_len, truncated FROM rounds WHERE run = '%s'"
	both := b.query(ds, fmt.Sprintf("SELECT count(*) AS n, (SELECT count(*) FROM ("+rounds+" EXCEPT "+rounds+")) AS differ FROM rounds WHERE run = 'r1'", "r1", "native"))
	t.Logf("rounds, and how many differ from the native run's: %s", both)
	if !strings.HasSuffix(both, ",0") || strings.HasSuffix(both, "\n0,0") {
		t.Errorf("rounds of the tap and of the native run differ: %s", both)
	}
	t.Logf("acceptance:\n%s", b.query(ds, "SELECT run, drafter, method, budget, accept_len_macro, accept_len_micro FROM accept_len ORDER BY drafter, method, budget, run"))
}

// texts are the sequences that an engine is to serve.
func (b *rig) texts() (list []served) {
	b.t.Helper()
	raw, err := os.ReadFile(b.in)
	if err != nil {
		b.t.Fatal(err)
	}
	for line := range strings.SplitSeq(strings.TrimSpace(string(raw)), "\n") {
		var s served
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			b.t.Fatal(err)
		}
		list = append(list, s)
	}
	return list
}

// rewrite changes the sequences that an engine is to serve.
func (b *rig) rewrite(change func([]served) []served) {
	b.t.Helper()
	var out []byte
	for _, s := range change(b.texts()) {
		line, err := json.Marshal(s)
		if err != nil {
			b.t.Fatal(err)
		}
		out = append(append(out, line...), '\n')
	}
	if err := os.WriteFile(b.in, out, 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// lent checks that the first rows of the sequences that say so are, to the
// last bit, those of the sequence of run r1 that they name, and returns how
// many such sequences and rows of a state there are.
func (b *rig) lent(ds string) (sequences, rows int) {
	b.t.Helper()
	got := b.query(ds, `WITH lent AS (SELECT seq_id, tags['draftscope.prefix_rows']::INT AS n, tags['draftscope.prefix_from'] AS lender FROM sequences
			WHERE run = 'r1' AND tags['draftscope.prefix_rows'] IS NOT NULL)
		SELECT (SELECT count(*) FROM lent), (SELECT sum(n) FROM lent), count(*) / count(DISTINCT a.state), count(*) FILTER (a.vec != b.vec OR ta.token_id != tb.token_id)
		FROM lent l JOIN states a ON a.run = 'r1' AND a.seq_id = l.seq_id AND a.pos < l.n
		JOIN states b ON b.run = 'r1' AND b.seq_id = l.lender AND b.pos = a.pos AND b.state = a.state
		JOIN tokens ta ON ta.run = 'r1' AND ta.seq_id = a.seq_id AND ta.pos = a.pos JOIN tokens tb ON tb.run = 'r1' AND tb.seq_id = b.seq_id AND tb.pos = a.pos`)
	var found float64
	var differ int
	line := strings.ReplaceAll(got[strings.LastIndex(got, "\n")+1:], ",", " ")
	if _, err := fmt.Sscan(line, &sequences, &rows, &found, &differ); err != nil {
		b.t.Fatalf("%v: %s", err, got)
	}
	b.t.Logf("%d sequences were completed with %d rows of others", sequences, rows)
	if differ != 0 || int(found) != rows {
		b.t.Errorf("%d rows are lent, %v compare, and %d of all states differ from the lender's", rows, found, differ)
	}
	return sequences, rows
}

func TestAPrefixThatACacheHasIsCompletedFromAnotherRequestsRows(t *testing.T) {
	b := newRig(t)
	b.rewrite(func(list []served) []served { return list[:9] })
	ds := filepath.Join(b.dir, "ds")
	daemon := b.tap("--out", ds, "--once", "--states", "2,4,5,6,8", "--probe-every", "1")
	engine := b.drive("prefix", "--count", "9", "--new", "40")
	engine.succeed(t, 5*time.Minute)
	daemon.succeed(t, time.Minute)
	list := last[driven](t, engine).Served
	if n, rows := b.lent(ds); n != 8 || rows != 8*list[0].PromptLen {
		t.Errorf("%d sequences completed with %d rows, want 8 with %d each", n, rows, list[0].PromptLen)
	}
	b.likeNative(ds, list, 0.9999)
	// Without rows to complete them from, they are refused.
	refused := filepath.Join(b.dir, "refused")
	daemon = b.tap("--out", refused, "--once", "--states", "2,4,5,6,8", "--prefix-memory", "0")
	b.drive("prefix", "--count", "9", "--new", "4").succeed(t, 5*time.Minute)
	if code := daemon.exit(t, time.Minute); code != exitPartial {
		t.Fatalf("exit %d, want %d: %s", code, exitPartial, lastLines(daemon))
	}
	if got := b.query(refused, `SELECT (SELECT count(*) FROM sequences), count(*) FROM faults WHERE "check" = 'K3' AND detail LIKE '%a prefix cache has them%'`); !strings.HasSuffix(got, "\n1,8") {
		t.Errorf("stored, refused: %s; want 1 and 8", got)
	}
}

func TestEnginesThatComputeInSixteenBitsPassTheProbe(t *testing.T) {
	for _, dtype := range []string{"bfloat16", "float16"} {
		t.Run(dtype, func(t *testing.T) {
			b := newRig(t)
			ds := filepath.Join(b.dir, "ds")
			daemon := b.tap("--out", ds, "--once", "--states", "2,4,5,6,8", "--probe-every", "1")
			engine := b.drive("generate", "--count", "4", "--new", "24", "--dtype", dtype)
			engine.succeed(t, 5*time.Minute)
			daemon.succeed(t, time.Minute)
			// Not 0.9999: the engine's own arithmetic has eight bits or eleven.
			b.likeNative(ds, last[driven](t, engine).Served, map[string]float64{"bfloat16": 0.98, "float16": 0.9999}[dtype])
		})
	}
}

func TestUnderLoadNothingIsMixedAndCountsAreEqual(t *testing.T) {
	b := newRig(t)
	ds := filepath.Join(b.dir, "ds")
	daemon := b.tap("--out", ds, "--once", "--states", "2,4,5,6,8")
	// 512 rows of ring, for prompts of 3,000: requests wait for credit.
	engine := b.drive("load", "--count", "64", "--ring-bytes", "2625536")
	engine.succeed(t, 5*time.Minute)
	if code := daemon.exit(t, time.Minute); code != exitPartial {
		t.Fatalf("exit %d, want %d: %s", code, exitPartial, lastLines(daemon))
	}
	got := last[driven](t, engine)
	if got.Daemon == nil || *got.Daemon != got.Engine {
		t.Errorf("counts: engine %+v, daemon %+v", got.Engine, got.Daemon)
	}
	e := got.Engine
	if e.Begun != 64 || e.Aborted != int64(len(got.GivenUp)) || e.Begun != e.Finished+e.Aborted+e.Shed || e.Aborted < 5 {
		t.Errorf("counts: %+v, %d given up, %d served", e, len(got.GivenUp), len(got.Served))
	}
	t.Logf("64 threads in %.1f s: %+v", got.Seconds, e)
	stored := b.query(ds, "SELECT count(*) FROM sequences")
	stones := b.query(ds, `SELECT "check", count(*) FROM faults GROUP BY ALL ORDER BY ALL`)
	t.Logf("stored %q, faults %q", stored, stones)
	if want := fmt.Sprintf("\n%d", e.Finished); !strings.HasSuffix(stored, want) {
		t.Errorf("stored %q, finished %d", stored, e.Finished)
	}
	if !strings.Contains(stones, fmt.Sprintf("aborted,%d", e.Aborted)) {
		t.Errorf("tombstones %q, aborted %d", stones, e.Aborted)
	}
	if e.Shed > 0 {
		t.Logf("%d requests were shed; the rows of the others are compared", e.Shed)
	}
	b.likeNative(ds, b.stored(ds, got.Served), 0.9999)
}

// stored picks what a dataset has.
func (b *rig) stored(ds string, list []served) []served {
	b.t.Helper()
	have := strings.Split(b.query(ds, "SELECT seq_id FROM sequences WHERE run = 'r1'"), "\n")
	return slices.DeleteFunc(list, func(s served) bool { return !slices.Contains(have, s.ID) })
}

func TestAFrozenDaemonCostsOneDeadlineAndShedsExactly(t *testing.T) {
	b := newRig(t)
	ds := filepath.Join(b.dir, "ds")
	daemon := b.tap("--out", ds, "--once", "--states", "2,4,5,6,8")
	engine := b.drive("load", "--count", "48", "--ring-bytes", "659456", "--staging-bytes", "4000000")
	b.until(engine, daemon, func() bool { return strings.Contains(daemon.log.String(), "engine transformers") })
	time.Sleep(500 * time.Millisecond)
	daemon.signal(syscall.SIGSTOP)
	time.Sleep(3 * time.Second)
	daemon.signal(syscall.SIGCONT)
	engine.succeed(t, 5*time.Minute)
	if code := daemon.exit(t, time.Minute); code != exitPartial {
		t.Fatalf("exit %d, want %d: %s", code, exitPartial, lastLines(daemon))
	}
	got := last[driven](t, engine)
	e := got.Engine
	if got.Daemon == nil || *got.Daemon != e || e.Shed == 0 || e.Begun != e.Finished+e.Aborted+e.Shed {
		t.Errorf("counts: engine %+v, daemon %+v; some must be shed", e, got.Daemon)
	}
	faults := b.query(ds, `SELECT "check", count(*) FROM faults GROUP BY ALL ORDER BY ALL`)
	t.Logf("%+v; faults %q; stored %q", e, faults, b.query(ds, "SELECT count(*), sum(length) FROM sequences"))
	if !strings.Contains(faults, fmt.Sprintf("shed,%d", e.Shed)) {
		t.Errorf("tombstones %q, shed %d", faults, e.Shed)
	}
}

// until waits for something while two processes run.
func (b *rig) until(engine, daemon *process, ok func() bool) {
	b.t.Helper()
	for end := time.Now().Add(5 * time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) || !engine.running() {
			b.t.Fatalf("it did not come to that:\nengine: %s\ndaemon: %s", lastLines(engine), lastLines(daemon))
		}
	}
}

// beat is what an engine that serves forever says of a batch.
type beat struct {
	N                 int
	Seconds           float64 // that the batch took
	TokensPerSecond   float64 `json:"tokens_per_second"`
	Connected, Mapped bool
	Counts            tapCounts
}

// frozen stops the engine's process while that many requests are open at the
// daemon that shows itself at page.
func (b *rig) frozen(engine, daemon *process, pid int, page string, open int) {
	b.t.Helper()
	want := fmt.Sprintf("draftscope_tap_open_requests{run=\"r1\"} %d\n", open)
	b.until(engine, daemon, func() bool {
		if !strings.Contains(get(b.t, "http://"+page+"/metrics"), want) {
			return false
		}
		b.signal(pid, syscall.SIGSTOP)
		time.Sleep(100 * time.Millisecond) // what it sent is read
		if strings.Contains(get(b.t, "http://"+page+"/metrics"), want) {
			return true
		}
		b.signal(pid, syscall.SIGCONT)
		return false
	})
}

func (b *rig) signal(pid int, sig syscall.Signal) {
	b.t.Helper()
	if err := syscall.Kill(pid, sig); err != nil {
		b.t.Fatalf("sending %v to process %d: %v", sig, pid, err)
	}
}

// maps says whether a process has a ring mapped.
func (b *rig) maps(pid int) bool {
	b.t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		b.t.Fatal(err)
	}
	return bytes.Contains(maps, []byte("memfd:draftscope-tap"))
}

// unmapped waits until the daemon has no ring mapped, and a second more.
func (b *rig) unmapped(daemon *process) {
	b.t.Helper()
	for end := time.Now().Add(10 * time.Second); b.maps(daemon.cmd.Process.Pid); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			b.t.Fatal("the daemon still maps a dead engine's ring")
		}
	}
	time.Sleep(time.Second)
}

func TestAKilledDaemonDoesNotStopServingAndANewOneGoesOn(t *testing.T) {
	b := newRig(t)
	ds := filepath.Join(b.dir, "ds")
	args := []string{"--out", ds, "--states", "2,4,5,6,8"}
	page := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	daemon := b.tap(append(args, "--http", page)...)
	engine := b.drive("forever", "--batch", "4", "--new", "16")
	at := func(n int) func() bool {
		return func() bool { return strings.Contains(engine.log.String(), fmt.Sprintf(`"n": %d,`, n)) }
	}
	b.until(engine, daemon, at(2))
	with := last[beat](t, engine)
	b.frozen(engine, daemon, engine.cmd.Process.Pid, page, 4)
	daemon.kill()
	engine.signal(syscall.SIGCONT)
	b.until(engine, daemon, at(last[beat](t, engine).N+4))
	without := last[beat](t, engine)
	if without.Connected || without.Mapped || without.Counts.Lost == 0 {
		t.Errorf("after the daemon's death: %+v; want no connection, no mapping, and what was open counted", without)
	}
	again := b.tap(args...)
	b.until(engine, again, func() bool { return last[beat](t, engine).Connected })
	n := last[beat](t, engine).N
	b.until(engine, again, at(n+3))
	t.Logf("tokens/s with the daemon %.0f, without %.0f, with the next one %.0f", with.TokensPerSecond, without.TokensPerSecond, last[beat](t, engine).TokensPerSecond)
	// One that is stopped leaves no request unaccounted for, and the engine
	// comes back to the next one, too.
	stopped := func(daemon *process) {
		t.Helper()
		daemon.signal(syscall.SIGTERM)
		if code := daemon.exit(t, time.Minute); code != exitPartial && code != exitOK {
			t.Fatalf("exit %d: %s", code, lastLines(daemon))
		}
		log := daemon.log.String()
		var began, finished, aborted, shed, stored, tokens, dropped, tombstones, faults int
		if _, err := fmt.Sscanf(log[strings.Index(log, "run r1: "):], "run r1: %d requests began, %d finished, %d aborted, %d shed by the engine; %d stored with %d tokens, %d not wanted, %d tombstones, %d faults",
			&began, &finished, &aborted, &shed, &stored, &tokens, &dropped, &tombstones, &faults); err != nil {
			t.Fatalf("%v: %s", err, log)
		}
		if began == 0 || began != stored+tombstones || faults != 0 || dropped != 0 {
			t.Errorf("a stopped daemon: %s", lastLines(daemon))
		}
	}
	stopped(again)
	b.until(engine, again, func() bool { return !last[beat](t, engine).Connected })
	next := b.tap(args...)
	b.until(engine, next, func() bool { return last[beat](t, engine).Connected })
	b.until(engine, next, at(last[beat](t, engine).N+2))
	stopped(next)
	engine.kill()
	got := b.query(ds, fmt.Sprintf("SELECT count(*) FROM sequences WHERE split_part(seq_id, '-', 2)::INT > %d", without.N))
	if strings.HasSuffix(got, "\n0") {
		t.Errorf("nothing was captured after the new daemon came: %s", got)
	}
	whole := b.query(ds, "SELECT count(*) FROM (SELECT seq_id, any_value(s.length) AS n, count(*) AS rows FROM sequences s JOIN states USING (seq_id) GROUP BY seq_id HAVING rows != 5 * n)")
	if !strings.HasSuffix(whole, "\n0") {
		t.Errorf("sequences that are not whole: %s", whole)
	}
}

func TestAKilledEngineLeavesTombstonesAndNoMapping(t *testing.T) {
	b := newRig(t)
	ds := filepath.Join(b.dir, "ds")
	page := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	daemon := b.tap("--out", ds, "--states", "2,4,5,6,8", "--http", page)
	engine := b.drive("forever", "--batch", "4", "--new", "64")
	b.until(engine, daemon, func() bool { return strings.Contains(engine.log.String(), `"n": 0,`) })
	if !b.maps(daemon.cmd.Process.Pid) {
		t.Fatal("the daemon has no ring mapped while the engine serves")
	}
	b.frozen(engine, daemon, engine.cmd.Process.Pid, page, 4)
	engine.kill()
	b.unmapped(daemon)
	daemon.signal(syscall.SIGINT)
	if code := daemon.exit(t, time.Minute); code != exitPartial {
		t.Fatalf("exit %d, want %d: %s", code, exitPartial, lastLines(daemon))
	}
	got := b.query(ds, `SELECT "check", count(*) FROM faults GROUP BY ALL`)
	t.Logf("%s\n%s", got, lastLines(daemon))
	if !strings.Contains(got, "disconnected,4") {
		t.Errorf("tombstones: %q, want 4 disconnected", got)
	}
}

func TestAWrongClaimIsCaughtBeforeAnythingIsStored(t *testing.T) {
	for _, tt := range []struct{ lie, dtype, says string }{
		{"plus", "float32", "state 4: it is state 5"},
		{"minus", "float32", "state 4: it is state 3"},
		{"postnorm", "float32", "state 8: it is the last state after the final norm"},
		{"swap", "float32", "state 4: it is state 6"},
		{"bits", "bfloat16", "its bytes are bf16, sent as f16"},
		{"bits", "float16", "its bytes are f16, sent as bf16"},
		{"prefix", "float32", "it is none of the target's states"},
	} {
		t.Run(tt.lie+" "+tt.dtype, func(t *testing.T) {
			b := newRig(t)
			ds := filepath.Join(b.dir, "ds")
			daemon := b.tap("--out", ds, "--once", "--states", "all")
			engine := b.drive("generate", "--count", "2", "--new", "24", "--lie", tt.lie, "--dtype", tt.dtype)
			b.refuses(t, daemon, ds, tt.says, 5*time.Minute)
			engine.succeed(t, 2*time.Minute)
			if got := last[driven](t, engine); got.Refused == nil {
				t.Error("the engine was not told")
			}
		})
	}
}

// refuses waits for a daemon that is to end over a wrong claim, saying so and
// storing nothing in ds.
func (b *rig) refuses(t *testing.T, daemon *process, ds, says string, within time.Duration) {
	t.Helper()
	if code := daemon.exit(t, within); code != exitUsage || !strings.Contains(daemon.log.String(), says) {
		t.Fatalf("exit %d, want %d and %q:\n%s", code, exitUsage, says, lastLines(daemon))
	}
	if got := b.query(ds, "SELECT count(*) FROM sequences"); !strings.HasSuffix(got, "\n0") {
		t.Errorf("stored all the same: %s", got)
	}
	for line := range strings.SplitSeq(daemon.log.String(), "\n") {
		if strings.Contains(line, says) && strings.HasPrefix(line, "draftscope:") {
			t.Logf("%.300s", line)
		}
	}
}

func lastLines(p *process) string {
	lines := strings.Split(strings.TrimSpace(p.log.String()), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}

func TestFilesThatOthersSerialisersWroteImport(t *testing.T) {
	b := newRig(t)
	foreign := filepath.Join(b.dir, "foreign")
	start(t, "foreign", b.python, "testdata/engines/foreign.py", b.model, b.in, foreign).succeed(t, 5*time.Minute)
	ds := filepath.Join(b.dir, "ds")
	for _, tt := range []struct{ run, format, dir, states string }{
		{"vllm", "vllm", "vllm", "2,4,5,8"},
		{"eagle", "specforge", "specforge", "2,4,5"},
		{"dflash", "specforge", "dflash", "2,4,5"},
		{"deepspec", "deepspec", "deepspec", "2,4,5"},
	} {
		// Nothing is said of the states: the target finds them.
		b.program(exitOK, "import", "--format", tt.format, "--target", b.model, "--out", ds, "--run", tt.run, filepath.Join(foreign, tt.dir))
		if got := b.query(ds, fmt.Sprintf("SELECT string_agg(DISTINCT state::VARCHAR, ',' ORDER BY state::VARCHAR) AS s FROM states WHERE run = '%s'", tt.run)); got != "s\n\""+tt.states+"\"" {
			t.Errorf("%s: states %q, want %s", tt.run, got, tt.states)
		}
		// A wrong claim is refused.
		b.program(exitUsage, "import", "--format", tt.format, "--target", b.model, "--states", strings.Replace(tt.states, "4,5", "5,6", 1),
			"--out", filepath.Join(b.dir, tt.run), filepath.Join(foreign, tt.dir))
	}
	list := b.sequences(4)
	b.program(exitOK, "capture", "--target", b.model, "--sequences", list, "--run", "native", "--states", "2,4,5,8", "--out", ds)
	got := b.query(ds, `SELECT a.run, count(*) AS n, count(DISTINCT seq_id) AS seqs, min(c) >= 0.999 AS near FROM (
		SELECT a.run, a.seq_id, list_cosine_similarity(a.vec, b.vec) AS c FROM states a JOIN states b ON b.run = 'native' AND a.run != 'native'
		AND b.seq_id = 'p000' || right(a.seq_id, 1) AND a.pos = b.pos AND a.state = b.state) a GROUP BY ALL ORDER BY ALL`)
	t.Log(got)
	whole := b.query(ds, "SELECT count(*) FROM states WHERE run = 'native' AND state IN (2, 4, 5)")
	n := strings.TrimPrefix(whole[strings.LastIndex(whole, "\n"):], "\n")
	for _, run := range []string{"dflash", "deepspec", "eagle"} {
		if !strings.Contains(got, fmt.Sprintf("%s,%s,4,true", run, n)) {
			t.Errorf("%s: want %s rows of 4 sequences near the native ones, got\n%s", run, n, got)
		}
	}
	if !strings.Contains(got, ",4,true\n") && !strings.HasSuffix(got, ",4,true") || strings.Contains(got, "false") {
		t.Errorf("vllm: %s", got)
	}
}

// sequences writes the first n sequences.
func (b *rig) sequences(n int) string {
	b.t.Helper()
	raw, err := os.ReadFile(b.in)
	if err != nil {
		b.t.Fatal(err)
	}
	name := filepath.Join(b.dir, "some.jsonl")
	lines := strings.SplitAfter(string(raw), "\n")[:n]
	if err := os.WriteFile(name, []byte(strings.Join(lines, "")), 0o600); err != nil {
		b.t.Fatal(err)
	}
	return name
}

// exported captures four sequences into ds, as a run named after the dtype, and
// exports them in every format; it gives the folder of a format.
func (b *rig) exported(ds, dtype, states string) func(format string) string {
	b.t.Helper()
	b.program(exitOK, "capture", "--target", b.model, "--sequences", b.sequences(4), "--run", dtype, "--states", states, "--dtype", dtype, "--out", ds)
	to := func(format string) string { return filepath.Join(b.dir, dtype, format) }
	formats := []string{"vllm", "speculators", "specforge"}
	if strings.Count(states, ",") == 3 {
		formats = append(formats, "specforge-eagle3")
	}
	for _, format := range formats {
		b.program(exitOK, "export", "--dataset", ds, "--run", dtype, "--format", format, "--target", b.model, "--to", to(format))
	}
	return to
}

// comesBack imports what was exported of a run: so many of its states, equal
// to the last bit.
func (b *rig) comesBack(ds, run, format, dir string, states int) {
	b.t.Helper()
	back := run + filepath.Base(dir)
	b.program(exitOK, "import", "--format", format, "--target", b.model, "--out", ds, "--run", back, dir)
	got := b.query(ds, fmt.Sprintf(`WITH t AS (SELECT run, seq_id, list(token_id ORDER BY pos) AS ids FROM tokens GROUP BY ALL)
		SELECT count(*), count(*) FILTER (a.vec = b.vec), count(DISTINCT a.state) FROM t ta JOIN t tb USING (ids)
		JOIN states a ON a.run = ta.run AND a.seq_id = ta.seq_id JOIN states b ON b.run = tb.run AND b.seq_id = tb.seq_id AND a.pos = b.pos AND a.state = b.state
		WHERE ta.run = '%s' AND tb.run = '%s'`, run, back))
	b.t.Logf("%s: rows, equal ones, and states:\n%s", back, got)
	var n, equal, have int
	if _, err := fmt.Sscanf(got[strings.LastIndex(got, "\n")+1:], "%d,%d,%d", &n, &equal, &have); err != nil || n != equal || n == 0 || have != states {
		b.t.Errorf("%s came back changed: %s (%v)", back, got, err)
	}
}

func TestOthersOwnReadersReadWhatIsExported(t *testing.T) {
	b := newRig(t)
	ds := filepath.Join(b.dir, "ds")
	for _, dtype := range []string{"bf16", "f32"} {
		to := b.exported(ds, dtype, "2,4,8")
		for _, format := range []string{"speculators", "specforge"} {
			p := start(t, "reader", b.python, "testdata/engines/readers.py", format, to(format), to("vllm"))
			p.succeed(t, 3*time.Minute)
			if got := last[struct{ Equal int }](t, p); got.Equal != 4 {
				t.Errorf("%s %s: %d of 4 samples are equal", format, dtype, got.Equal)
			}
			b.comesBack(ds, dtype, format, to(format), 3)
		}
	}
}

func TestTrainersOwnDataClassesReadWhatIsExported(t *testing.T) {
	b := newRig(t)
	ds := filepath.Join(b.dir, "ds")
	for _, dtype := range []string{"bf16", "f32"} {
		to := b.exported(ds, dtype, "2,4,5,8")
		for _, trainer := range []string{"speculators", "specforge", "specforge-eagle3"} {
			p := start(t, trainer, b.python, "testdata/engines/trainers.py", trainer, to(trainer), to("vllm"), b.model)
			p.succeed(t, 5*time.Minute)
			t.Logf("%s %s: %s", trainer, dtype, lastLines(p))
			if got := last[struct{ Equal int }](t, p); got.Equal != 4 {
				t.Errorf("%s %s: %d of 4 samples are equal", trainer, dtype, got.Equal)
			}
		}
		// EAGLE3's samples come back without the last state, which cannot be had from its norm.
		b.comesBack(ds, dtype, "specforge", to("specforge-eagle3"), 3)
	}
}
