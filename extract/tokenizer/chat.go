package tokenizer

import (
	"fmt"
	"slices"
	"strings"
)

// Message is one turn of a conversation.
type Message struct {
	Role    string `json:"role"` // system, user, assistant or tool
	Content string `json:"content"`
}

// Conversation is a rendered conversation, both slices of one length.
type Conversation struct {
	IDs []int32
	// Mask is true on assistant replies and on the <|im_end|> that closes
	// them, nowhere else: these are the tokens that a target would generate.
	Mask []bool
	// Open says that the last message was not the assistant's, so that the
	// ids end with the header of a reply still to be generated.
	Open bool
}

const (
	imStart   = "<|im_start|>"
	imEnd     = "<|im_end|>"
	assistant = "assistant"
)

var roles = []string{"system", "user", assistant, "tool"}

// Prompt is the text of a conversation of one user message, ready for the
// reply: what Chat encodes.
func Prompt(content string) string {
	return imStart + "user\n" + content + imEnd + "\n" + imStart + assistant + "\n"
}

// Chat renders messages in ChatML:
//
//	<|im_start|>{role}\n{content}<|im_end|>\n
//
// and, unless the last message is the assistant's, the header of its reply. A
// reply is encoded apart from its header, as it is when the target generates
// it; everything else is encoded as one text.
func (t *Tokenizer) Chat(messages []Message) (Conversation, error) {
	var c Conversation
	if len(messages) == 0 {
		return c, fmt.Errorf("%w: it has no messages", ErrChat)
	}
	for _, tok := range []string{imStart, imEnd} {
		if id, ok := t.ID(tok); !ok || !t.Added(id) {
			return c, fmt.Errorf("%w: the tokenizer has no %s, which ChatML needs", ErrChat, tok)
		}
	}
	for i, m := range messages {
		if !slices.Contains(roles, m.Role) {
			return c, fmt.Errorf("%w: message %d has the role %q; use %s", ErrChat, i, m.Role, strings.Join(roles, ", "))
		}
		if strings.TrimSpace(m.Content) == "" {
			return c, fmt.Errorf("%w: message %d (%s) is empty", ErrChat, i, m.Role)
		}
		if m.Role == assistant {
			c.add(t.Encode(imStart+m.Role+"\n"), false)
			c.add(t.Encode(m.Content+imEnd), true)
			c.add(t.Encode("\n"), false)
			continue
		}
		c.add(t.Encode(imStart+m.Role+"\n"+m.Content+imEnd+"\n"), false)
	}
	if c.Open = messages[len(messages)-1].Role != assistant; c.Open {
		c.add(t.Encode(imStart+assistant+"\n"), false)
	}
	return c, nil
}

func (c *Conversation) add(ids []int32, mask bool) {
	c.IDs = append(c.IDs, ids...)
	for range ids {
		c.Mask = append(c.Mask, mask)
	}
}

// headerTokens bounds the tokens in which a role is looked for.
const headerTokens = 8

// Turns reads the turn and the role of every id back from the headers: turn
// counts the <|im_start|> before it, from 0, and role is what the header
// says, the header being part of its turn. Ids before the first header, and
// turns whose header names no known role, have the role "unknown".
func (t *Tokenizer) Turns(ids []int32) (turn []int32, role []string) {
	start, ok := t.ID(imStart)
	turn, role = make([]int32, len(ids)), make([]string, len(ids))
	at, who := int32(-1), "unknown"
	for i, id := range ids {
		if ok && id == start {
			at++
			name, _, _ := strings.Cut(t.Decode(ids[i+1:min(i+1+headerTokens, len(ids))]), "\n")
			if who = name; !slices.Contains(roles, name) {
				who = "unknown"
			}
		}
		turn[i], role[i] = max(at, 0), who
	}
	return turn, role
}
