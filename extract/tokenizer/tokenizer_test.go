package tokenizer_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"unicode/utf8"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/extract/tokenizer"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/text/unicode/norm"
)

type sequence struct {
	ID         string  `json:"id"`
	Prompt     string  `json:"prompt"`
	PromptLen  int     `json:"prompt_len"`
	InputIDs   []int32 `json:"input_ids"`
	Completion string  `json:"completion"`
}

func sequences(tb testing.TB) []sequence {
	tb.Helper()
	var out []sequence
	lines := bufio.NewScanner(bytes.NewReader(demotest.Read(tb, "sequences.jsonl")))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var s sequence
		if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
			tb.Fatal(err)
		}
		out = append(out, s)
	}
	if len(out) != 104 {
		tb.Fatalf("%d sequences, want 104", len(out))
	}
	return out
}

func load(tb testing.TB) *tokenizer.Tokenizer {
	tb.Helper()
	tok, err := tokenizer.Load(demotest.FS(tb), "target")
	if err != nil {
		tb.Fatal(err)
	}
	return tok
}

func TestEveryPromptOfTheReferenceHasItsIDs(t *testing.T) {
	tok := load(t)
	for _, s := range sequences(t) {
		want := s.InputIDs[:s.PromptLen]
		if got := tok.Encode(tokenizer.Prompt(s.Prompt)); !slices.Equal(got, want) {
			t.Errorf("%s: ids differ: %s", s.ID, cmp.Diff(want, got))
		}
		chat, err := tok.Chat([]tokenizer.Message{{Role: "user", Content: s.Prompt}})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(chat.IDs, want) || !chat.Open {
			t.Errorf("%s: chat gives %v (open %t)", s.ID, chat.IDs, chat.Open)
		}
	}
}

func TestEverySequenceOfTheReferenceDecodesToItsText(t *testing.T) {
	tok := load(t)
	for _, s := range sequences(t) {
		if got, want := tok.Decode(s.InputIDs), tokenizer.Prompt(s.Prompt)+s.Completion; got != want {
			t.Errorf("%s: %s", s.ID, cmp.Diff(want, got))
		}
		if got := tok.Decode(s.InputIDs[s.PromptLen:]); got != s.Completion {
			t.Errorf("%s: completion: %s", s.ID, cmp.Diff(s.Completion, got))
		}
	}
}

func TestTokensAndIDsAreEachOthersInverse(t *testing.T) {
	tok := load(t)
	if tok.Size() != 4096 {
		t.Fatalf("size is %d, want 4096", tok.Size())
	}
	for id := range int32(4096) {
		name, ok := tok.Token(id)
		back, ok2 := tok.ID(name)
		if !ok || !ok2 || back != id {
			t.Fatalf("id %d is token %q, whose id is %d", id, name, back)
		}
	}
	for _, id := range []int32{-1, 4096} {
		if _, ok := tok.Token(id); ok {
			t.Errorf("id %d has a token", id)
		}
		if got := tok.Decode([]int32{id}); got != "\uFFFD" {
			t.Errorf("id %d decodes to %q", id, got)
		}
	}
	if id, ok := tok.ID("<|im_end|>"); !ok || id != 2 || !tok.Added(2) {
		t.Errorf("<|im_end|> is %d, %t", id, ok)
	}
}

func TestOneTokenizerServesManyGoroutines(t *testing.T) {
	tok := load(t)
	want := tok.Encode("func main() { println(1) }")
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 20 {
				if got := tok.Encode("func main() { println(1) }"); !slices.Equal(got, want) {
					t.Errorf("got %v, want %v", got, want)
				}
			}
		})
	}
	group.Wait()
}

func TestTextsAreBroughtToNFC(t *testing.T) {
	tok := load(t)
	if composed, apart := tok.Encode("caf\u00e9"), tok.Encode("cafe\u0301"); !slices.Equal(composed, apart) {
		t.Errorf("é composed gives %v, apart %v", composed, apart)
	}
}

func TestALongWordCostsNLogN(t *testing.T) {
	tok := load(t)
	word := strings.Repeat("abcdefghij", 20_000)
	if got := tok.Decode(tok.Encode(word)); got != word {
		t.Error("a word of 200,000 letters does not come back")
	}
}

// small is a tokenizer.json of the 256 bytes, a few merges and one added
// token, changed by edit.
func small(tb testing.TB, edit func(doc map[string]any)) fs.FS {
	tb.Helper()
	var doc map[string]any
	if err := json.Unmarshal(demotest.Read(tb, "target/tokenizer.json"), &doc); err != nil {
		tb.Fatal(err)
	}
	edit(doc)
	data, err := json.Marshal(doc)
	if err != nil {
		tb.Fatal(err)
	}
	return fstest.MapFS{"tokenizer.json": {Data: data}}
}

func TestMergesMayBeLinesOrPairs(t *testing.T) {
	asLines := small(t, func(doc map[string]any) {
		m := doc["model"].(map[string]any)
		for i, pair := range m["merges"].([]any) {
			p := pair.([]any)
			m["merges"].([]any)[i] = p[0].(string) + " " + p[1].(string)
		}
	})
	lines, err := tokenizer.Load(asLines, ".")
	if err != nil {
		t.Fatal(err)
	}
	pairs := load(t)
	for _, s := range sequences(t)[:10] {
		if !slices.Equal(lines.Encode(s.Prompt), pairs.Encode(s.Prompt)) {
			t.Errorf("%s: ids differ", s.ID)
		}
	}
	if lines.Fingerprint() == pairs.Fingerprint() {
		t.Error("two files have one fingerprint")
	}
}

func TestWhatIsNotKnownIsRefusedByName(t *testing.T) {
	model := func(key string, v any) func(map[string]any) {
		return func(doc map[string]any) { doc["model"].(map[string]any)[key] = v }
	}
	top := func(key string, v any) func(map[string]any) {
		return func(doc map[string]any) { doc[key] = v }
	}
	byteLevel := map[string]any{"type": "ByteLevel", "add_prefix_space": false}
	for name, tc := range map[string]struct {
		edit func(map[string]any)
		want string
	}{
		"a unigram model":        {model("type", "Unigram"), `model "Unigram"`},
		"byte fallback":          {model("byte_fallback", true), "byte_fallback"},
		"an unknown token":       {model("unk_token", "<unk>"), `unk_token "<unk>"`},
		"dropout":                {model("dropout", 0.5), "dropout 0.5"},
		"a word suffix":          {model("end_of_word_suffix", "</w>"), `end_of_word_suffix "</w>"`},
		"a lowercase step":       {top("normalizer", map[string]any{"type": "Lowercase"}), `normalizer "Lowercase"`},
		"metaspace":              {top("pre_tokenizer", map[string]any{"type": "Metaspace"}), `pre_tokenizer "Metaspace"`},
		"a prefix space":         {top("pre_tokenizer", map[string]any{"type": "ByteLevel", "add_prefix_space": true}), "add_prefix_space"},
		"a removing split":       {top("pre_tokenizer", map[string]any{"type": "Sequence", "pretokenizers": []any{map[string]any{"type": "Split", "pattern": map[string]any{"Regex": "a"}, "behavior": "Removed"}, byteLevel}}), `behavior "Removed"`},
		"a broken expression":    {top("pre_tokenizer", map[string]any{"type": "Sequence", "pretokenizers": []any{map[string]any{"type": "Split", "pattern": map[string]any{"Regex": "("}, "behavior": "Isolated"}, byteLevel}}), "split expression"},
		"a template":             {top("post_processor", map[string]any{"type": "TemplateProcessing"}), `post_processor "TemplateProcessing"`},
		"another decoder":        {top("decoder", map[string]any{"type": "WordPiece"}), "decoder"},
		"truncation":             {top("truncation", map[string]any{"max_length": 5}), "truncation"},
		"a stripping token":      {func(doc map[string]any) { doc["added_tokens"].([]any)[0].(map[string]any)["lstrip"] = true }, `"<|endoftext|>"`},
		"a merge of nothing":     {func(doc map[string]any) { m := doc["model"].(map[string]any); m["merges"] = []any{"zz yy"} }, `merge 0 joins "zz" and "yy"`},
		"a merge of three":       {func(doc map[string]any) { m := doc["model"].(map[string]any); m["merges"] = []any{"a b c"} }, "3 parts"},
		"a byte without a token": {func(doc map[string]any) { delete(doc["model"].(map[string]any)["vocab"].(map[string]any), "a") }, "byte 0x61"},
		"a huge id":              {func(doc map[string]any) { doc["added_tokens"].([]any)[0].(map[string]any)["id"] = 1 << 30 }, "id 1073741824"},
		"a shared id":            {func(doc map[string]any) { doc["model"].(map[string]any)["vocab"].(map[string]any)["a"] = 400 }, "share id 400"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := tokenizer.Load(small(t, tc.edit), ".")
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "tokenizer.json") {
				t.Fatalf("error is %v, want one with %q and the file's name", err, tc.want)
			}
			if !errors.Is(err, tokenizer.ErrUnsupported) && !errors.Is(err, tokenizer.ErrFile) {
				t.Errorf("error %v wraps no sentinel", err)
			}
		})
	}
	if _, err := tokenizer.Load(fstest.MapFS{}, "d"); !errors.Is(err, tokenizer.ErrFile) || !strings.Contains(err.Error(), "d/tokenizer.json does not exist; put") {
		t.Errorf("a missing file: %v", err)
	}
}

func FuzzTextComesBack(f *testing.F) {
	for _, s := range []string{"", "func f() {\n\treturn 1\n}\n", "caf\u00e9 it's 123  \r\n\n x", "<|im_start|>user\nhi<|im_end|>", "<|im_start", "\xff\xfe", "日本語 🙂\u200d"} {
		f.Add(s)
	}
	tok := load(f)
	f.Fuzz(func(t *testing.T, text string) {
		ids := tok.Encode(text)
		for _, id := range ids {
			if _, ok := tok.Token(id); !ok {
				t.Fatalf("%q gives id %d, which no token has", text, id)
			}
		}
		got := tok.Decode(ids)
		if !utf8.ValidString(got) {
			t.Fatalf("%q decodes to bytes that are not UTF-8", text)
		}
		if utf8.ValidString(text) && !strings.Contains(text, "|>") {
			if want := norm.NFC.String(text); got != want {
				t.Fatalf("%q comes back as %q, want %q", text, got, want)
			}
		}
		if again := tok.Encode(got); !slices.Equal(again, ids) {
			t.Fatalf("%q: ids %v, and after a round trip %v", text, ids, again)
		}
	})
}

func FuzzLoad(f *testing.F) {
	f.Add([]byte(`{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"decoder":{"type":"ByteLevel"},"pre_tokenizer":{"type":"ByteLevel"}}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(_ *testing.T, data []byte) {
		if tok, err := tokenizer.Load(fstest.MapFS{"tokenizer.json": {Data: data}}, "."); err == nil {
			tok.Decode(tok.Encode("hello, world"))
		}
	})
}

func BenchmarkEncode(b *testing.B) {
	tok := load(b)
	var text strings.Builder
	for _, s := range sequences(b) {
		text.WriteString(tokenizer.Prompt(s.Prompt))
		text.WriteString(s.Completion)
	}
	b.SetBytes(int64(text.Len()))
	n := 0
	for b.Loop() {
		n += len(tok.Encode(text.String()))
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "tokens/s")
}
