package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/draftscope/draftscope/extract/files"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/verify"
	"github.com/draftscope/draftscope/schemas"
)

// stateTensor is a state in a safetensors file: a matrix called
// hidden_states.N or hidden_states, a row a token, or a slot of vLLM's
// hidden_states [tokens, slots, hidden], whose state is not in the file.
type stateTensor struct {
	name   string
	state  int // -1 where nobody says
	vals   []float32
	hidden int
}

// validateTensors checks a safetensors file of captured states.
func (j *job) validateTensors(ctx context.Context, v *validation, path string) error {
	v.Samples++
	c, err := safetensors.OpenFile(os.DirFS(filepath.Dir(path)), filepath.Base(path))
	if err != nil {
		v.fault(path, "K21", "%v", err)
		return nil
	}
	defer c.Close()
	fault := func(name string, row, state int, rule, format string, a ...any) {
		v.add(verify.Fault{File: path, Sample: name, Row: row, State: state, Rule: rule, Value: fmt.Sprintf(format, a...)})
	}
	states := stateTensors(c, fault)
	if len(states) == 0 {
		if v.Faults == 0 || v.ByRule["K8"] == 0 {
			v.fault(path, "K6", "no tensor is called hidden_states: it holds no captured state")
		}
		return nil
	}
	tokens := tokensOf(c)
	n := len(tokens)
	if tokens == nil {
		n = len(states[0].vals) / states[0].hidden
	}
	lo, hi := 0, n // of the text, without padding
	for _, name := range []string{"loss_mask", "attention_mask"} {
		mask, err := c.Ints(name)
		if err != nil {
			continue
		}
		if len(mask) != n {
			fault(name, -1, -1, "K3", "%d entries for %d tokens", len(mask), n)
			continue
		}
		if at := slices.IndexFunc(mask, func(bit int64) bool { return bit != 0 && bit != 1 }); at >= 0 {
			fault(name, at, -1, "K9", "it is %d; use 0 or 1", mask[at])
		}
		if name == "attention_mask" {
			for lo < n && mask[lo] == 0 {
				lo++
			}
			for hi > lo && mask[hi-1] == 0 {
				hi--
			}
		}
	}
	q := verify.Sequence{States: map[int][]float32{}}
	for _, s := range states {
		if have := len(s.vals) / s.hidden; have != n {
			fault(s.name, -1, s.state, "K3", "%s", rowsWords(have, n))
			continue
		}
		may := func(int) (zero, same bool) { return s.state == 0, s.state == 0 } // an embedding may, of a token that is not known
		if tokens != nil {
			may = verify.May(s.state, tokens[lo:hi])
		}
		text := s.vals[lo*s.hidden : hi*s.hidden]
		for _, f := range verify.Rows(text, s.hidden, may) {
			fault(s.name, lo+f.Row, s.state, f.Rule, "%s", f.Value)
		}
		if s.state >= 0 {
			q.States[s.state], q.Hidden, q.Recorded = text, s.hidden, append(q.Recorded, s.state)
		}
	}
	if j.model == nil || tokens == nil || len(q.Recorded) == 0 {
		return nil
	}
	return j.besideTarget(ctx, v, path, q, tokens[lo:hi])
}

// besideTarget runs the target on a file's tokens: K6, K7 and K11.
func (j *job) besideTarget(ctx context.Context, v *validation, path string, q verify.Sequence, tokens []schemas.Token) error {
	cfg := j.model.Config()
	ids := make([]int32, len(tokens))
	for i, t := range tokens {
		if ids[i] = t.TokenID; t.TokenID < 0 || int(t.TokenID) >= cfg.Vocab {
			v.add(verify.Fault{File: path, Row: i, State: -1, Rule: "K11", Value: fmt.Sprintf("token %d is outside the vocabulary of %d", t.TokenID, cfg.Vocab)})
			return nil
		}
	}
	if last := slices.Max(q.Recorded); q.Hidden != cfg.Hidden || last > cfg.Layers {
		v.fault(path, "K6", "states of %d values up to number %d; the target has %d layers of width %d", q.Hidden, last, cfg.Layers, cfg.Hidden)
		return nil
	}
	own, err := j.recompute(ctx, ids)
	if err != nil {
		return fmt.Errorf("checking %s against the target: %w", path, err)
	}
	for _, f := range q.Beside(own) {
		f.File = path
		v.add(f)
	}
	return nil
}

// stateTensors lists the states of a file, and names what is none.
func stateTensors(c *safetensors.Checkpoint, fault func(name string, row, state int, rule, format string, a ...any)) (out []stateTensor) {
	for _, name := range c.Names() {
		if !strings.Contains(name, "hidden_states") || strings.HasSuffix(name, "_scale") {
			continue
		}
		info, _ := c.Info(name)
		shape := info.Shape
		if len(shape) == 3 && shape[0] == 1 {
			shape = shape[1:]
		}
		vals, err := c.Float32s(name)
		if files.E4M3(info) && len(shape) >= 2 {
			slots := 1
			if len(shape) == 3 {
				slots = shape[1]
			}
			if vals, _, err = files.FromE4M3(c, name, shape[0], slots); err != nil {
				fault(name, -1, stateOf(name), "K8", "%v", err)
				continue
			}
		}
		if err != nil || len(shape) < 2 || len(shape) > 3 || shape[len(shape)-1] == 0 {
			fault(name, -1, stateOf(name), "K8", "a state is a matrix of floats; this is %s of shape %v", info.DType, info.Shape)
			continue
		}
		hidden := shape[len(shape)-1]
		if len(shape) == 2 {
			out = append(out, stateTensor{name, stateOf(name), vals, hidden})
			continue
		}
		for slot := range shape[1] {
			s := stateTensor{name: fmt.Sprintf("%s[:, %d]", name, slot), state: -1, hidden: hidden}
			for r := range shape[0] {
				at := (r*shape[1] + slot) * hidden
				s.vals = append(s.vals, vals[at:at+hidden]...)
			}
			out = append(out, s)
		}
	}
	return out
}

// tokensOf are the tokens of a file; nil where it has none.
func tokensOf(c *safetensors.Checkpoint) []schemas.Token {
	ids, err := c.Ints("input_ids")
	if err != nil {
		if ids, err = c.Ints("token_ids"); err != nil {
			return nil
		}
	}
	masks, _ := c.Ints("loss_mask") // none: no token is known to be supervised
	tokens := make([]schemas.Token, len(ids))
	for i, id := range ids {
		tokens[i] = schemas.Token{TokenID: int32(id), LossMask: i < len(masks) && masks[i] != 0}
	}
	return tokens
}

func rowsWords(have, want int) string {
	words := fmt.Sprintf("%d rows for %d tokens", have, want)
	switch {
	case have == want-1:
		words += ": last row missing"
	case have < want:
		words += fmt.Sprintf(": first %d rows missing (prefix cache?)", want-have)
	}
	return words
}

// stateOf is the number behind the last dot of a tensor's name, -1 for none.
func stateOf(name string) int {
	n, err := strconv.Atoi(name[strings.LastIndexByte(name, '.')+1:])
	if err != nil || n < 0 {
		return -1
	}
	return n
}
