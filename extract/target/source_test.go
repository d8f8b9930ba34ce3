package target_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/extract/tokenizer"
	"github.com/draftscope/draftscope/schemas"
	"github.com/google/go-cmp/cmp"
)

// captured is everything that a source gave of one sequence.
type captured struct {
	tokens []schemas.Token
	states [][]byte
	row    schemas.Sequence
	fault  schemas.Fault
	sizes  []int // rows of each capture record
}

var everyPrompt = flag.Bool("every", false, "generate all 104 replies of the reference, not 24")

func noon() time.Time { return time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC) }

// capture drains a source under a checked allocator and holds it to the order
// of its records.
func capture(tb testing.TB, cfg target.SourceConfig) map[string]captured {
	tb.Helper()
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	defer mem.AssertSize(tb, 0)
	cfg.Allocator, cfg.Now = mem, noon
	if cfg.Run == "" {
		cfg.Run = "test"
	}
	src, err := target.NewSource(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return drain(tb, src, cfg)
}

// drain takes all that a source gives, and closes it.
func drain(tb testing.TB, src *target.Source, cfg target.SourceConfig) map[string]captured {
	tb.Helper()
	defer func() {
		if err := src.Close(); err != nil {
			tb.Error(err)
		}
	}()
	got := map[string]captured{}
	open := ""
	for {
		id, rec, last, err := src.Next(tb.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			tb.Fatal(err)
		}
		if open != "" && id != open {
			tb.Fatalf("a record of %s stands between those of %s", id, open)
		}
		c := got[id]
		env, err := schemas.EnvelopeOf(rec)
		if err != nil || env.Run != cfg.Run {
			tb.Fatalf("envelope %+v, %v", env, err)
		}
		if last != (env.Table != schemas.TableCapture) {
			tb.Errorf("%s: a record of %s with last = %t", id, env.Table, last)
		}
		switch env.Table {
		case schemas.TableCapture:
			batch, err := schemas.ReadCapture(rec)
			if err != nil {
				tb.Fatal(err)
			}
			if batch.Spec.Hidden != cfg.Model.Config().Hidden || batch.Spec.Layers != cfg.Model.Config().Layers {
				tb.Errorf("%s: spec %+v", id, batch.Spec)
			}
			c.sizes = append(c.sizes, len(batch.Tokens))
			c.tokens = append(c.tokens, batch.Tokens...)
			if c.states == nil {
				c.states = make([][]byte, len(batch.States))
			}
			for i, raw := range batch.States {
				c.states[i] = append(c.states[i], raw...)
			}
		case schemas.TableSequences:
			rows, err := schemas.Rows[schemas.Sequence](rec)
			if err != nil || len(rows) != 1 {
				tb.Fatalf("%d rows, %v", len(rows), err)
			}
			c.row = rows[0]
		case schemas.TableFaults:
			rows, err := schemas.Rows[schemas.Fault](rec)
			if err != nil || len(rows) != 1 {
				tb.Fatalf("%d rows, %v", len(rows), err)
			}
			c.fault = rows[0]
		}
		got[id], open = c, id
		if last {
			open = ""
		}
		rec.Release()
	}
	if src.Remaining() != 0 {
		tb.Errorf("%d sequences remain", src.Remaining())
	}
	return got
}

// prompts are the first n prompts of the reference.
func prompts(tb testing.TB, n int) []target.Input {
	tb.Helper()
	var lines bytes.Buffer
	for _, r := range references(tb)[:n] {
		fmt.Fprintf(&lines, "{\"id\":%q,\"prompt\":%q}\n", r.ID, r.Prompt)
	}
	in, err := target.ReadPrompts(&lines, "prompts.jsonl")
	if err != nil {
		tb.Fatal(err)
	}
	return in
}

// TestGreedyRepliesEqualTheReference generates the 24 prompts of the demo;
// with -every, all 104 of the reference.
func TestGreedyRepliesEqualTheReference(t *testing.T) {
	n := 24
	if *everyPrompt {
		n = 104
	}
	m, tok := open(t, demotest.FS(t), "target"), demoTokenizer(t)
	got := capture(t, target.SourceConfig{Model: m, Tokenizer: tok, Inputs: prompts(t, n)})
	if len(got) != n {
		t.Fatalf("%d sequences, want %d", len(got), n)
	}
	for _, ref := range references(t)[:n] {
		c := got[ref.ID]
		ids := make([]int32, len(c.tokens))
		for i, tk := range c.tokens {
			ids[i] = tk.TokenID
		}
		if !slices.Equal(ids, ref.InputIDs) {
			t.Errorf("%s: ids differ: %s", ref.ID, cmp.Diff(ref.InputIDs, ids))
			continue
		}
		checkTokens(t, ref, c)
	}
}

// checkTokens holds the columns of a greedy sequence to what is known of it.
func checkTokens(t *testing.T, ref reference, c captured) {
	t.Helper()
	want := schemas.Sequence{SeqID: ref.ID, PromptLen: int32(ref.PromptLen), Length: int32(len(ref.InputIDs)), FinishReason: "stop", Tags: map[string]string{}, CreatedAt: noon()}
	if ref.InputIDs[len(ref.InputIDs)-1] != 2 {
		want.FinishReason = "length"
	}
	text := demoTokenizer(t).Decode(ref.InputIDs)
	want.Text = &text
	if diff := cmp.Diff(want, c.row); diff != "" {
		t.Errorf("%s: %s", ref.ID, diff)
	}
	for i, tk := range c.tokens {
		turn, role := int32(0), "user"
		if i >= ref.PromptLen-3 { // <|im_start|>assistant\n
			turn, role = 1, "assistant"
		}
		if tk.Pos != int32(i) || tk.LossMask != (i >= ref.PromptLen) || tk.SeqID != ref.ID {
			t.Errorf("%s: token %d is %+v", ref.ID, i, tk)
		}
		if ref.InputIDs[ref.PromptLen-3] == 1 && (tk.Turn != turn || tk.Role != role) {
			t.Errorf("%s: token %d has turn %d and role %s, want %d and %s", ref.ID, i, tk.Turn, tk.Role, turn, role)
		}
		if tk.TargetArgmax == nil {
			t.Fatalf("%s: token %d has no argmax", ref.ID, i)
		}
		last := i == len(c.tokens)-1
		if (tk.TargetLogprob == nil) != last {
			t.Errorf("%s: token %d of %d has logprob %v", ref.ID, i, len(c.tokens), tk.TargetLogprob)
		}
		if i >= ref.PromptLen-1 && !last && *tk.TargetArgmax != c.tokens[i+1].TokenID {
			t.Errorf("%s: argmax %d at %d, and the reply goes on with %d", ref.ID, *tk.TargetArgmax, i, c.tokens[i+1].TokenID)
		}
		if !last && *tk.TargetLogprob > 0 {
			t.Errorf("%s: logprob %v at %d", ref.ID, *tk.TargetLogprob, i)
		}
	}
}

// TestStatesAreTheSameBitsHoweverCaptured runs prompts one by one, eight at a
// time and in other record sizes, and then the ids that came out as given
// sequences.
func TestStatesAreTheSameBitsHoweverCaptured(t *testing.T) {
	tok := demoTokenizer(t)
	for _, dir := range []string{"target", "hybrid"} {
		t.Run(dir, func(t *testing.T) {
			m := open(t, demotest.FS(t), dir)
			cfg := target.SourceConfig{Model: m, States: allStates(m), MaxNewTokens: 40}
			if dir == "target" {
				cfg.Tokenizer, cfg.Inputs = tok, prompts(t, 10)
			} else { // the hybrid has another vocabulary and no tokenizer
				ids := integers(t, golden(t, "hybrid/golden.safetensors"), "input_ids")
				for i := range 10 {
					cfg.Inputs = append(cfg.Inputs, target.Input{ID: fmt.Sprint("s", i), IDs: ids[3*i : 20+10*i], PromptLen: 4})
				}
			}
			cfg.Batch = 1
			want := capture(t, cfg)
			cfg.Batch, cfg.BatchRows = 8, 7
			equal(t, "a batch of 8", want, capture(t, cfg))
			cfg.Inputs = given(want)
			equal(t, "teacher-forced", want, capture(t, cfg))
		})
	}
}

func given(from map[string]captured) []target.Input {
	var in []target.Input
	for id, c := range from {
		g := target.Input{ID: id, PromptLen: int(c.row.PromptLen)}
		for _, tk := range c.tokens {
			g.IDs = append(g.IDs, tk.TokenID)
		}
		in = append(in, g)
	}
	return in
}

func equal(t *testing.T, how string, want, got map[string]captured) {
	t.Helper()
	if len(want) != len(got) || len(want) == 0 {
		t.Fatalf("%s: %d sequences, want %d", how, len(got), len(want))
	}
	for id, w := range want {
		g := got[id]
		if diff := cmp.Diff(w.tokens, g.tokens); diff != "" {
			t.Errorf("%s: tokens of %s: %s", how, id, diff)
		}
		for c := range w.states {
			if !bytes.Equal(w.states[c], g.states[c]) {
				t.Errorf("%s: state %d of %s differs", how, c, id)
			}
		}
	}
}

func TestALongPromptIsPrefilledInPieces(t *testing.T) {
	m := open(t, cutDown(t).whole(t), "m")
	ids := someIDs(600)
	got := capture(t, target.SourceConfig{Model: m, States: []int{1}, Inputs: []target.Input{{ID: "a", IDs: ids, PromptLen: 600}}})["a"]
	want := forward(t, m, ids, len(ids))[1]
	if at := bitsEqual(schemas.F32.AppendFloats(nil, got.states[0]), want); at >= 0 {
		t.Errorf("state 1 differs at row %d", at/256)
	}
	for _, tk := range got.tokens {
		if tk.LossMask || tk.Role != "unknown" {
			t.Fatalf("token is %+v", tk)
		}
	}
}

func TestRecordsCarryTheRowsAskedFor(t *testing.T) {
	m, tok := open(t, demotest.FS(t), "target"), demoTokenizer(t)
	cfg := target.SourceConfig{Model: m, Tokenizer: tok, Inputs: prompts(t, 1), States: []int{2, 8}, MaxNewTokens: 8, BatchRows: 10, Redact: true}
	f32 := capture(t, cfg)["p0000"]
	if diff := cmp.Diff([]int{10, 10, 10, 10, 4}, f32.sizes); diff != "" {
		t.Error(diff)
	}
	if f32.row.FinishReason != "length" || f32.row.Length != 44 || f32.row.Text != nil {
		t.Errorf("row is %+v", f32.row)
	}
	cfg.DType = schemas.BF16
	half := capture(t, cfg)["p0000"]
	for i := range f32.states {
		if want := schemas.BF16.AppendBytes(nil, schemas.F32.AppendFloats(nil, f32.states[i])); !bytes.Equal(want, half.states[i]) {
			t.Errorf("state %d in bf16 is not the rounded f32", i)
		}
	}
	cfg.States = nil
	if none := capture(t, cfg)["p0000"]; len(none.states) != 0 || len(none.tokens) != 44 {
		t.Errorf("%d states, %d tokens", len(none.states), len(none.tokens))
	}
}

func TestSamplingDependsOnTheSeedAndTheSequenceAlone(t *testing.T) {
	m, tok := open(t, demotest.FS(t), "target"), demoTokenizer(t)
	cfg := target.SourceConfig{Model: m, Tokenizer: tok, Inputs: prompts(t, 6), MaxNewTokens: 30, Temperature: 1, Seed: 7, Batch: 1}
	want := capture(t, cfg)
	cfg.Batch = 4
	equal(t, "another batch", want, capture(t, cfg))
	slices.Reverse(cfg.Inputs)
	equal(t, "another order", want, capture(t, cfg))
	cfg.Seed = 8
	other := capture(t, cfg)
	same := 0
	for id := range want {
		if cmp.Equal(want[id].tokens, other[id].tokens) {
			same++
		}
	}
	if same == len(want) {
		t.Error("another seed gives the same replies")
	}
	cfg.Temperature, cfg.TopP = 0.8, 1e-9 // the likeliest token holds that much
	narrow := capture(t, cfg)
	cfg.Temperature, cfg.TopP = 0, 0
	greedy := capture(t, cfg)
	equal(t, "a tiny top-p", greedy, narrow)
	if got := narrow["p0000"].row.Temperature; got != 0.8 {
		t.Errorf("recorded temperature %v", got)
	}
}

func TestWhatIsRecordedMayBeChosenAfterTheInputsWereRead(t *testing.T) {
	m, tok := open(t, demotest.FS(t), "target"), demoTokenizer(t)
	cfg := target.SourceConfig{Model: m, Tokenizer: tok, Run: "r", Inputs: prompts(t, 3), MaxNewTokens: 2}
	src, err := target.NewSource(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := src.Choose([]int{9}, nil); !errors.Is(err, target.ErrInput) {
		t.Errorf("state 9: %v", err)
	}
	begin := src.Beginnings()
	if len(begin) != 3 || begin[1].ID != "p0001" || begin[1].Whole || len(begin[1].IDs) == 0 {
		t.Fatalf("%+v", begin)
	}
	if err := src.Choose([]int{2, 8}, func(id string) bool { return id == "p0001" }); err != nil {
		t.Fatal(err)
	}
	chosen := drain(t, src, cfg)
	if _, ok := chosen["p0001"]; ok || len(chosen) != 2 {
		t.Errorf("%d sequences", len(chosen))
	}
	cfg.States = []int{2, 8}
	at := capture(t, cfg)
	delete(at, "p0001")
	equal(t, "states chosen later", at, chosen)
	if got := src.Spec().States; !slices.Equal(got, cfg.States) {
		t.Errorf("it records states %v", got)
	}
}

func TestAConversationIsMaskedByItsReplies(t *testing.T) {
	m, tok := open(t, demotest.FS(t), "target"), demoTokenizer(t)
	in, err := target.ReadPrompts(strings.NewReader(`{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"},{"role":"assistant","content":"d"}],"tags":{"k":"v"}}`), "p")
	if err != nil {
		t.Fatal(err)
	}
	c := capture(t, target.SourceConfig{Model: m, Tokenizer: tok, Inputs: in, Temperature: 1})["p0000"]
	var masked []int32
	for _, tk := range c.tokens {
		if tk.LossMask {
			masked = append(masked, tk.TokenID)
			if tk.Role != "assistant" {
				t.Errorf("a masked token has role %q", tk.Role)
			}
		}
	}
	if got := tok.Decode(masked); got != "b<|im_end|>d<|im_end|>" {
		t.Errorf("masked text is %q", got)
	}
	if c.row.FinishReason != "given" || c.row.Tags["k"] != "v" || c.row.Temperature != 0 || !c.tokens[c.row.PromptLen].LossMask {
		t.Errorf("row is %+v", c.row)
	}
	chat, _ := tok.Chat([]tokenizer.Message{{Role: "user", Content: "a"}})
	if int(c.row.PromptLen) != len(chat.IDs) {
		t.Errorf("prompt length %d, want %d", c.row.PromptLen, len(chat.IDs))
	}
}

func TestACancelledSourceStopsAndCloses(t *testing.T) {
	m, tok := open(t, demotest.FS(t), "target"), demoTokenizer(t)
	src, err := target.NewSource(target.SourceConfig{Model: m, Tokenizer: tok, Inputs: prompts(t, 3), Run: "r"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, _, err := src.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error is %v", err)
	}
	if src.Remaining() != 3 {
		t.Errorf("%d sequences remain, want 3", src.Remaining())
	}
	if err := src.Close(); err != nil {
		t.Error(err)
	}
	if _, _, _, err := src.Next(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("after Close the error is %v", err)
	}
}

// BenchmarkCapture generates and records the first eight prompts.
func BenchmarkCapture(b *testing.B) {
	m, tok := open(b, demotest.FS(b), "target"), demoTokenizer(b)
	in := prompts(b, 8)
	tokens := 0
	for b.Loop() {
		for _, c := range capture(b, target.SourceConfig{Model: m, Tokenizer: tok, Inputs: in, States: []int{2, 4, 5, 6, 8}}) {
			tokens += len(c.tokens)
		}
	}
	b.ReportMetric(float64(tokens)/b.Elapsed().Seconds(), "tokens/s")
}
