package target

import (
	"slices"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/schemas"
)

// The values of finish_reason.
const (
	finishStop   = "stop"              // the target ended its reply
	finishLength = "length"            // a bound on new tokens, or the model's, cut it
	finishGiven  = schemas.FinishGiven // the sequence was given whole
)

// job is a sequence on its way through the target.
type job struct {
	Input
	ids       []int32
	mask      []bool
	promptLen int
	sampler   *sampler
	seq       *Sequence
	finish    string           // "" while tokens are still to be generated
	states    []*memory.Buffer // of all rows so far, by index into Source.taps
	fault     string
}

// hostMemory gives Arrow the memory that a device copies to.
type hostMemory struct{ dev cuda.Device }

// Free implements [memory.Allocator]. The rest of it is never asked for: the
// buffers do not grow.
func (h hostMemory) Free(b []byte) { h.dev.HostFree(b) }

func (h hostMemory) Allocate(int) []byte           { panic("target: host memory is taken from the device") }
func (h hostMemory) Reallocate(int, []byte) []byte { panic("target: host memory does not grow") }

// begin gives the job a sequence and memory for the states of all its rows.
func (j *job) begin(s *Source) (err error) {
	m := s.cfg.Model
	if j.seq, err = m.NewSequence(); err != nil {
		return err
	}
	rows := len(j.ids)
	if j.finish == "" {
		rows = min(rows+s.cfg.MaxNewTokens, m.cfg.MaxPositions)
	}
	if err := j.seq.Reserve(rows); err != nil {
		return err
	}
	for _, t := range s.taps {
		mem, err := m.dev.HostAlloc(rows * t.width)
		if err != nil {
			return err
		}
		j.states = append(j.states, memory.NewBufferWithAllocator(mem, hostMemory{m.dev}))
	}
	return nil
}

// end gives back what the job holds.
func (j *job) end() {
	if j.seq != nil {
		j.seq.Close()
	}
	release(j.states)
	j.seq, j.states = nil, nil
}

func release(buffers []*memory.Buffer) {
	for _, b := range buffers {
		b.Release()
	}
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
	if s.cfg.LastTurn && j.finish == finishGiven {
		j.mask = slices.Clone(j.mask)
		LastTurn(j.mask)
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

// rows is the memory for rows lo..hi-1 of tap i.
func (j *job) rows(s *Source, i, lo, hi int) []byte {
	width := s.taps[i].width
	return j.states[i].Bytes()[lo*width : hi*width]
}

// finished is a sequence whose records are waiting to be taken.
type finished struct {
	id     string
	rows   int // already given out
	tokens []schemas.Token
	states []*memory.Buffer // of the recorded states
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
	f.tokens = make([]schemas.Token, len(j.ids))
	for i, id := range j.ids {
		f.tokens[i] = schemas.Token{SeqID: j.ID, Pos: int32(i), TokenID: id, LossMask: j.mask[i], Turn: turn[i], Role: role[i]}
	}
	var err error
	final := func(x cuda.Tensor, lo, hi int) error {
		return s.cfg.Model.dev.Load(x, j.rows(s, s.final, lo, hi), s.taps[s.final].as)
	}
	if f.fault, err = s.cfg.Model.score(f.tokens, final, false); err != nil || f.fault != "" {
		return f, err
	}
	f.states = j.states[:len(s.cfg.States)]
	for _, b := range f.states {
		b.Retain()
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
