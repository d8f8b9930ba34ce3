package diagnose

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
)

// Log is a training log: what each run logged, step by step.
type Log struct {
	Runs map[string][]Step
}

// Step is one line of a run.
type Step struct {
	Step int
	Loss float64
	Acc  []float64 // by slot, slot 1 first; may be empty
	EAL  *float64
	// Slots are unweighted mean losses by slot, by the loss's name, where the
	// log has them: with them a loss can be checked to the last digit. Names
	// are those of [drafter.Objective]; "@2" after one is its temperature.
	Slots map[string][]float64
	// Counts are over how many labels each slot's mean is; nil is as many for
	// every slot.
	Counts []float64
	// Blocks are unweighted losses by block and slot, NaN where a slot does
	// not count.
	Blocks map[string][][]float64
}

type stepJSON struct {
	Loss     *float64             `json:"loss"`
	Acc      []float64            `json:"acc"`
	EAL      *float64             `json:"eal"`
	SlotLoss map[string][]float64 `json:"slot_loss"`
	Counts   []float64            `json:"slot_count"`
	// BlockLoss has null where a slot does not count.
	BlockLoss map[string][][]*float64 `json:"block_loss"`
}

// blocks are the losses by block, with NaN for null.
func (s stepJSON) blocks() map[string][][]float64 {
	out := map[string][][]float64{}
	for name, rows := range s.BlockLoss {
		for _, row := range rows {
			vals := make([]float64, len(row))
			for k, v := range row {
				vals[k] = math.NaN()
				if v != nil {
					vals[k] = *v
				}
			}
			out[name] = append(out[name], vals)
		}
	}
	return out
}

// pool makes means and counts by slot of losses by block, unless the log has
// means of its own.
func (st *Step) pool() {
	if st.Slots != nil {
		return
	}
	for name, rows := range st.Blocks {
		if len(rows) == 0 {
			continue
		}
		sums, counts := make([]float64, len(rows[0])), make([]float64, len(rows[0]))
		for _, row := range rows {
			for k, v := range row {
				if !math.IsNaN(v) {
					sums[k] += v
					counts[k]++
				}
			}
		}
		for k, n := range counts {
			sums[k] /= math.Max(n, 1)
		}
		if st.Slots == nil {
			st.Slots = map[string][]float64{}
		}
		st.Slots[name], st.Counts = sums, counts
	}
}

// check reports lists that do not belong together.
func (s stepJSON) check() error {
	if s.Loss == nil {
		return errors.New("it has no loss")
	}
	slots := len(s.Counts)
	same := func(n int) bool {
		if slots == 0 {
			slots = n
		}
		return n == slots && n > 0
	}
	for name, l := range s.SlotLoss {
		if !same(len(l)) {
			return fmt.Errorf("slot_loss %s has %d slots, want %d", name, len(l), slots)
		}
	}
	rows := -1
	for name, l := range s.BlockLoss {
		if rows < 0 {
			rows = len(l)
		}
		if len(l) != rows {
			return fmt.Errorf("block_loss %s has %d blocks, want %d", name, len(l), rows)
		}
		for _, row := range l {
			if !same(len(row)) {
				return fmt.Errorf("block_loss %s has a block of %d slots, want %d", name, len(row), slots)
			}
		}
	}
	return nil
}

// maxLogLine bounds a line of a log.
const maxLogLine = 16 << 20

// ReadLog reads a training log, a JSON object a line: {"step", "drafters":
// {NAME: {"loss", "acc": [a slot], "eal"}}}, or one run's {"step", "loss",
// "acc"}. slot_loss, an object of lists by objective, is optional, and so are
// slot_count and block_loss, an object of lists of lists.
func ReadLog(r io.Reader) (*Log, error) {
	out := &Log{Runs: map[string][]Step{}}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLogLine)
	for n := 1; lines.Scan(); n++ {
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue
		}
		var doc struct {
			Step     int                 `json:"step"`
			Drafters map[string]stepJSON `json:"drafters"`
			stepJSON
		}
		if err := json.Unmarshal(line, &doc); err != nil {
			return nil, fmt.Errorf("%w: line %d of the training log: %w", ErrCase, n, err)
		}
		if doc.Drafters == nil {
			doc.Drafters = map[string]stepJSON{"": doc.stepJSON}
		}
		for name, s := range doc.Drafters {
			if err := s.check(); err != nil {
				return nil, fmt.Errorf("%w: line %d of the training log: %w", ErrCase, n, err)
			}
			st := Step{Step: doc.Step, Loss: *s.Loss, Acc: s.Acc, EAL: s.EAL, Slots: s.SlotLoss, Counts: s.Counts, Blocks: s.blocks()}
			st.pool()
			out.Runs[name] = append(out.Runs[name], st)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%w: reading the training log: %w", ErrCase, err)
	}
	if len(out.Runs) == 0 {
		return nil, fmt.Errorf("%w: the training log is empty", ErrCase)
	}
	return out, nil
}

// curve is where a drafter stands on a logged run.
type curve struct {
	run        string
	step, last int
	words      string
}

// early says that the drafter hits as the run did in its first half.
func (c curve) early() bool { return c.run != "" && 2*c.step < c.last }

// logged picks the run of the log that made the drafter: the one of its name,
// the only one, or none.
func (s *study) logged() (string, []Step) {
	if s.Log == nil {
		return "", nil
	}
	name := s.LogRun
	if name == "" {
		name = s.Drafter.Name
	}
	if run, ok := s.Log.Runs[name]; ok {
		return name, run
	}
	if len(s.Log.Runs) == 1 {
		for name, run := range s.Log.Runs {
			return name, run
		}
	}
	return "", nil
}

// matchCurve finds by which step a logged run hit as the drafter does, at the
// labels that the drafter was trained for. Each step is smoothed over its
// neighbours; the step is the first from which on the run hits more. Of a
// drafter without a run of its own, the run that fits best is taken.
func (s *study) matchCurve() curve {
	if s.Log == nil || s.trained == nil {
		return curve{}
	}
	runs := s.Log.Runs
	if name, own := s.logged(); own != nil {
		runs = map[string][]Step{name: own}
	}
	have := rates(slotHits(s.trained, s.spec.BlockSize))
	best, distance := curve{}, math.Inf(1)
	for _, name := range slices.Sorted(maps.Keys(runs)) {
		steps := smooth(runs[name])
		if len(steps) == 0 || len(steps[0].Acc) != len(have) {
			continue
		}
		c := curve{run: name, last: steps[len(steps)-1].Step}
		nearest := math.Inf(1)
		for _, st := range steps {
			if d := profileDistance(have, st.Acc); d < nearest {
				nearest, c.step = d, st.Step
			}
		}
		if nearest < distance {
			best, distance = c, nearest
		}
	}
	if best.run == "" {
		return best
	}
	switch {
	case best.step >= best.last*9/10:
		best.words = fmt.Sprintf("it hits as run %s did at its end, or more", label(best.run))
	default:
		best.words = fmt.Sprintf("it hits as run %s did by step %d of %d", label(best.run), best.step, best.last)
	}
	return best
}

func label(run string) string {
	if run == "" {
		return "of the log"
	}
	return run
}

// profileDistance compares the accuracies of two sets of slots; slot 1 and 2
// carry most of it, as they carry most of the acceptance.
func profileDistance(a, b []float64) float64 {
	var d float64
	for k := range a {
		d += (a[k] - b[k]) * (a[k] - b[k])
	}
	return d
}

// smooth averages each step with its neighbours: a logged accuracy is of one
// batch.
func smooth(steps []Step) []Step {
	var out []Step
	for i, st := range steps {
		if len(st.Acc) == 0 {
			continue
		}
		acc := make([]float64, len(st.Acc))
		n := 0.0
		for j := max(0, i-1); j <= min(len(steps)-1, i+1); j++ {
			if len(steps[j].Acc) != len(acc) {
				continue
			}
			n++
			for k, v := range steps[j].Acc {
				acc[k] += v
			}
		}
		for k := range acc {
			acc[k] /= n
		}
		st.Acc = acc
		out = append(out, st)
	}
	return out
}
