package tokenizer_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/extract/tokenizer"
	"github.com/google/go-cmp/cmp"
)

// TestOnlyRepliesAndTheirEndAreMasked renders two turns and reads the text of
// every run of equal mask, turn and role.
func TestOnlyRepliesAndTheirEndAreMasked(t *testing.T) {
	tok := load(t)
	c, err := tok.Chat([]tokenizer.Message{
		{Role: "system", Content: "Be short."},
		{Role: "user", Content: "one"},
		{Role: "assistant", Content: "\n\nfirst"},
		{Role: "user", Content: "two"},
		{Role: "assistant", Content: "second"},
	})
	if err != nil {
		t.Fatal(err)
	}
	type run struct {
		Text, Role string
		Turn       int32
		Mask       bool
	}
	turn, role := tok.Turns(c.IDs)
	var got []run
	for lo := 0; lo < len(c.IDs); {
		hi := lo + 1
		for hi < len(c.IDs) && c.Mask[hi] == c.Mask[lo] && turn[hi] == turn[lo] {
			hi++
		}
		got = append(got, run{tok.Decode(c.IDs[lo:hi]), role[lo], turn[lo], c.Mask[lo]})
		lo = hi
	}
	want := []run{
		{"<|im_start|>system\nBe short.<|im_end|>\n", "system", 0, false},
		{"<|im_start|>user\none<|im_end|>\n", "user", 1, false},
		{"<|im_start|>assistant\n", "assistant", 2, false},
		{"\n\nfirst<|im_end|>", "assistant", 2, true},
		{"\n", "assistant", 2, false},
		{"<|im_start|>user\ntwo<|im_end|>\n", "user", 3, false},
		{"<|im_start|>assistant\n", "assistant", 4, false},
		{"second<|im_end|>", "assistant", 4, true},
		{"\n", "assistant", 4, false},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if c.Open {
		t.Error("a conversation that ends with a reply asks for another one")
	}
}

func TestAConversationThatAsksEndsWithAHeader(t *testing.T) {
	tok := load(t)
	c, err := tok.Chat([]tokenizer.Message{{Role: "user", Content: "a"}, {Role: "assistant", Content: "b"}, {Role: "user", Content: "c"}})
	if err != nil {
		t.Fatal(err)
	}
	text := tok.Decode(c.IDs)
	if !c.Open || !strings.HasSuffix(text, "c<|im_end|>\n<|im_start|>assistant\n") {
		t.Errorf("open %t, text %q", c.Open, text)
	}
	turn, role := tok.Turns(c.IDs)
	if last := len(c.IDs) - 1; c.Mask[last] || role[last] != "assistant" || turn[last] != 3 {
		t.Errorf("the header has mask %t, role %s, turn %d", c.Mask[last], role[last], turn[last])
	}
}

func TestConversationsThatCannotBeRenderedAreRefused(t *testing.T) {
	tok := load(t)
	for name, tc := range map[string]struct {
		messages []tokenizer.Message
		want     string
	}{
		"none":         {nil, "no messages"},
		"unknown role": {[]tokenizer.Message{{Role: "bot", Content: "x"}}, `role "bot"; use`},
		"empty":        {[]tokenizer.Message{{Role: "user", Content: " \n"}}, "message 0 (user) is empty"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := tok.Chat(tc.messages); !errors.Is(err, tokenizer.ErrChat) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error is %v", err)
			}
		})
	}
	bare, err := tokenizer.Load(small(t, func(doc map[string]any) { doc["added_tokens"] = []any{} }), ".")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bare.Chat([]tokenizer.Message{{Role: "user", Content: "x"}}); !errors.Is(err, tokenizer.ErrChat) {
		t.Errorf("without <|im_start|>: %v", err)
	}
}

func TestTurnsWithoutAHeaderAreUnknown(t *testing.T) {
	tok := load(t)
	turn, role := tok.Turns(append(tok.Encode("x"), tok.Encode("<|im_start|>bot\nhi")...))
	for i := range role {
		if role[i] != "unknown" || turn[i] != 0 {
			t.Errorf("token %d has turn %d and role %q", i, turn[i], role[i])
		}
	}
}
