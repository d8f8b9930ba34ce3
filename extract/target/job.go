package target

import (
	"slices"

	"github.com/draftscope/draftscope/schemas"
)

// The values of finish_reason.
const (
	finishStop   = "stop"   // the target ended its reply
	finishLength = "length" // a bound on new tokens, or the model's, cut it
	finishGiven  = "given"  // the sequence was given whole
)

// job is a sequence on its way through the target.
type job struct {
	Input
	ids       []int32
	mask      []bool
	promptLen int
	sampler   *sampler
	seq       *Sequence
	finish    string    // "" while tokens are still to be generated
	states    [][]byte  // of all rows so far, by index into the recorded states
	final     []float32 // state n of all rows so far
	fault     string
}

// prepare tokenizes an input and checks it against the model.
func (s *Source) prepare(in Input) (*job, error) {
	j := &job{Input: in, sampler: newSampler(s.cfg.Seed, in.ID)}
	cfg := s.cfg.Model.cfg
	if in.IDs != nil {
		j.finish = finishGiven
		j.ids, j.mask, j.promptLen = in.IDs, in.Mask, in.PromptLen
		if j.mask == nil {
			j.mask = make([]bool, len(j.ids))
			for i := range j.mask {
				j.mask[i] = i >= j.promptLen
			}
		}
	} else {
		if s.cfg.Tokenizer == nil {
			return nil, badLine(in.where, "it is a text and there is no tokenizer; put tokenizer.json beside the target's weights, or give input_ids")
		}
		chat, err := s.cfg.Tokenizer.Chat(in.Messages)
		if err != nil {
			return nil, badLine(in.where, "%v", err)
		}
		j.ids, j.mask, j.promptLen = chat.IDs, chat.Mask, len(chat.IDs)
		if !chat.Open {
			j.finish, j.promptLen = finishGiven, slices.Index(chat.Mask, true)
		}
	}
	for i, id := range j.ids {
		if id < 0 || int(id) >= cfg.Vocab {
			return nil, badLine(in.where, "token %d at position %d is outside the target's vocabulary of %d; tokenize with the target's own tokenizer", id, i, cfg.Vocab)
		}
	}
	if len(j.mask) != len(j.ids) || len(j.ids) == 0 || j.promptLen < 0 || j.promptLen > len(j.ids) {
		return nil, badLine(in.where, "%d tokens, %d mask entries, prompt length %d do not fit together", len(j.ids), len(j.mask), j.promptLen)
	}
	most := cfg.MaxPositions
	if j.finish == "" {
		most-- // room for one new token at least
	}
	if len(j.ids) > most {
		return nil, badLine(in.where, "it has %d tokens, the target takes %d; shorten it", len(j.ids), most)
	}
	return j, nil
}

// take keeps n rows of a forward pass, which begin at row lo of it, or notes
// a fault.
func (j *job) take(s *Source, out *Output, lo, n int) {
	h, last := s.cfg.Model.cfg.Hidden, s.cfg.Model.cfg.Layers
	pos := j.seq.Len() - n
	for i, c := range s.states {
		vals := out.States[i][lo*h : (lo+n)*h]
		recorded := i < len(s.cfg.States)
		dtype := schemas.F32
		if recorded {
			dtype = s.cfg.DType
		}
		if j.fault = findFault(vals, h, pos, c, dtype); j.fault != "" {
			return
		}
		if recorded {
			j.states[i] = s.cfg.DType.AppendBytes(j.states[i], vals)
		}
		if c == last {
			j.final = append(j.final, vals...)
		}
	}
}

// finished is a sequence whose records are waiting to be taken.
type finished struct {
	id     string
	rows   int // already given out
	tokens []schemas.Token
	states [][]byte
	row    schemas.Sequence
	fault  string
}

// complete scores the target's own next tokens, over all rows in one fixed
// way, whether they were generated or given.
func (j *job) complete(s *Source) (*finished, error) {
	f := &finished{id: j.ID, fault: j.fault}
	if f.fault != "" {
		return f, nil
	}
	turn, role := s.turns(j.ids)
	f.states = j.states
	f.tokens = make([]schemas.Token, len(j.ids))
	for i, id := range j.ids {
		f.tokens[i] = schemas.Token{SeqID: j.ID, Pos: int32(i), TokenID: id, LossMask: j.mask[i], Turn: turn[i], Role: role[i]}
	}
	var err error
	h := s.cfg.Model.cfg.Hidden
	final := func(lo, hi int) []float32 { return j.final[lo*h : hi*h] }
	if f.fault, err = s.cfg.Model.Score(f.tokens, final, false); err != nil || f.fault != "" {
		return f, err
	}
	f.row = schemas.Sequence{
		SeqID: j.ID, PromptLen: int32(j.promptLen), Length: int32(len(j.ids)), FinishReason: j.finish,
		Temperature: s.cfg.Temperature, Tags: j.Tags, CreatedAt: s.cfg.Now().UTC(),
	}
	if j.finish == finishGiven {
		f.row.Temperature = 0
	}
	if s.cfg.Tokenizer != nil && !s.cfg.Redact {
		text := s.cfg.Tokenizer.Decode(j.ids)
		f.row.Text = &text
	}
	return f, nil
}

// turns reads turns and roles from the ids; without a tokenizer both are
// unknown.
func (s *Source) turns(ids []int32) ([]int32, []string) {
	if s.cfg.Tokenizer != nil {
		return s.cfg.Tokenizer.Turns(ids)
	}
	return make([]int32, len(ids)), slices.Repeat([]string{"unknown"}, len(ids))
}
