package target

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/draftscope/draftscope/extract/tokenizer"
)

// Input is one sequence to capture: a conversation, which the target may
// continue, or the ids of a sequence that is given whole.
type Input struct {
	ID   string
	Tags map[string]string // kept with the sequence
	// Messages are rendered by the tokenizer. Unless the last is the
	// assistant's, the target generates the reply.
	Messages []tokenizer.Message
	// IDs are a whole sequence, run as it is. PromptLen is where the reply
	// begins; Mask, one a token, says which tokens count (nil: those from
	// PromptLen on).
	IDs       []int32
	PromptLen int
	Mask      []bool

	where string // file:line, for errors about the content
}

// maxLine bounds a line, and so the memory that a file without line breaks
// can cost.
const maxLine = 64 << 20

// idPattern keeps ids usable as file names and in SQL without quoting rules.
var idPattern = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)

func badLine(where, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %s", ErrInput, where, fmt.Sprintf(format, args...))
}

// ReadPrompts reads prompts, one JSON object a line:
//
//	{"prompt": "...", "id": "p0", "tags": {"set": "a"}}
//	{"messages": [{"role": "user", "content": "..."}]}
//
// id and tags are optional; an id defaults to p0000, p0001, ... by the number
// of the prompt. name is the file's name for errors, which wrap [ErrInput].
func ReadPrompts(r io.Reader, name string) ([]Input, error) {
	return readLines(r, name, "prompt", func(where string, n int, line []byte) (Input, error) {
		var doc struct {
			ID       *string              `json:"id"`
			Prompt   *string              `json:"prompt"`
			Messages *[]tokenizer.Message `json:"messages"`
			Tags     map[string]string    `json:"tags"`
		}
		if err := strict(line, &doc); err != nil {
			return Input{}, badLine(where, "%s; a prompt is {\"prompt\": TEXT} or {\"messages\": [...]}, with \"id\" and \"tags\" if wanted", err)
		}
		in := Input{ID: fmt.Sprintf("p%04d", n), Tags: doc.Tags, where: where}
		if doc.ID != nil {
			in.ID = *doc.ID
		}
		switch {
		case (doc.Prompt == nil) == (doc.Messages == nil):
			return in, badLine(where, "it needs either \"prompt\" or \"messages\"")
		case doc.Prompt != nil && strings.TrimSpace(*doc.Prompt) == "":
			return in, badLine(where, "the prompt is empty; remove the line")
		case doc.Prompt != nil:
			in.Messages = []tokenizer.Message{{Role: "user", Content: *doc.Prompt}}
		case len(*doc.Messages) == 0:
			return in, badLine(where, "\"messages\" is empty; remove the line")
		default:
			in.Messages = *doc.Messages
		}
		return in, nil
	})
}

// ReadSequences reads sequences that exist already, one JSON object a line:
//
//	{"id": "s0", "input_ids": [1, 2, 3], "prompt_len": 2}
//	{"id": "s1", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "tags": {}}
//	{"id": "s2", "input_ids": [0, 1, 2], "loss_mask": [0, 0, 1], "attention_mask": [0, 1, 1]}
//
// Padding, where attention_mask is 0, is left out: the target never sees it.
// The keys prompt, completion and text may stand beside them and are not
// used. Errors wrap [ErrInput].
func ReadSequences(r io.Reader, name string) ([]Input, error) {
	return readLines(r, name, "sequence", func(where string, _ int, line []byte) (Input, error) {
		var doc struct {
			ID         *string           `json:"id"`
			InputIDs   []int32           `json:"input_ids"`
			PromptLen  *int              `json:"prompt_len"`
			Mask       []int             `json:"loss_mask"`
			Attended   []int             `json:"attention_mask"`
			Tags       map[string]string `json:"tags"`
			Prompt     json.RawMessage   `json:"prompt"`
			Completion json.RawMessage   `json:"completion"`
			Text       json.RawMessage   `json:"text"`
		}
		if err := strict(line, &doc); err != nil {
			return Input{}, badLine(where, "%s; a sequence is {\"id\": NAME, \"input_ids\": [...], \"prompt_len\": N or \"loss_mask\": [...]}", err)
		}
		in := Input{IDs: doc.InputIDs, Tags: doc.Tags, where: where}
		switch {
		case doc.ID == nil:
			return in, badLine(where, "\"id\" is missing; give every sequence a name")
		case len(doc.InputIDs) == 0:
			return in, badLine(where, "\"input_ids\" is missing or empty; remove the line")
		case doc.PromptLen == nil && doc.Mask == nil:
			return in, badLine(where, "it needs \"prompt_len\" or \"loss_mask\", which say what the target is judged on")
		}
		if doc.Attended != nil {
			lo, hi, why := attended(doc.Attended, len(doc.InputIDs))
			switch {
			case why != "":
				return in, badLine(where, "%s", why)
			case doc.Mask != nil && len(doc.Mask) == len(doc.InputIDs):
				doc.Mask = doc.Mask[lo:hi]
			}
			if doc.PromptLen != nil {
				*doc.PromptLen -= lo
			}
			in.IDs = doc.InputIDs[lo:hi]
		}
		in.ID, in.PromptLen = *doc.ID, len(in.IDs)
		if doc.Mask != nil && len(doc.Mask) != len(in.IDs) {
			return in, badLine(where, "\"loss_mask\" has %d entries for %d tokens; give one a token", len(doc.Mask), len(in.IDs))
		}
		for i, bit := range doc.Mask {
			if bit != 0 && bit != 1 {
				return in, badLine(where, "loss_mask[%d] is %d; use 0 or 1", i, bit)
			}
			in.Mask = append(in.Mask, bit == 1)
			if bit == 1 {
				in.PromptLen = min(in.PromptLen, i)
			}
		}
		if doc.PromptLen != nil {
			if in.PromptLen = *doc.PromptLen; in.PromptLen < 0 || in.PromptLen > len(in.IDs) {
				return in, badLine(where, "\"prompt_len\" is %d, outside 0..%d", in.PromptLen, len(in.IDs))
			}
		}
		return in, nil
	})
}

// attended is where the ones of a mask of n tokens lie, which must be one run;
// or what is wrong with it.
func attended(mask []int, n int) (lo, hi int, why string) {
	lo = slices.Index(mask, 1)
	if len(mask) != n || lo < 0 {
		return 0, 0, fmt.Sprintf("\"attention_mask\" has %d entries for %d tokens, and must have a 1", len(mask), n)
	}
	for hi = lo; hi < n && mask[hi] == 1; hi++ {
	}
	for t := range n {
		if (t < lo || t >= hi) && mask[t] != 0 {
			return 0, 0, fmt.Sprintf("attention_mask[%d] is %d; padding is 0, before the text or behind it, and the text is one run of 1", t, mask[t])
		}
	}
	return lo, hi, ""
}

// strict decodes exactly one JSON value without unknown keys.
func strict(line []byte, doc any) error {
	dec := json.NewDecoder(bytes.NewReader(line))
	dec.DisallowUnknownFields()
	if err := dec.Decode(doc); err != nil {
		text := strings.TrimPrefix(err.Error(), "json: ")
		if errors.Is(err, io.ErrUnexpectedEOF) {
			text = "the JSON object is not closed"
		}
		return errors.New(text)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more follows the JSON object")
	}
	return nil
}

// looksLikeObject tells what stands in place of a JSON object.
func looksLikeObject(line []byte) error {
	switch {
	case bytes.HasPrefix(line, []byte("\xef\xbb\xbf")), bytes.HasPrefix(line, []byte("\xff\xfe")), bytes.HasPrefix(line, []byte("\xfe\xff")):
		return errors.New("the file starts with a byte order mark; save it as UTF-8 without one")
	case !utf8.Valid(line):
		return errors.New("the line is not UTF-8")
	case line[0] != '{':
		return errors.New("the line is not a JSON object, which begins with a brace")
	}
	return nil
}

// short cuts what users gave to what a message can show.
func short(s string) string {
	const most = 64
	if len(s) <= most {
		return s
	}
	return s[:most] + "..."
}

// readLines parses every line that is not blank; n counts them from 0.
func readLines(r io.Reader, name, kind string, parse func(where string, n int, line []byte) (Input, error)) ([]Input, error) {
	var out []Input
	seen := map[string]string{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	number := 0
	for lines.Scan() {
		number++
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue
		}
		where := fmt.Sprintf("%s:%d", name, number)
		if err := looksLikeObject(line); err != nil {
			return nil, badLine(where, "%v", err)
		}
		in, err := parse(where, len(out), line)
		if err != nil {
			return nil, err
		}
		if !idPattern.MatchString(in.ID) {
			return nil, badLine(where, "the id %q is not usable; use up to 128 letters, digits, '_', '-' and '.', not '.' or '-' first", short(in.ID))
		}
		if first, twice := seen[in.ID]; twice {
			return nil, badLine(where, "the id %q was used at %s; give every %s its own", in.ID, first, kind)
		}
		seen[in.ID] = where
		out = append(out, in)
	}
	if err := lines.Err(); err != nil && !errors.Is(err, bufio.ErrTooLong) {
		return nil, fmt.Errorf("%w: reading %s: %w", ErrInput, name, err)
	} else if err != nil {
		return nil, badLine(fmt.Sprintf("%s:%d", name, number+1), "reading the line: %v; a line holds one %s of at most %d MiB", err, kind, maxLine>>20)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: %s holds no %s; put one JSON object on each line", ErrInput, name, kind)
	}
	return out, nil
}
