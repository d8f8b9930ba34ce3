package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/verify"
	"github.com/draftscope/draftscope/schemas"
)

// validateTensors checks a safetensors file of captured states, in which a
// state is a matrix called hidden_states.N or hidden_states, a row a token.
func validateTensors(v *validation, path string) {
	v.Samples++
	c, err := safetensors.OpenFile(os.DirFS(filepath.Dir(path)), filepath.Base(path))
	if err != nil {
		v.fault(path, "K21", "%v", err)
		return
	}
	defer c.Close()
	rows := -1
	states := 0
	for _, name := range c.Names() {
		info, _ := c.Info(name)
		shape := info.Shape
		isState := strings.Contains(name, "hidden_states")
		if (isState || name == "input_ids" || name == "loss_mask") && len(shape) > 0 {
			have := shape[0]
			if isState && len(shape) > 2 {
				have = shape[len(shape)-2]
			}
			if rows < 0 {
				rows = have
			}
			if have != rows {
				v.add(verify.Fault{File: path, Sample: name, Row: -1, State: stateOf(name), Rule: "K3", Value: rowsWords(have, rows)})
			}
		}
		if !isState {
			continue
		}
		states++
		vals, err := c.Float32s(name)
		if err != nil || len(shape) < 2 {
			v.add(verify.Fault{File: path, Sample: name, Row: -1, State: stateOf(name), Rule: "K8", Value: "a state is a matrix of floats; this is " + string(info.DType) + " of " + strconv.Itoa(len(shape)) + " dimensions"})
			continue
		}
		for _, f := range verify.Rows(vals, shape[len(shape)-1], mayOf(c, stateOf(name))) {
			f.File, f.Sample, f.State = path, name, stateOf(name)
			v.add(f)
		}
	}
	if states == 0 {
		v.fault(path, "K6", "no tensor is called hidden_states: it holds no captured state")
	}
}

// mayOf says which rows of a state may be zero, or repeat the one before. An
// embedding may, of a token that is not known here.
func mayOf(c *safetensors.Checkpoint, state int) func(row int) (zero, same bool) {
	ids, err := c.Ints("input_ids")
	if err != nil {
		return func(int) (zero, same bool) { return state == 0, state == 0 }
	}
	masks, _ := c.Ints("loss_mask") // none: no token is known to be supervised
	tokens := make([]schemas.Token, len(ids))
	for i, id := range ids {
		tokens[i] = schemas.Token{TokenID: int32(id), LossMask: i < len(masks) && masks[i] != 0}
	}
	return verify.May(state, tokens)
}

func rowsWords(have, want int) string {
	if have == want-1 {
		return strconv.Itoa(have) + " rows for " + strconv.Itoa(want) + ": the last row is missing"
	}
	return strconv.Itoa(have) + " rows where other tensors have " + strconv.Itoa(want)
}

// stateOf is the number behind the last dot of a tensor's name, -1 for none.
func stateOf(name string) int {
	n, err := strconv.Atoi(name[strings.LastIndexByte(name, '.')+1:])
	if err != nil || n < 0 {
		return -1
	}
	return n
}
