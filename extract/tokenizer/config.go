package tokenizer

import (
	"encoding/json"
	"fmt"
)

// document is the part of tokenizer.json that decides ids.
type document struct {
	Truncation  json.RawMessage `json:"truncation"`
	AddedTokens []addedToken    `json:"added_tokens"`
	Normalizer  *step           `json:"normalizer"`
	PreToken    *step           `json:"pre_tokenizer"`
	PostProcess *step           `json:"post_processor"`
	Decoder     *step           `json:"decoder"`
	Model       model           `json:"model"`
}

type addedToken struct {
	ID         int32  `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
}

// step is any normalizer, pre-tokenizer, post-processor or decoder.
type step struct {
	Type           string `json:"type"`
	Normalizers    []step `json:"normalizers"`
	PreTokenizers  []step `json:"pretokenizers"`
	AddPrefixSpace bool   `json:"add_prefix_space"`
	UseRegex       *bool  `json:"use_regex"`
	Behavior       string `json:"behavior"`
	Invert         bool   `json:"invert"`
	Pattern        struct {
		Regex  *string
		String *string
	} `json:"pattern"`
}

type model struct {
	Type             string            `json:"type"`
	Dropout          *float64          `json:"dropout"`
	UnkToken         *string           `json:"unk_token"`
	ContinuingPrefix *string           `json:"continuing_subword_prefix"`
	EndSuffix        *string           `json:"end_of_word_suffix"`
	ByteFallback     bool              `json:"byte_fallback"`
	IgnoreMerges     bool              `json:"ignore_merges"`
	Vocab            map[string]int32  `json:"vocab"`
	Merges           []json.RawMessage `json:"merges"`
}

func unsupported(format string, args ...any) error {
	return fmt.Errorf("%w: %s; only byte-level BPE as Qwen's models use it is known", ErrUnsupported, fmt.Sprintf(format, args...))
}

// check refuses, by name, every step that this package does not carry out.
func (d *document) check() error {
	if len(d.Truncation) > 0 && string(d.Truncation) != "null" {
		return unsupported("truncation is set, which cuts texts")
	}
	for _, a := range d.AddedTokens {
		if a.SingleWord || a.LStrip || a.RStrip {
			return unsupported("added token %q has single_word, lstrip or rstrip", a.Content)
		}
		if a.Content == "" {
			return unsupported("added token %d is empty", a.ID)
		}
	}
	if p := d.PostProcess; p != nil && p.Type != "ByteLevel" {
		return unsupported("post_processor %q", p.Type)
	}
	if d.Decoder == nil || d.Decoder.Type != "ByteLevel" {
		return unsupported("a decoder other than ByteLevel")
	}
	m := d.Model
	switch {
	case m.Type != "BPE":
		return unsupported("model %q", m.Type)
	case m.Dropout != nil && *m.Dropout != 0:
		return unsupported("dropout %v", *m.Dropout)
	case m.UnkToken != nil:
		return unsupported("unk_token %q", *m.UnkToken)
	case m.ContinuingPrefix != nil && *m.ContinuingPrefix != "":
		return unsupported("continuing_subword_prefix %q", *m.ContinuingPrefix)
	case m.EndSuffix != nil && *m.EndSuffix != "":
		return unsupported("end_of_word_suffix %q", *m.EndSuffix)
	case m.ByteFallback:
		return unsupported("byte_fallback")
	}
	return nil
}

// normalizes reports whether texts are brought to NFC first.
func (d *document) normalizes() (bool, error) {
	if d.Normalizer == nil {
		return false, nil
	}
	steps := []step{*d.Normalizer}
	if d.Normalizer.Type == "Sequence" {
		steps = d.Normalizer.Normalizers
	}
	for _, s := range steps {
		if s.Type != "NFC" {
			return false, unsupported("normalizer %q", s.Type)
		}
	}
	return len(steps) > 0, nil
}

// gpt2Pattern is what a ByteLevel pre-tokenizer splits by when it is told to
// use its own expression.
const gpt2Pattern = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

// patterns lists the expressions that texts are split by, one after another.
func (d *document) patterns() ([]string, error) {
	if d.PreToken == nil {
		return nil, unsupported("no pre_tokenizer")
	}
	steps := []step{*d.PreToken}
	if d.PreToken.Type == "Sequence" {
		steps = d.PreToken.PreTokenizers
	}
	var patterns []string
	for i, s := range steps {
		switch {
		case s.Type == "Split" && s.Pattern.Regex != nil && s.Behavior == "Isolated" && !s.Invert:
			patterns = append(patterns, *s.Pattern.Regex)
		case s.Type == "Split":
			return nil, unsupported("pre_tokenizer Split that is not an isolating regular expression (behavior %q, invert %t)", s.Behavior, s.Invert)
		case s.Type == "ByteLevel" && s.AddPrefixSpace:
			return nil, unsupported("pre_tokenizer ByteLevel with add_prefix_space")
		case s.Type == "ByteLevel" && i != len(steps)-1:
			return nil, unsupported("a pre_tokenizer after ByteLevel")
		case s.Type == "ByteLevel":
			if s.UseRegex == nil || *s.UseRegex {
				patterns = append(patterns, gpt2Pattern)
			}
			return patterns, nil
		default:
			return nil, unsupported("pre_tokenizer %q", s.Type)
		}
	}
	return nil, unsupported("no ByteLevel pre_tokenizer")
}
