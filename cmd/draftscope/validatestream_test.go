package main

import (
	"encoding/json"
	"math"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

func TestAWholeStreamHasNoFaultAndStaysAsItIs(t *testing.T) {
	url := plainServer(t)
	mustRun(t, exitUsage, "validate", "--nats", url)
	mustRun(t, exitUsage, "validate", "--nats", url, "--run", "nowhere")
	mustRun(t, exitOK, capturing(url, "--limit", "3")...)
	mustRun(t, exitOK, "draft", "--nats", url, "--run", "r1", "--budgets", "8", "--once", "--lease", "1s")
	got, _ := mustRun(t, exitOK, "validate", "--nats", url, "--run", "r1", "--target", "demo")
	if !strings.Contains(got, "stream, 3 samples checked, 0 faulty, 0 faults, 0 warnings") {
		t.Error(got)
	}
	ds := filepath.Join(t.TempDir(), "ds")
	if got, _ := mustRun(t, exitOK, storing(url, ds, "--once")...); !strings.Contains(got, "3 sequences stored, 0 faults") {
		t.Error(got)
	}
	mustRun(t, exitOK, "validate", "--nats", url) // readers change nothing either
}

func TestFaultsOfAStreamAreNamed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ds")
	mustRun(t, exitOK, "capture", "--limit", "3", "--max-new", "4", "--out", dir)
	url := plainServer(t)
	plant(t, url, dir, func(q *plantedSequence) {
		switch q.ID {
		case "p0001":
			q.row(2, 3)[0] = float32(math.NaN())
		case "p0002":
			q.Row.Length++
		}
	})
	out, errs := mustRun(t, exitPartial, "validate", "--nats", url)
	for _, want := range []string{
		"run r1, sample p0001, row 3, state 2, K1: NaN count 1, Inf count 0",
		"run r1, sample p0002, K3: ",
		"stream, 3 samples checked, 2 faulty",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
	if !strings.Contains(errs, "1 of 3 samples that could be read are whole") {
		t.Error(errs)
	}
	var found validation
	got, _ := mustRun(t, exitPartial, "validate", "--nats", url, "--json")
	if err := json.Unmarshal([]byte(got), &found); err != nil || found.ByRule["K1"] != 1 || found.ByRule["K3"] != 1 {
		t.Errorf("%v: %s", err, got)
	}
}

// A job of one process leaves its captures and results on a server of ours, and
// no description.
func TestTheStreamsOfAJobAreCheckedToo(t *testing.T) {
	url := plainServer(t)
	mustRun(t, exitOK, "run", "--nats", url, "--limit", "2", "--max-new", "6", "--budgets", "8", "--out", filepath.Join(t.TempDir(), "ds"))
	got, errs := mustRun(t, exitOK, "validate", "--nats", url, "--target", "demo")
	if !strings.Contains(got, "stream, 2 samples checked, 0 faulty, 0 faults, 0 warnings") || !strings.Contains(errs, "messages in 2 streams read") {
		t.Errorf("%s%s", got, errs)
	}
}

// rewrite makes the run's capture stream again, of the messages that change
// gives for each.
func rewrite(t *testing.T, url, name string, change func(m *nats.Msg) []*nats.Msg) {
	t.Helper()
	js := jetStreamAt(t, url)
	s, err := js.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	info := s.CachedInfo()
	var all []*nats.Msg
	for n := info.State.FirstSeq; n <= info.State.LastSeq; n++ {
		m, err := s.GetMsg(t.Context(), n)
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range []string{"Nats-Expected-Last-Msg-Id", "Nats-Expected-Last-Sequence", "Nats-Msg-Id"} {
			m.Header.Del(key)
		}
		all = append(all, change(&nats.Msg{Subject: m.Subject, Header: m.Header, Data: m.Data})...)
	}
	if err := js.DeleteStream(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), info.Config); err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if _, err := js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDamagedMessagesOfAStreamAreNamed(t *testing.T) {
	is := func(m *nats.Msg, kind string) bool {
		return m.Header.Get("Draftscope-Kind") == kind && strings.HasSuffix(m.Header.Get("Draftscope-Seq"), "p0001")
	}
	for _, tt := range []struct {
		name   string
		change func(m *nats.Msg) []*nats.Msg
		code   int
		want   string
	}{
		{"a flipped bit", func(m *nats.Msg) []*nats.Msg {
			if is(m, "data") && m.Header.Get("Draftscope-Chunk") == "0" {
				m.Data[len(m.Data)/2] ^= 4
			}
			return []*nats.Msg{m}
		}, exitPartial, "sample p0001, K21: chunk 0: message "},
		{"a chunk lost", func(m *nats.Msg) []*nats.Msg {
			if is(m, "data") && m.Header.Get("Draftscope-Chunk") == "0" {
				return nil
			}
			return []*nats.Msg{m}
		}, exitPartial, "sample p0001, K15: chunk 1: its first chunk is missing"},
		{"an end lost", func(m *nats.Msg) []*nats.Msg {
			if is(m, "end") {
				return nil
			}
			return []*nats.Msg{m}
		}, exitPartial, "sample p0001, K15 (warning): begun, and not whole in the stream"},
		{"a header of another version", func(m *nats.Msg) []*nats.Msg {
			if is(m, "data") {
				m.Header.Set("Draftscope-Version", "9")
			}
			return []*nats.Msg{m}
		}, exitPartial, `K21: message`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			url := plainServer(t)
			mustRun(t, exitOK, capturing(url, "--limit", "3")...)
			rewrite(t, url, "DS_r1_capture", tt.change)
			begun := time.Now()
			out, _ := mustRun(t, tt.code, "validate", "--nats", url)
			if !strings.Contains(out, tt.want) {
				t.Errorf("no %q in %s", tt.want, out)
			}
			if took := time.Since(begun); took > 20*time.Second {
				t.Errorf("it took %s", took)
			}
		})
	}
}
