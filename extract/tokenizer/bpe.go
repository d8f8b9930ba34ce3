package tokenizer

import (
	"container/heap"
	"encoding/json"
	"fmt"
	"strings"
)

// bpe joins adjacent symbols in the order of the merge list.
type bpe struct {
	bytes  [256]int32 // id of each single byte
	merges map[uint64]merge
	whole  map[string]int32 // set when whole words skip the merges
}

type merge struct{ rank, id int32 }

func pair(a, b int32) uint64 { return uint64(uint32(a))<<32 | uint64(uint32(b)) }

func newBPE(m model) (*bpe, error) {
	b := &bpe{merges: make(map[uint64]merge, len(m.Merges))}
	for i, r := range byteRunes {
		id, ok := m.Vocab[string(r)]
		if !ok {
			return nil, fmt.Errorf("%w: its vocabulary has no token for byte %#02x", ErrFile, i)
		}
		b.bytes[i] = id
	}
	for rank, raw := range m.Merges {
		left, right, err := mergeOf(raw)
		if err != nil {
			return nil, fmt.Errorf("%w: merge %d: %w", ErrFile, rank, err)
		}
		l, okL := m.Vocab[left]
		r, okR := m.Vocab[right]
		id, okID := m.Vocab[left+right]
		if !okL || !okR || !okID {
			return nil, fmt.Errorf("%w: merge %d joins %q and %q, and not all three are in its vocabulary", ErrFile, rank, left, right)
		}
		if _, twice := b.merges[pair(l, r)]; !twice {
			b.merges[pair(l, r)] = merge{int32(rank), id}
		}
	}
	if m.IgnoreMerges {
		b.whole = make(map[string]int32, len(m.Vocab))
		for token, id := range m.Vocab {
			if raw, ok := spelledBytes(token); ok {
				b.whole[string(raw)] = id
			}
		}
	}
	return b, nil
}

// mergeOf reads a merge, which is "a b" in older files and ["a", "b"] since.
func mergeOf(raw json.RawMessage) (left, right string, err error) {
	var two []string
	if len(raw) > 0 && raw[0] == '"' {
		var line string
		if err := json.Unmarshal(raw, &line); err != nil {
			return "", "", err
		}
		two = strings.Split(line, " ")
	} else if err := json.Unmarshal(raw, &two); err != nil {
		return "", "", err
	}
	if len(two) != 2 {
		return "", "", fmt.Errorf("it has %d parts, want 2", len(two))
	}
	return two[0], two[1], nil
}

// symbol is a piece of the word being merged, in a doubly linked list. A
// symbol that was swallowed has id -1.
type symbol struct {
	id         int32
	prev, next int32
}

type candidate struct {
	merge
	pos         int32
	left, right int32 // ids when the candidate was found; stale if changed
}

type candidates []candidate

func (c candidates) Len() int { return len(c) }
func (c candidates) Less(i, j int) bool {
	if c[i].rank != c[j].rank {
		return c[i].rank < c[j].rank
	}
	return c[i].pos < c[j].pos
}
func (c candidates) Swap(i, j int) { c[i], c[j] = c[j], c[i] }
func (c *candidates) Push(x any)   { *c = append(*c, x.(candidate)) }
func (c *candidates) Pop() any {
	last := (*c)[len(*c)-1]
	*c = (*c)[:len(*c)-1]
	return last
}

// appendIDs appends the ids of one word: lowest rank first, leftmost among
// equals. It takes n log n steps for n bytes.
func (b *bpe) appendIDs(dst []int32, word string) []int32 {
	if id, ok := b.whole[word]; ok {
		return append(dst, id)
	}
	syms := make([]symbol, len(word))
	for i := range syms {
		syms[i] = symbol{b.bytes[word[i]], int32(i) - 1, int32(i) + 1}
	}
	var queue candidates
	offer := func(pos int32) {
		if pos < 0 {
			return
		}
		next := syms[pos].next
		if int(next) >= len(syms) {
			return
		}
		left, right := syms[pos].id, syms[next].id
		if m, ok := b.merges[pair(left, right)]; ok {
			heap.Push(&queue, candidate{m, pos, left, right})
		}
	}
	for i := range syms {
		offer(int32(i))
	}
	for len(queue) > 0 {
		c := heap.Pop(&queue).(candidate)
		at := &syms[c.pos]
		if at.id != c.left || int(at.next) >= len(syms) || syms[at.next].id != c.right {
			continue
		}
		gone := &syms[at.next]
		at.id, at.next, gone.id = c.id, gone.next, -1
		if int(at.next) < len(syms) {
			syms[at.next].prev = c.pos
		}
		offer(at.prev)
		offer(c.pos)
	}
	for _, s := range syms {
		if s.id >= 0 {
			dst = append(dst, s.id)
		}
	}
	return dst
}
