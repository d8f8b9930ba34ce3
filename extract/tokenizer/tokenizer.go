// Package tokenizer turns text into the ids of a byte-level BPE vocabulary
// and back, as a model's tokenizer.json says. It carries out what Qwen's
// models use (added tokens, NFC, split expressions, byte-level merges) and
// refuses by name whatever else a file asks for.
package tokenizer

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/dlclark/regexp2"
	"golang.org/x/text/unicode/norm"
)

const fileName = "tokenizer.json"

// Tokenizer is one vocabulary. It is not changed after Load, and any number
// of goroutines may use it.
type Tokenizer struct {
	bpe     *bpe
	nfc     bool
	splits  []*regexp2.Regexp
	raw     added // matched in the text as given
	cooked  added // matched after normalization
	tokens  []string
	bytes   [][]byte // what each id decodes to, nil where there is none
	ids     map[string]int32
	special map[int32]bool
	print   string
}

// Load reads tokenizer.json in directory dir of fsys.
func Load(fsys fs.FS, dir string) (*Tokenizer, error) {
	name := path.Join(dir, fileName)
	data, err := fs.ReadFile(fsys, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("loading tokenizer: %w: %s does not exist; put the model's %s beside its weights: %w", ErrFile, name, fileName, err)
	}
	if err != nil {
		return nil, fmt.Errorf("loading tokenizer %s: %w", name, err)
	}
	t, err := parse(data)
	if err != nil {
		return nil, fmt.Errorf("loading tokenizer %s: %w", name, err)
	}
	return t, nil
}

func parse(data []byte) (*Tokenizer, error) {
	var doc document
	if err := json.Unmarshal(data, &doc); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFile, err)
	}
	if err := doc.check(); err != nil {
		return nil, err
	}
	nfc, err := doc.normalizes()
	if err != nil {
		return nil, err
	}
	patterns, err := doc.patterns()
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(data)
	t := &Tokenizer{nfc: nfc, print: hex.EncodeToString(sum[:])}
	for _, p := range patterns {
		re, err := regexp2.Compile(p, regexp2.None)
		if err != nil {
			return nil, fmt.Errorf("%w: split expression: %w", ErrFile, err)
		}
		t.splits = append(t.splits, re)
	}
	if t.bpe, err = newBPE(doc.Model); err != nil {
		return nil, err
	}
	return t, t.fill(doc)
}

// maxID bounds the tables that a hostile id can cost.
const maxID = 1 << 22

func (t *Tokenizer) fill(doc document) error {
	t.ids = doc.Model.Vocab
	size := int32(0)
	for token, id := range doc.Model.Vocab {
		if id < 0 || id >= maxID {
			return fmt.Errorf("%w: token %q has id %d", ErrFile, token, id)
		}
		size = max(size, id+1)
	}
	for _, a := range doc.AddedTokens {
		if a.ID < 0 || a.ID >= maxID {
			return fmt.Errorf("%w: added token %q has id %d", ErrFile, a.Content, a.ID)
		}
		size = max(size, a.ID+1)
	}
	t.tokens = make([]string, size)
	t.bytes = make([][]byte, size)
	for token, id := range doc.Model.Vocab {
		if t.bytes[id] != nil {
			return fmt.Errorf("%w: tokens %q and %q share id %d", ErrFile, t.tokens[id], token, id)
		}
		raw, ok := spelledBytes(token)
		if !ok {
			raw = []byte(token) // an added token, listed in the vocabulary too
		}
		t.tokens[id], t.bytes[id] = token, raw
	}
	t.special = make(map[int32]bool, len(doc.AddedTokens))
	for _, a := range doc.AddedTokens {
		if other, ok := t.ids[a.Content]; ok && other != a.ID {
			return fmt.Errorf("%w: added token %q has the ids %d and %d", ErrFile, a.Content, other, a.ID)
		}
		t.ids[a.Content] = a.ID
		t.tokens[a.ID], t.bytes[a.ID] = a.Content, []byte(a.Content)
		t.special[a.ID] = true
		if a.Normalized {
			t.cooked.add(a)
		} else {
			t.raw.add(a)
		}
	}
	return nil
}

// added finds added tokens in a text: leftmost first, longest among those
// that begin at the same place.
type added struct{ byFirst [256][]addedToken }

func (a *added) add(tok addedToken) {
	list := append(a.byFirst[tok.Content[0]], tok)
	slices.SortStableFunc(list, func(x, y addedToken) int { return cmp.Compare(len(y.Content), len(x.Content)) })
	a.byFirst[tok.Content[0]] = list
}

// split calls text and token in the order of s.
func (a *added) split(s string, text func(string), token func(int32)) {
	from := 0
	for i := 0; i < len(s); {
		hit := -1
		for j, tok := range a.byFirst[s[i]] {
			if strings.HasPrefix(s[i:], tok.Content) {
				hit = j
				break
			}
		}
		if hit < 0 {
			i++
			continue
		}
		tok := a.byFirst[s[i]][hit]
		if from < i {
			text(s[from:i])
		}
		token(tok.ID)
		i += len(tok.Content)
		from = i
	}
	if from < len(s) {
		text(s[from:])
	}
}

// Encode is the ids of a text. Added tokens such as <|im_end|> are recognised
// wherever the text spells them. Bytes that are not UTF-8 count as U+FFFD.
func (t *Tokenizer) Encode(text string) []int32 {
	if !utf8.ValidString(text) {
		text = strings.ToValidUTF8(text, "\uFFFD")
	}
	var ids []int32
	token := func(id int32) { ids = append(ids, id) }
	t.raw.split(text, func(part string) {
		if t.nfc {
			part = norm.NFC.String(part)
		}
		t.cooked.split(part, func(plain string) {
			ids = t.appendPlain(ids, []rune(plain), t.splits)
		}, token)
	}, token)
	return ids
}

// appendPlain splits text by each expression in turn; what an expression
// matches and what lies between its matches are words of their own.
func (t *Tokenizer) appendPlain(ids []int32, text []rune, splits []*regexp2.Regexp) []int32 {
	if len(text) == 0 {
		return ids
	}
	if len(splits) == 0 {
		return t.bpe.appendIDs(ids, string(text))
	}
	at := 0
	m, err := splits[0].FindRunesMatch(text)
	for ; m != nil && err == nil; m, err = splits[0].FindNextMatch(m) {
		if m.Length == 0 {
			continue
		}
		ids = t.appendPlain(ids, text[at:m.Index], splits[1:])
		ids = t.appendPlain(ids, text[m.Index:m.Index+m.Length], splits[1:])
		at = m.Index + m.Length
	}
	// The only error is the match timeout, which is not set.
	return t.appendPlain(ids, text[at:], splits[1:])
}

// Decode is the text of ids, added tokens spelled out. An id without a token,
// and bytes that are not UTF-8, read as U+FFFD.
func (t *Tokenizer) Decode(ids []int32) string {
	var out []byte
	for _, id := range ids {
		if id < 0 || int(id) >= len(t.bytes) || t.bytes[id] == nil {
			out = append(out, "\uFFFD"...)
			continue
		}
		out = append(out, t.bytes[id]...)
	}
	return strings.ToValidUTF8(string(out), "\uFFFD")
}

// Token is the spelling of an id in the vocabulary, false when it has none.
func (t *Tokenizer) Token(id int32) (string, bool) {
	if id < 0 || int(id) >= len(t.tokens) || t.bytes[id] == nil {
		return "", false
	}
	return t.tokens[id], true
}

// ID is the id of a token as the vocabulary spells it.
func (t *Tokenizer) ID(token string) (int32, bool) {
	id, ok := t.ids[token]
	return id, ok
}

// Added reports whether id is an added token, such as <|im_end|>.
func (t *Tokenizer) Added(id int32) bool { return t.special[id] }

// Size is one more than the largest id.
func (t *Tokenizer) Size() int { return len(t.tokens) }

// Fingerprint is a hash of the file.
func (t *Tokenizer) Fingerprint() string { return t.print }
