//go:build engines && fleet

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// httpAnswer is what a client of vLLM's server was given.
type httpAnswer struct {
	served
	Name         string // that the client gave its request
	FinishReason string `json:"finish_reason"`
	Tenant       string // the tag
	Greedy       bool
}

// begins says whether ids begin with the answer's.
func (a httpAnswer) begins(ids []int32) bool {
	return len(ids) >= len(a.InputIDs) && slices.Equal(ids[:len(a.InputIDs)], a.InputIDs)
}

// httpAnswers are what drive_http.py prints at its end.
type httpAnswers struct {
	Served  []httpAnswer
	GivenUp []string `json:"given_up"` // streams, behind a token
	HungUp  []string `json:"hung_up"`  // the others, maybe before they were scheduled
	KeptOut []string `json:"kept_out"`
}

// server is an engine with OpenAI's API.
type server struct {
	*process
	url string
}

// byConnector are the arguments by which docs/tap.md has vLLM load the
// connector.
func (b *rig) byConnector() []string {
	return []string{"--kv-transfer-config", fmt.Sprintf(`{"kv_connector": "TapConnector", "kv_connector_module_path": "draftscope_tap.vllm",
		"kv_role": "kv_both", "kv_connector_extra_config": {"socket": %q}}`, b.socket)}
}

// serveVLLM starts `vllm serve` and waits until it answers. With no
// arguments, the plugin finds the socket in the environment.
func (b *rig) serveVLLM(args ...string) *server {
	b.t.Helper()
	for k, v := range map[string]string{
		"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
		// The machine is shared with the daemon, and a process that is
		// spawned imports vLLM again.
		"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork",
	} {
		b.t.Setenv(k, v)
	}
	if len(args) == 0 {
		b.t.Setenv("DRAFTSCOPE_TAP_SOCKET", b.socket)
	}
	port := strconv.Itoa(freePort(b.t))
	all := []string{
		"serve", b.model, "--served-model-name", "target", "--host", "127.0.0.1", "--port", port, "--chat-template", b.template(),
		"--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16", "--enforce-eager", "--shutdown-timeout", "60",
	}
	return b.served(start(b.t, "vllm serve", filepath.Join(filepath.Dir(b.python), "vllm"), append(all, args...)...), port)
}

// template writes a chat template, since the target has none of its own: it is
// draftscope's ChatML.
func (b *rig) template() string {
	b.t.Helper()
	name := filepath.Join(b.dir, "chatml.jinja")
	const chatML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}" +
		"{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
	if err := os.WriteFile(name, []byte(chatML), 0o600); err != nil {
		b.t.Fatal(err)
	}
	return name
}

// served waits until a server answers.
func (b *rig) served(p *process, port string) *server {
	b.t.Helper()
	v := &server{p, "http://127.0.0.1:" + port}
	b.t.Cleanup(func() { v.stop(b.t) }) // its children with it, which a kill would leave
	for end := time.Now().Add(vllmTime); !v.healthy(); time.Sleep(200 * time.Millisecond) {
		if time.Now().After(end) || !v.running() {
			b.t.Fatalf("%s did not start:\n%s", v.name, v.log.String())
		}
	}
	return v
}

func (v *server) healthy() bool {
	resp, err := http.Get(v.url + "/health")
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// stop ends the server as an operator does.
func (v *server) stop(t *testing.T) {
	t.Helper()
	v.signal(syscall.SIGTERM)
	v.exit(t, 2*time.Minute)
}

// crowd starts the clients.
func (b *rig) crowd(v *server, args ...string) *process {
	b.t.Helper()
	script, err := filepath.Abs("../../extract/tap/python/tests/drive_http.py")
	if err != nil {
		b.t.Fatal(err)
	}
	return start(b.t, "clients", b.python, append([]string{script, "--url", v.url + "/v1", "--sequences", b.in}, args...)...)
}

// tapped is a sequence of run r1 as it is stored: the ids that have rows.
type tapped struct {
	served
	FinishReason string `json:"finish_reason"`
	Tenant       string
}

func (b *rig) tapped(ds string) (list []tapped) {
	b.t.Helper()
	raw := b.program(exitOK, "query", "--dataset", ds, "--format", "json", `SELECT seq_id AS id, any_value(s.prompt_len) AS prompt_len,
		any_value(finish_reason) AS finish_reason, any_value(tags['tenant']) AS tenant, list(token_id ORDER BY pos) AS input_ids
		FROM sequences s JOIN tokens USING (run, seq_id) WHERE run = 'r1' GROUP BY seq_id`)
	if err := json.Unmarshal([]byte(raw), &list); err != nil {
		b.t.Fatalf("%v in %.200s", err, raw)
	}
	return list
}

// checked compares what clients were given with what is stored: ids, names,
// tags, reasons, and the reference's texts; and returns the sequences. So many
// as own are prompts that the server ran for itself.
func (b *rig) checked(ds string, list []httpAnswer, own int) []served {
	b.t.Helper()
	rows := b.tapped(ds)
	reference := b.texts()
	var out []served
	taken := map[string]bool{}
	for _, a := range list {
		i := slices.IndexFunc(rows, func(r tapped) bool {
			named := r.ID == a.ID || a.ID == "" && (r.ID == a.Name || strings.HasPrefix(r.ID, a.Name+".t"))
			// The last token may have no row.
			return named && !taken[r.ID] && a.begins(append(slices.Clone(r.InputIDs), a.InputIDs[len(a.InputIDs)-1])) && len(r.InputIDs) <= len(a.InputIDs)
		})
		if i < 0 {
			b.t.Errorf("no sequence called %s has what its client was given: %v", a.Name, a.InputIDs)
			continue
		}
		r := rows[i]
		taken[r.ID] = true
		if r.FinishReason != a.FinishReason || r.Tenant != a.Tenant {
			b.t.Errorf("%s: stored with reason %q and tenant %q, want %q and %q", r.ID, r.FinishReason, r.Tenant, a.FinishReason, a.Tenant)
		}
		if a.Greedy && !slices.ContainsFunc(reference, func(s served) bool { return a.begins(s.InputIDs) }) {
			b.t.Errorf("%s is the beginning of no text of the reference", r.ID)
		}
		a.ID = r.ID
		out = append(out, a.served)
	}
	for _, r := range rows {
		if taken[r.ID] {
			continue
		}
		if own--; own < 0 || len(r.InputIDs) != r.PromptLen {
			b.t.Errorf("%s is stored, and no client was given it", r.ID)
		}
		out = append(out, r.served)
	}
	return out
}

func TestVLLMsServerIsTappedAsItsClientsComeAndGo(t *testing.T) {
	for _, tt := range []struct {
		name      string
		connector bool
	}{{"plugin", false}, {"connector", true}} {
		t.Run(tt.name, func(t *testing.T) {
			b := vllmRig(t)
			ds := filepath.Join(b.dir, "ds")
			daemon := b.tap("--out", ds, "--once", "--states", "0,2,4,5,6,8")
			var args []string
			if tt.connector {
				args = b.byConnector()
			}
			v := b.serveVLLM(args...)
			clients := b.crowd(v)
			clients.succeed(t, vllmTime)
			v.stop(t)
			if code := daemon.exit(t, time.Minute); code != exitPartial {
				t.Fatalf("the daemon: exit %d, want %d: %s", code, exitPartial, lastLines(daemon))
			}
			got := last[httpAnswers](t, clients)
			e := equalCounts(t, v.process)
			stones := b.cameAndWent(ds, got)
			t.Logf("%+v", e)
			if e.Finished != int64(len(got.Served)) || e.Aborted != int64(stones) || e.Shed != 0 {
				t.Errorf("%+v; %d answers, %d tombstones", e, len(got.Served), stones)
			}
			b.nearNative(ds, b.checked(ds, got.Served, 0), 0.9999)
		})
	}
}

// cameAndWent checks that each client that hung up left a tombstone, and
// nobody else, and returns how many there are. What was not scheduled yet is
// known to neither side.
func (b *rig) cameAndWent(ds string, got httpAnswers) int {
	b.t.Helper()
	stones := strings.Split(b.query(ds, `SELECT seq_id FROM faults WHERE "check" = 'aborted'`), "\n")[1:]
	if other := b.query(ds, `SELECT "check", seq_id FROM faults WHERE "check" != 'aborted'`); strings.Contains(other, "\n") {
		b.t.Errorf("other faults: %s", other)
	}
	stopped := 0
	for _, a := range got.Served {
		if a.StopReason == ")" {
			stopped++
		}
	}
	unscheduled := 0
	for _, id := range got.HungUp {
		if !slices.Contains(stones, id) {
			unscheduled++
		}
	}
	for _, id := range got.GivenUp {
		if !slices.Contains(stones, id) {
			b.t.Errorf("%s was given up, and left no tombstone", id)
		}
	}
	b.t.Logf("%d answers, %d ended by a stop string; %d streams given up, %d other clients hung up (%d before their requests were scheduled), %d kept out; %d tombstones",
		len(got.Served), stopped, len(got.GivenUp), len(got.HungUp), unscheduled, len(got.KeptOut), len(stones))
	if len(stones) != len(got.GivenUp)+len(got.HungUp)-unscheduled || len(got.GivenUp) < 4 || len(got.HungUp) == unscheduled || stopped < 4 || len(got.KeptOut) < 4 {
		b.t.Error("these numbers do not agree, or are too small to say anything")
	}
	return len(stones)
}

// workerOf is the process of vLLM that runs the model: it is the daemon's
// peer.
func workerOf(t *testing.T, daemon *process) int {
	t.Helper()
	m := regexp.MustCompile(`engine vllm \S+ \(pid (\d+)\)`).FindStringSubmatch(daemon.log.String())
	if m == nil {
		t.Fatalf("the daemon names no engine:\n%s", daemon.log.String())
	}
	pid, err := strconv.Atoi(m[1])
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// answered is how many requests of clients that ask forever were answered.
func answered(p *process) int { return strings.Count(p.log.String(), `{"n":`) }

func TestAKilledDaemonDoesNotStopVLLMAndANewOneGoesOn(t *testing.T) {
	const open = 8
	b := vllmRig(t)
	ds := filepath.Join(b.dir, "ds")
	args := []string{"--out", ds, "--states", "0,2,4,5,6,8"}
	page := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	daemon := b.tap(append(args, "--http", page)...)
	v := b.serveVLLM()
	clients := b.crowd(v, "--workers", strconv.Itoa(open))
	b.until(clients, daemon, func() bool { return answered(clients) >= 2*open })
	worker := workerOf(t, daemon)
	b.frozen(clients, daemon, worker, page, open)
	daemon.kill()
	before := answered(clients)
	b.signal(worker, syscall.SIGCONT)
	b.until(clients, daemon, func() bool { return answered(clients) >= before+3*open })
	if b.maps(worker) {
		t.Error("the engine still maps a dead daemon's ring")
	}
	if regexp.MustCompile(`(?m)^w\d+-\d+: `).MatchString(clients.log.String()) || !v.healthy() {
		t.Errorf("a client was not served, or the server is ill:\n%s", lastLines(clients))
	}
	without := answered(clients) - before
	page = fmt.Sprintf("127.0.0.1:%d", freePort(t))
	again := b.tap(append(args, "--once", "--http", page)...)
	stored := regexp.MustCompile(`draftscope_tap_requests_total\{run="r1",what="stored"\} (\d+)`)
	b.until(clients, again, func() bool {
		if log := again.log.String(); !strings.Contains(log, "engine vllm") || !strings.Contains(log, "metrics at") {
			return false
		}
		m := stored.FindStringSubmatch(get(t, "http://"+page+"/metrics"))
		return m != nil && len(m[1]) > 1 // ten or more
	})
	clients.signal(syscall.SIGTERM)
	clients.succeed(t, time.Minute)
	v.stop(t)
	again.succeed(t, time.Minute)
	got := counted(t, v.process)
	e := got.Engine
	t.Logf("%+v; %d requests were answered while there was no daemon", e, without)
	if e.Lost != open || e.Begun != e.Finished+e.Aborted+e.Shed+e.Lost || e.Aborted+e.Shed != 0 {
		t.Errorf("counts: %+v; want %d lost, and each request counted once", e, open)
	}
	if got.Daemon == nil || got.Daemon.Begun != got.Daemon.Finished || got.Daemon.Finished < 10 || got.Daemon.Finished >= e.Finished {
		t.Errorf("the new daemon counts %+v, the engine in all %+v", got.Daemon, e)
	}
	b.nearNative(ds, b.checked(ds, b.given(ds, last[httpAnswers](t, clients)), 0), 0.9999)
}

// given are those of the answers that a dataset has.
func (b *rig) given(ds string, got httpAnswers) []httpAnswer {
	b.t.Helper()
	rows := b.tapped(ds)
	return slices.DeleteFunc(got.Served, func(a httpAnswer) bool {
		return !slices.ContainsFunc(rows, func(r tapped) bool { return r.ID == a.ID })
	})
}

func TestAKilledVLLMLeavesTombstonesAndNoMapping(t *testing.T) {
	const open = 8
	b := vllmRig(t)
	ds := filepath.Join(b.dir, "ds")
	page := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	daemon := b.tap("--out", ds, "--states", "0,2,4,5,6,8", "--http", page)
	v := b.serveVLLM(b.byConnector()...)
	clients := b.crowd(v, "--workers", strconv.Itoa(open))
	b.until(clients, daemon, func() bool { return answered(clients) >= 2*open })
	if !b.maps(daemon.cmd.Process.Pid) {
		t.Fatal("the daemon has no ring mapped while the engine serves")
	}
	worker := workerOf(t, daemon)
	b.frozen(clients, daemon, worker, page, open)
	b.signal(worker, syscall.SIGKILL)
	b.unmapped(daemon)
	clients.signal(syscall.SIGTERM) // what they ask now fails
	clients.succeed(t, 2*time.Minute)
	daemon.signal(syscall.SIGINT)
	if code := daemon.exit(t, time.Minute); code != exitPartial {
		t.Fatalf("exit %d, want %d: %s", code, exitPartial, lastLines(daemon))
	}
	faults := b.query(ds, `SELECT "check", count(*) FROM faults GROUP BY ALL`)
	t.Logf("%s\n%s", faults, lastLines(daemon))
	if !strings.HasSuffix(faults, fmt.Sprintf("\ndisconnected,%d", open)) || strings.Count(faults, "\n") != 1 {
		t.Errorf("tombstones: %q, want %d disconnected and no other", faults, open)
	}
	b.nearNative(ds, b.checked(ds, b.given(ds, last[httpAnswers](t, clients)), 0), 0.9999)
}
