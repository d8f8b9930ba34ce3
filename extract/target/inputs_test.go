package target_test

import (
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/extract/tokenizer"
	"github.com/draftscope/draftscope/schemas"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestInputsAreReadLineByLine(t *testing.T) {
	got, err := target.ReadPrompts(strings.NewReader("{\"prompt\":\"a\"}\n\n{\"id\":\"x.1\",\"messages\":[{\"role\":\"user\",\"content\":\"b\"}],\"tags\":{\"set\":\"s\"}}\n"), "p")
	if err != nil {
		t.Fatal(err)
	}
	want := []target.Input{
		{ID: "p0000", Messages: []tokenizer.Message{{Role: "user", Content: "a"}}},
		{ID: "x.1", Messages: []tokenizer.Message{{Role: "user", Content: "b"}}, Tags: map[string]string{"set": "s"}},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(target.Input{})); diff != "" {
		t.Error(diff)
	}
	got, err = target.ReadSequences(strings.NewReader(`{"id":"s","input_ids":[1,2,3],"prompt_len":2}`+"\n"+`{"id":"m","input_ids":[1,2,3],"loss_mask":[0,1,1]}`), "s")
	if err != nil {
		t.Fatal(err)
	}
	want = []target.Input{
		{ID: "s", IDs: []int32{1, 2, 3}, PromptLen: 2},
		{ID: "m", IDs: []int32{1, 2, 3}, PromptLen: 1, Mask: []bool{false, true, true}},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(target.Input{})); diff != "" {
		t.Error(diff)
	}
	if refs, err := target.ReadSequences(strings.NewReader(string(demotest.Read(t, "sequences.jsonl"))), "sequences.jsonl"); err != nil || len(refs) != 104 {
		t.Errorf("the reference's own file gives %d sequences, %v", len(refs), err)
	}
}

func TestBadLinesNameTheirPlaceAndTheRemedy(t *testing.T) {
	good := `{"id":"a","prompt":"x"}` + "\n"
	type reader = func(io.Reader, string) ([]target.Input, error)
	for _, tc := range []struct {
		name string
		read reader
		text string
		want string
	}{
		{"an empty file", target.ReadPrompts, " \n\n", "f.jsonl holds no prompt; put"},
		{"an empty sequence file", target.ReadSequences, "", "f.jsonl holds no sequence; put"},
		{"a cut line", target.ReadPrompts, good + `{"prompt":"x`, "f.jsonl:2: the JSON object is not closed; a prompt is"},
		{"two objects on a line", target.ReadPrompts, `{"prompt":"x"}{"prompt":"y"}`, "f.jsonl:1: more follows"},
		{"no JSON", target.ReadPrompts, "hello", "f.jsonl:1: the line is not a JSON object"},
		{"an array", target.ReadPrompts, `[{"prompt": "a"}]`, "f.jsonl:1: the line is not a JSON object"},
		{"a byte order mark", target.ReadPrompts, "\xef\xbb\xbf{\"prompt\": \"a\"}", "byte order mark"},
		{"UTF-16", target.ReadSequences, "\xff\xfe{\x00", "byte order mark"},
		{"no UTF-8", target.ReadPrompts, "{\"prompt\": \"a\xff\"}", "f.jsonl:1: the line is not UTF-8"},
		{"an id without end", target.ReadPrompts, `{"id": "` + strings.Repeat("x", 100_000) + `", "prompt": "a"}`, `xxx..."`},
		{"an unknown key", target.ReadPrompts, `{"promt":"x"}`, `f.jsonl:1: unknown field "promt"`},
		{"no text", target.ReadPrompts, `{"id":"a"}`, `f.jsonl:1: it needs either "prompt" or "messages"`},
		{"both texts", target.ReadPrompts, `{"prompt":"x","messages":[]}`, "it needs either"},
		{"an empty prompt", target.ReadPrompts, `{"prompt":" \n"}`, "f.jsonl:1: the prompt is empty; remove"},
		{"no messages", target.ReadPrompts, `{"messages":[]}`, "is empty; remove"},
		{"the same id", target.ReadPrompts, good + "\n" + good, `f.jsonl:3: the id "a" was used at f.jsonl:1; give`},
		{"an id that walks", target.ReadPrompts, `{"id":"../x","prompt":"x"}`, `f.jsonl:1: the id "../x" is not usable; use`},
		{"an id with a quote", target.ReadPrompts, `{"id":"a'b","prompt":"x"}`, "is not usable"},
		{"an empty id", target.ReadPrompts, `{"id":"","prompt":"x"}`, "is not usable"},
		{"a sequence without an id", target.ReadSequences, `{"input_ids":[1],"prompt_len":0}`, `f.jsonl:1: "id" is missing; give`},
		{"a sequence without ids", target.ReadSequences, `{"id":"a","prompt_len":0}`, `"input_ids" is missing or empty`},
		{"a sequence without a mask", target.ReadSequences, `{"id":"a","input_ids":[1]}`, `it needs "prompt_len" or "loss_mask"`},
		{"a mask of another length", target.ReadSequences, `{"id":"a","input_ids":[1,2],"loss_mask":[1]}`, `"loss_mask" has 1 entries for 2 tokens; give`},
		{"a mask of 2", target.ReadSequences, `{"id":"a","input_ids":[1,2],"loss_mask":[0,2]}`, "loss_mask[1] is 2; use 0 or 1"},
		{"a prompt past the end", target.ReadSequences, `{"id":"a","input_ids":[1,2],"prompt_len":3}`, `"prompt_len" is 3, outside 0..2`},
		{"a negative prompt", target.ReadSequences, `{"id":"a","input_ids":[1,2],"prompt_len":-1}`, "outside 0..2"},
		{"a fractional id", target.ReadSequences, `{"id":"a","input_ids":[1.5],"prompt_len":0}`, "f.jsonl:1: cannot unmarshal number 1.5"},
		{"an id beyond 32 bits", target.ReadSequences, `{"id":"a","input_ids":[4294967296],"prompt_len":0}`, "f.jsonl:1: cannot unmarshal number 4294967296"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := tc.read(strings.NewReader(tc.text), "f.jsonl")
			if !errors.Is(err, target.ErrInput) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestInputsThatTheModelCannotRunAreRefusedBeforehand(t *testing.T) {
	m, tok := open(t, demotest.FS(t), "target"), demoTokenizer(t)
	small := open(t, demotest.FS(t), "hybrid")
	long := `{"prompt":"` + strings.Repeat("word ", 3000) + `"}`
	sequence := func(ids string) func(*target.SourceConfig) {
		return func(c *target.SourceConfig) {
			in, err := target.ReadSequences(strings.NewReader(fmt.Sprintf(`{"id":"s","input_ids":[%s],"prompt_len":0}`, ids)), "s.jsonl")
			if err != nil {
				t.Fatal(err)
			}
			c.Inputs = in
		}
	}
	prompt := func(line string) func(*target.SourceConfig) {
		return func(c *target.SourceConfig) {
			in, err := target.ReadPrompts(strings.NewReader(line), "p.jsonl")
			if err != nil {
				t.Fatal(err)
			}
			c.Inputs = in
		}
	}
	for _, tc := range []struct {
		name string
		edit func(*target.SourceConfig)
		want string
	}{
		{"a prompt too long", prompt(long), "p.jsonl:1: it has "},
		{"a prompt too long, the limit", prompt(long), "the target takes 2047; shorten it"},
		{"a sequence too long", sequence("1" + strings.Repeat(",1", 2048)), "s.jsonl:1: it has 2049 tokens, the target takes 2048"},
		{"an id outside", sequence("1,4096"), "s.jsonl:1: token 4096 at position 1 is outside the target's vocabulary of 4096"},
		{"a negative id", sequence("-1"), "s.jsonl:1: token -1"},
		{"an unknown role", prompt(`{"messages":[{"role":"robot","content":"x"}]}`), `p.jsonl:1: unusable conversation: message 0 has the role "robot"`},
		{"no tokenizer", func(c *target.SourceConfig) { c.Tokenizer = nil }, "put tokenizer.json beside"},
		{"a tokenizer of a larger model", func(c *target.SourceConfig) { c.Model = small }, "the tokenizer has 4096 tokens and the target's vocabulary 512; use"},
		{"a state too deep", func(c *target.SourceConfig) { c.States = []int{9} }, "state 9; the target has states 0..8"},
		{"states out of order", func(c *target.SourceConfig) { c.States = []int{3, 2} }, "not ascending"},
		{"an unknown dtype", func(c *target.SourceConfig) { c.DType = "f8" }, `dtype "f8"; use`},
		{"no run", func(c *target.SourceConfig) { c.Run = "" }, "no name"},
		{"a negative temperature", func(c *target.SourceConfig) { c.Temperature = -1 }, "temperature -1"},
		{"a temperature that is no number", func(c *target.SourceConfig) { c.Temperature = float32(math.NaN()) }, "temperature NaN"},
		{"a negative batch", func(c *target.SourceConfig) { c.Batch = -1 }, "batch -1"},
		{"no model", func(c *target.SourceConfig) { c.Model = nil }, "no target model"},
		{"the same id twice", func(c *target.SourceConfig) { c.Inputs = append(c.Inputs, c.Inputs...) }, "given twice"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := target.SourceConfig{Model: m, Tokenizer: tok, Run: "r", Inputs: prompts(t, 1)}
			tc.edit(&cfg)
			_, err := target.NewSource(cfg)
			if !errors.Is(err, target.ErrInput) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %v, want one with %q", err, tc.want)
			}
		})
	}
}

// TestNonFiniteStatesBecomeAFaultAndOthersGoOn poisons the embedding of one
// token and runs it beside healthy sequences.
func TestNonFiniteStatesBecomeAFaultAndOthersGoOn(t *testing.T) {
	p := cutDown(t)
	p.untie()
	embed := p.find("model.embed_tokens.weight")
	embed.Data = append([]byte(nil), embed.Data...)
	put := func(token, column int, bits uint16) {
		at := 2 * (token*256 + column)
		embed.Data[at], embed.Data[at+1] = byte(bits), byte(bits>>8)
	}
	put(77, 3, 0x7fc0) // NaN
	put(77, 9, 0x7f80) // +Inf
	put(78, 0, 0xff80) // -Inf
	m := open(t, p.whole(t), "m")
	clean := open(t, cutDown(t).whole(t), "m")
	long := make([]int32, 300)
	for i := range long {
		long[i] = 5
	}
	long[270] = 78 // past the first piece of a prefill
	inputs := []target.Input{
		{ID: "good", IDs: []int32{1, 2, 3, 4}, PromptLen: 1},
		{ID: "bad", IDs: []int32{1, 2, 77, 4}, PromptLen: 1},
		{ID: "late", IDs: long, PromptLen: 299},
		{ID: "fine", IDs: []int32{9, 8, 7}, PromptLen: 1},
	}
	cfg := target.SourceConfig{Model: m, Inputs: inputs, States: []int{0, 1}}
	got := capture(t, cfg)
	for id, want := range map[string]string{"bad": "row 2, state 0: 1 NaN, 1 Inf", "late": "row 270, state 0: 0 NaN, 1 Inf"} {
		c := got[id]
		if diff := cmp.Diff(schemas.Fault{SeqID: id, Chunk: -1, Check: "K1", Detail: want, At: noon()}, c.fault); diff != "" {
			t.Errorf("%s: %s", id, diff)
		}
		if len(c.tokens) != 0 || c.row.SeqID != "" {
			t.Errorf("%s: rows were given out beside the fault", id)
		}
	}
	cfg.Model, cfg.Inputs = clean, []target.Input{inputs[0], inputs[3]}
	delete(got, "bad")
	delete(got, "late")
	equal(t, "beside faults", capture(t, cfg), got)

	cfg.Model, cfg.Inputs, cfg.States = m, inputs[1:2], nil
	if c := capture(t, cfg)["bad"]; !strings.HasPrefix(c.fault.Detail, "row 2, state 2:") {
		t.Errorf("with no state recorded the fault is %q", c.fault.Detail)
	}
}

func FuzzReadInputs(f *testing.F) {
	f.Add(`{"id":"a","prompt":"x"}`)
	f.Add(`{"messages":[{"role":"user","content":"x"}]}`)
	f.Add(`{"id":"a","input_ids":[1,2],"loss_mask":[0,1],"prompt_len":1}`)
	f.Fuzz(func(t *testing.T, text string) {
		for _, read := range []func(io.Reader, string) ([]target.Input, error){target.ReadPrompts, target.ReadSequences} {
			in, err := read(strings.NewReader(text), "f")
			if err != nil {
				if !errors.Is(err, target.ErrInput) {
					t.Errorf("error %v is not ErrInput", err)
				}
				continue
			}
			for _, i := range in {
				if i.Mask != nil && len(i.Mask) != len(i.IDs) || i.PromptLen < 0 || i.PromptLen > len(i.IDs) {
					t.Errorf("input %+v", i)
				}
			}
		}
	})
}
