package tokenizer

import (
	"fmt"
	"strings"
)

// Message is one turn of a conversation.
type Message struct {
	Role    string `json:"role"` // system, user, assistant or tool
	Content string `json:"content"`
}

// Conversation is a rendered conversation, all slices of one length.
type Conversation struct {
	IDs []int32
	// Mask is true on assistant replies and on the <|im_end|> that closes
	// them, nowhere else: these are the tokens that a target would generate.
	Mask []bool
	Turn []int32  // index of the message
	Role []string // of the message; its header counts as part of it
	// Open says that the last message was not the assistant's, so that the
	// ids end with the header of a reply still to be generated.
	Open bool
}

const (
	imStart   = "<|im_start|>"
	imEnd     = "<|im_end|>"
	assistant = "assistant"
)

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
		switch m.Role {
		case "system", "user", assistant, "tool":
		default:
			return c, fmt.Errorf("%w: message %d has the role %q; use system, user, assistant or tool", ErrChat, i, m.Role)
		}
		if strings.TrimSpace(m.Content) == "" {
			return c, fmt.Errorf("%w: message %d (%s) is empty", ErrChat, i, m.Role)
		}
		if m.Role == assistant {
			c.add(t.Encode(imStart+m.Role+"\n"), i, m.Role, false)
			c.add(t.Encode(m.Content+imEnd), i, m.Role, true)
			c.add(t.Encode("\n"), i, m.Role, false)
			continue
		}
		c.add(t.Encode(imStart+m.Role+"\n"+m.Content+imEnd+"\n"), i, m.Role, false)
	}
	if c.Open = messages[len(messages)-1].Role != assistant; c.Open {
		c.add(t.Encode(imStart+assistant+"\n"), len(messages), assistant, false)
	}
	return c, nil
}

func (c *Conversation) add(ids []int32, turn int, role string, mask bool) {
	c.IDs = append(c.IDs, ids...)
	for range ids {
		c.Mask = append(c.Mask, mask)
		c.Turn = append(c.Turn, int32(turn))
		c.Role = append(c.Role, role)
	}
}
