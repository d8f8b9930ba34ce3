package diagnose

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/cmd/demo/demotest"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/schemas"
)

// faultyCapture is a fault of a capture. keys are the findings that name it
// rightly; the first finding must be one of them.
type faultyCapture struct {
	name string
	keys []string
	from func(*testing.T, *studio, *Case)
	make func(*testing.T, *studio, *Case)
}

func plain(change func(*Case)) func(*testing.T, *studio, *Case) {
	return func(_ *testing.T, _ *studio, c *Case) { change(c) }
}

// rowsOf applies a change to rows of some states of some sequences.
func rowsOf(states []int, seqs func(i int) bool, change func(c *Case, n int, vals, clean []float32)) func(*Case) {
	return func(c *Case) {
		for i := range c.Sequences {
			if !seqs(i) {
				continue
			}
			q := &c.Sequences[i]
			for _, n := range states {
				out := slices.Clone(q.States[n])
				change(c, n, out, q.States[n])
				q.States[n] = out
			}
		}
	}
}

func every(int) bool     { return true }
func one(i int) bool     { return i == 2 }
func quarter(i int) bool { return i%4 == 1 }

var eight = []int{0, 1, 2, 3, 4, 5, 6, 7, 8}

// zeroRows zeroes a share of the rows from the beginning on.
func zeroRows(from, to float64) func(*Case, int, []float32, []float32) {
	return func(c *Case, _ int, vals, _ []float32) {
		rows := float64(len(vals) / c.Host.Hidden)
		clear(vals[int(from*rows)*c.Host.Hidden : int(to*rows)*c.Host.Hidden])
	}
}

func shifted(by int) func(*Case, int, []float32, []float32) {
	return func(c *Case, _ int, vals, clean []float32) { copy(vals, shiftRows(clean, c.Host.Hidden, by)) }
}

// normAs applies the final norm in some form, times over.
func normAs(gain float32, times int) func(*Case, int, []float32, []float32) {
	return func(c *Case, _ int, vals, _ []float32) {
		s := &study{Case: *c}
		s.Host.Gain = gain
		norm := s.finalNorm()
		for range times {
			for lo := 0; lo < len(vals); lo += c.Host.Hidden {
				norm(vals[lo:lo+c.Host.Hidden], vals[lo:lo+c.Host.Hidden])
			}
		}
	}
}

// toHalf gives the bits of the nearest half float, of a normal value.
func toHalf(v float32) uint16 {
	bits := math.Float32bits(v)
	e := int(bits>>23&255) - 127
	if e < -14 {
		return uint16(bits>>16&0x8000) | uint16(math.Round(math.Abs(float64(v))*math.Pow(2, 24)))
	}
	m := bits&0x7fffff + 0xfff + bits>>13&1
	return uint16(bits>>16&0x8000) | uint16(uint32(e+15)<<10+m>>13)
}

// otherTarget records the states of a target whose weights differ.
func otherTarget(share float64) func(*testing.T, *studio, *Case) {
	return func(t *testing.T, s *studio, c *Case) {
		m := s.changedTarget(t, gaussianShare(share, 9))
		study := &study{Case: *c}
		for i := range c.Sequences {
			q := &c.Sequences[i]
			states := s.run(t, m, idsOf(*q))
			for n := range q.States {
				q.States[n] = states[n]
			}
			answers, _, err := study.answers(states[c.Host.Layers], nil)
			if err != nil {
				t.Fatal(err)
			}
			for k := range q.Tokens {
				q.Tokens[k].TargetArgmax = &answers[k]
			}
		}
	}
}

// changedTarget is the target with other weights.
func (s *studio) changedTarget(t *testing.T, change weightChange) *target.Model {
	t.Helper()
	w, err := safetensors.Open(demotest.FS(t), "target")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/config.json", demotest.Read(t, "target/config.json"), 0o600); err != nil {
		t.Fatal(err)
	}
	writeTensors(t, dir+"/model.safetensors", w, change)
	m, err := target.Open(os.DirFS(dir), ".", s.dev)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// another context: what the target computes of a text that stands behind
// another one.
func behind(prefix []int32) func(*testing.T, *studio, *Case) {
	return func(t *testing.T, s *studio, c *Case) {
		for i := range c.Sequences {
			q := &c.Sequences[i]
			states := s.run(t, s.model, slices.Concat(prefix, idsOf(*q)))
			for n := range q.States {
				q.States[n] = states[n][len(prefix)*c.Host.Hidden:]
			}
		}
	}
}

// restarted records every turn as if it were a text of its own.
func restarted(t *testing.T, s *studio, c *Case) {
	for i := range c.Sequences {
		q := &c.Sequences[i]
		ids := idsOf(*q)
		for n := range q.States {
			q.States[n] = nil
		}
		for lo := 0; lo < len(ids); {
			hi := lo
			for hi < len(ids) && q.Tokens[hi].Turn == q.Tokens[lo].Turn {
				hi++
			}
			states := s.run(t, s.model, ids[lo:hi])
			for n := range q.States {
				q.States[n] = append(q.States[n], states[n]...)
			}
			lo = hi
		}
	}
}

var faultyCaptures = []faultyCapture{
	{"rows two late", []string{"capture-row"}, nil, plain(rowsOf(eight, every, shifted(2)))},
	{"rows two early", []string{"capture-row"}, nil, plain(rowsOf(eight, every, shifted(-2)))},
	{"rows three late", []string{"capture-row", "capture-target"}, nil, plain(rowsOf(eight, every, shifted(3)))},
	{"rows shifted in one sequence", []string{"capture-row"}, nil, plain(rowsOf(eight, one, shifted(1)))},
	{"rows shifted in a quarter", []string{"capture-row"}, nil, plain(rowsOf(eight, quarter, shifted(-1)))},
	{"rows of one state shifted", []string{"capture-row"}, nil, plain(rowsOf([]int{4}, every, shifted(1)))},
	{"rows of one state shifted, bf16 of another engine", []string{"capture-row"}, nil, plain(plants(rowsOf([]int{4}, every, shifted(1)), bf16States, foreign))},
	{"states 2 and 5 exchanged", []string{"capture-layer"}, nil, plain(func(c *Case) {
		states(c, func(n int, clean map[int][]float32) []float32 {
			return clean[map[int]int{2: 5, 5: 2}[n]+n*btoi(n != 2 && n != 5)]
		})
	})},
	{"states 2 and 5 exchanged in a quarter", []string{"capture-layer"}, nil, plain(func(c *Case) {
		for i := range c.Sequences {
			if q := &c.Sequences[i]; quarter(i) {
				q.States[2], q.States[5] = q.States[5], q.States[2]
			}
		}
	})},
	{"one state zero in its first third", []string{"capture-empty"}, nil, plain(rowsOf([]int{4}, every, zeroRows(0, 0.34)))},
	{"one state zero in its last tenth", []string{"capture-empty"}, nil, plain(rowsOf([]int{5}, every, zeroRows(0.9, 1)))},
	{"the final state zero in its last tenth, another engine", []string{"capture-empty"}, nil, plain(plants(rowsOf([]int{8}, every, zeroRows(0.9, 1)), foreign))},
	{"one state zero in one sequence", []string{"capture-empty"}, nil, plain(rowsOf([]int{5}, one, zeroRows(0, 1)))},
	{"all states zero at first", []string{"capture-empty"}, nil, plain(rowsOf(eight, every, zeroRows(0, 0.2)))},
	{"final norm twice", []string{"capture-norm"}, nil, plain(rowsOf([]int{8}, every, normAs(0, 2)))},
	{"final norm with 1+w", []string{"capture-norm"}, nil, plain(rowsOf([]int{8}, every, normAs(1, 1)))},
	{"final norm with 1+w, bf16 of another engine", []string{"capture-norm"}, nil, plain(plants(rowsOf([]int{8}, every, normAs(1, 1)), bf16States, foreign))},
	{"final norm on a tap", []string{"capture-layer", "capture-norm"}, nil, plain(rowsOf([]int{5}, every, normAs(0, 1)))},
	{"final norm in one sequence", []string{"capture-norm"}, nil, plain(rowsOf([]int{8}, one, normAs(0, 1)))},
	{"a factor of two", []string{"capture-values"}, nil, plain(rowsOf([]int{4}, every, func(_ *Case, _ int, v, _ []float32) {
		for i := range v {
			v[i] *= 2
		}
	}))},
	{"half bits read as bf16", []string{"capture-dtype"}, nil, plain(func(c *Case) {
		c.Capture.DType = schemas.BF16
		eachState(c, func(_ int, v []float32) {
			for i := range v {
				v[i] = math.Float32frombits(uint32(toHalf(v[i])) << 16)
			}
		})
	})},
	{"bf16 bits read as half", []string{"capture-dtype"}, nil, plain(func(c *Case) {
		c.Capture.Exact = false
		eachState(c, func(_ int, v []float32) {
			raw := schemas.BF16.AppendBytes(nil, v)
			for i := range v {
				v[i] = halfValue(uint16(raw[2*i]) | uint16(raw[2*i+1])<<8)
			}
		})
	})},
	{"another target, 10 %", []string{"capture-target"}, nil, otherTarget(0.1)},
	{"another target, 2 %", []string{"capture-target"}, nil, otherTarget(0.02)},
	{"another target, 50 %", []string{"capture-target"}, nil, otherTarget(0.5)},
	{"another target, 20 %, another engine", []string{"capture-target", "capture-labels"}, nil, func(t *testing.T, s *studio, c *Case) { otherTarget(0.2)(t, s, c); foreign(c); bf16States(c) }},
	{"a prefix that the ids lack", []string{"capture-target", "packing"}, nil, behind([]int32{1, 2898, 202, 274, 3261, 2264, 2, 202})},
	{"turns recorded apart", []string{"capture-target", "packing"}, talking("", 3, 6), restarted},
	{"turns recorded apart, another engine", []string{"capture-target", "packing"}, talking("", 3, 6), func(t *testing.T, s *studio, c *Case) { restarted(t, s, c); foreign(c); bf16States(c) }},
	{"Laplace noise on the taps", []string{"tap-noise"}, nil, plain(rowsOf([]int{2, 4, 5, 6}, every, func(_ *Case, n int, v, _ []float32) {
		rng := rand.New(rand.NewPCG(3, uint64(n)))
		for i := range v {
			v[i] += float32(0.03 * rng.ExpFloat64() * float64(1-2*rng.IntN(2)))
		}
	}))},
	{"uniform noise of 0.01", []string{"target-noise"}, nil, plain(rowsOf(eight, every, func(_ *Case, n int, v, _ []float32) {
		rng := rand.New(rand.NewPCG(4, uint64(n)))
		for i := range v {
			v[i] += float32(0.02*rng.Float64() - 0.01)
		}
	}))},
	{"uniform noise on bf16 states", []string{"target-noise"}, nil, plain(plants(rowsOf(eight, every, func(_ *Case, n int, v, _ []float32) {
		rng := rand.New(rand.NewPCG(4, uint64(n)))
		for i := range v {
			v[i] += float32(0.1*rng.Float64() - 0.05)
		}
	}), bf16States))},
	{"noise of a tenth of each value", []string{"target-noise", "capture-target"}, nil, plain(rowsOf(eight, every, func(_ *Case, n int, v, _ []float32) {
		rng := rand.New(rand.NewPCG(4, uint64(n)))
		for i := range v {
			v[i] *= float32(1 + 0.1*rng.NormFloat64())
		}
	}))},
	{"Gaussian noise in one sequence", []string{"target-noise"}, nil, plain(rowsOf(eight, one, func(_ *Case, n int, v, _ []float32) {
		rng := rand.New(rand.NewPCG(4, uint64(n)))
		for i := range v {
			v[i] += float32(0.05 * rng.NormFloat64())
		}
	}))},
	{"rows repeated", []string{"capture-empty", "capture-row"}, nil, plain(rowsOf([]int{4, 5}, every, func(c *Case, _ int, v, clean []float32) {
		h := c.Host.Hidden
		for t := 40; t < min(60, len(v)/h); t++ {
			copy(v[t*h:(t+1)*h], clean[39*h:40*h])
		}
	}))},
	{"channels permuted", []string{"capture-values"}, nil, plain(rowsOf([]int{4}, every, func(c *Case, _ int, v, clean []float32) {
		h := c.Host.Hidden
		for i := range v {
			v[i] = clean[i/h*h+(i%h+7)%h]
		}
	}))},
	{"values clipped at 1", []string{"capture-target", "capture-values"}, nil, plain(rowsOf([]int{4, 8}, every, func(_ *Case, _ int, v, _ []float32) {
		for i := range v {
			v[i] = max(-1, min(1, v[i]))
		}
	}))},
	{"answers three late", []string{"capture-labels"}, nil, plain(func(c *Case) { answersBy(c, 3) })},
	{"answers shifted in a quarter", []string{"capture-labels"}, nil, plain(func(c *Case) {
		for i := range c.Sequences {
			if quarter(i) {
				part := *c
				part.Sequences = c.Sequences[i : i+1]
				answersBy(&part, 1)
			}
		}
	})},
	{"one turn's mask off by one", []string{"mask-boundary"}, talking("", 3, 6), plain(func(c *Case) {
		q := &c.Sequences[1]
		for k := range q.Tokens[1:] {
			if q.Tokens[k].Turn == 3 && q.Tokens[k+1].LossMask && !q.Tokens[k].LossMask {
				q.Tokens[k].LossMask = true
				return
			}
		}
	})},
	{"one system prompt in the mask", []string{"mask-roles"}, talking("You write Go.", 2, 6), plain(func(c *Case) {
		for k := range c.Sequences[2].Tokens {
			if t := &c.Sequences[2].Tokens[k]; t.Role == "system" {
				t.LossMask = true
			}
		}
	})},
	{"the mask begins two late", []string{"mask-boundary"}, nil, plain(func(c *Case) { masks(c, func(q Sequence, t int) bool { return maskAt(q, t) && maskAt(q, t-2) }) })},
	{"the mask inverted", []string{"mask-roles", "mask-boundary"}, nil, plain(func(c *Case) { masks(c, func(q Sequence, t int) bool { return !maskAt(q, t) }) })},
	{"everything in the mask", []string{"mask-roles", "mask-boundary"}, nil, plain(func(c *Case) { masks(c, func(Sequence, int) bool { return true }) })},
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// A fault of a capture that no rule was made for is named rightly.
func TestHeldOutFaultsOfACaptureAreNamed(t *testing.T) {
	s := newStudio(t)
	for _, h := range faultyCaptures {
		t.Run(h.name, func(t *testing.T) {
			r := s.examine(t, "good", h.from, func(c *Case) { h.make(t, s, c) })
			f := r.Findings[0]
			said := "nothing"
			if f.alarm() {
				said = string(f.Verdict) + " " + f.Key
			}
			t.Logf("FAULT %s: %s: %s %s", h.name, said, f.Sentence, f.Measure)
			if !f.alarm() || !slices.Contains(h.keys, f.Key) {
				t.Errorf("WRONG %s: %s, want %v", h.name, said, h.keys)
			}
			for _, other := range r.Findings[1:] {
				if other.alarm() {
					t.Logf("  also %s %s: %s", other.Verdict, other.Key, strings.TrimSpace(other.Measure))
				}
			}
		})
	}
}

// writeTensors stores changed weights in single precision.
func writeTensors(t *testing.T, path string, w *safetensors.Checkpoint, change weightChange) {
	t.Helper()
	type entry struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets []int  `json:"data_offsets"`
	}
	header, body := map[string]entry{}, []byte(nil)
	for _, name := range w.Names() {
		vals, err := w.Float32s(name)
		if err != nil {
			t.Fatal(err)
		}
		shape, _ := w.Shape(name)
		at := len(body)
		body = schemas.F32.AppendBytes(body, change(name, slices.Clone(vals)))
		header[name] = entry{"F32", shape, []int{at, len(body)}}
	}
	head, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	out := append(binary.LittleEndian.AppendUint64(nil, uint64(len(head))), head...)
	if err := os.WriteFile(path, append(out, body...), 0o600); err != nil {
		t.Fatal(err)
	}
}

// faultyDrafter is a fault of a drafter, of its configuration, or of the
// engine that made its stored drafts. A finding of another key may not come
// first; none at all is a miss.
type faultyDrafter struct {
	name, from, key string
	make            func(*testing.T, *studio, *Case)
}

func baseOf(v float64) func(map[string]any) {
	return func(m map[string]any) {
		m["rope_theta"] = v
		m["rope_parameters"].(map[string]any)["rope_theta"] = v
	}
}

func tapIDs(ids ...int) func(map[string]any) {
	return func(m map[string]any) { m["dflash_config"].(map[string]any)["target_layer_ids"] = ids }
}

func maskID(id int) func(map[string]any) {
	return func(m map[string]any) { m["dflash_config"].(map[string]any)["mask_token_id"] = id }
}

// inLayer applies a change of weights to one layer.
func inLayer(layer string, change weightChange) weightChange {
	return func(name string, vals []float32) []float32 {
		if strings.HasPrefix(name, "layers."+layer+".") {
			return change(name, vals)
		}
		return vals
	}
}

// bringing are weights with an embedding or a head of their own.
type bringing struct {
	drafter.Weights
	tensors map[string][]float32
}

func (b bringing) Names() []string {
	out := slices.Clone(b.Weights.Names())
	for name := range b.tensors {
		out = append(out, name)
	}
	return out
}

func (b bringing) Shape(name string) ([]int, bool) {
	if vals := b.tensors[name]; vals != nil {
		return []int{len(vals) / fixtureWide, fixtureWide}, true
	}
	return b.Weights.Shape(name)
}

func (b bringing) Float32s(name string) ([]float32, error) {
	if vals := b.tensors[name]; vals != nil {
		return slices.Clone(vals), nil
	}
	return b.Weights.Float32s(name)
}

// brings adds the target's embedding under some names, changed.
func brings(change func([]float32), names ...string) func(*testing.T, *studio, *Case) {
	return func(t *testing.T, s *studio, c *Case) {
		vals := make([]float32, s.host.Vocab*s.host.Hidden)
		if err := s.dev.Download(vals, s.host.Embedding); err != nil {
			t.Fatal(err)
		}
		change(vals)
		b := bringing{c.Drafter.Weights, map[string][]float32{}}
		for _, name := range names {
			b.tensors[name] = vals
		}
		c.Drafter.Weights = b
	}
}

func noisyBy(share float64) func([]float32) {
	return func(vals []float32) { gaussianShare(share, 3)("fc.weight", vals) }
}

// drafted stores what another graph drafts.
func drafted(change func(*Graph)) func(*testing.T, *studio, *Case) {
	return func(t *testing.T, _ *studio, c *Case) { storeDrafts(t, c, c.Drafter, change) }
}

var faultyDrafters = []faultyDrafter{
	{"RoPE base 5e5", "good", "rope-base", configuring(baseOf(5e5))},
	{"RoPE base 3e4", "good", "rope-base", configuring(baseOf(3e4))},
	{"RoPE base 2e3, early", "early", "rope-base", configuring(baseOf(2e3))},
	{"three quarters of a head rotated", "good", "rope-fraction", configuring(func(m map[string]any) { m["partial_rotary_factor"] = 0.75 })},
	{"an eighth rotated, early", "early", "rope-fraction", configuring(func(m map[string]any) { m["partial_rotary_factor"] = 0.125 })},
	{"a window of 4", "good", "window", configuring(sliding(4, "sliding_attention", "sliding_attention"))},
	{"a window of 16 in layer 1", "good", "window", configuring(sliding(16, "full_attention", "sliding_attention"))},
	{"a window of 32, early", "early", "window", configuring(sliding(32, "sliding_attention", "sliding_attention"))},
	{"layer 0 causal", "good", "causality", configuring(func(m map[string]any) {
		m["layer_types"], m["sliding_window"], m["use_sliding_window"] = []string{"sliding_attention", "full_attention"}, 4096, true
	})},
	{"causal, early", "early", "causality", configuring(func(m map[string]any) { m["is_causal"] = true })},
	{"three taps rotated", "good", "tap-order", configuring(tapIDs(3, 4, 1, 5))},
	{"three other taps rotated", "good", "tap-order", configuring(tapIDs(1, 4, 5, 3))},
	{"four taps rotated", "good", "tap-order", configuring(tapIDs(3, 4, 5, 1))},
	{"taps reversed", "good", "tap-order", configuring(tapIDs(5, 4, 3, 1))},
	{"taps reversed, early", "early", "tap-order", configuring(tapIDs(5, 4, 3, 1))},
	{"layer ids two too high", "good", "state-number", configuring(tapIDs(3, 5, 6, 7))},
	{"one layer id wrong", "good", "tap-state", configuring(tapIDs(1, 3, 4, 6))},
	{"another layer id wrong", "good", "tap-state", configuring(tapIDs(0, 3, 4, 5))},
	{"mask token 7", "good", "mask-token", configuring(maskID(7))},
	{"mask token 0", "early", "mask-token", configuring(maskID(0))},
	{"the stop token for the mask", "good", "mask-token", configuring(maskID(2))},
	{"mask token 4095", "good", "mask-token", configuring(maskID(4095))},
	{"layer 0 tiled", "good", "gqa-order", editing(inLayer("0", tile))},
	{"layer 1 tiled", "good", "gqa-order", editing(inLayer("1", tile))},
	{"layer 0 tiled, early", "early", "gqa-order", editing(inLayer("0", tile))},
	{"layer 0 interleaved", "good", "rope-layout", editing(inLayer("0", interleave))},
	{"layer 1 interleaved", "good", "rope-layout", editing(inLayer("1", interleave))},
	{"an embedding of other weights", "good", "own-embedding", brings(noisyBy(1), "embed_tokens.weight")},
	{"a head of other weights", "good", "own-head", brings(noisyBy(0.5), "lm_head.weight")},
	{"embedding and head of other weights", "early", "own-head", brings(noisyBy(0.7), "embed_tokens.weight", "lm_head.weight")},
	{"drafts of a window of 4", "good", keyStored, drafted(func(g *Graph) { g.Attention[0].Window, g.Attention[1].Window = 4, 4 })},
	{"drafts of positions two too far", "good", keyStored, drafted(func(g *Graph) { g.Offset = 2 })},
	{"drafts of blocks of 8", "good", keyStored, drafted(func(g *Graph) { g.Block = 8 })},
	{"drafts of one layer tiled", "good", keyStored, drafted(func(g *Graph) { g.Tiled = 1 })},
	{"drafts of another version", "good", keyStored, func(t *testing.T, _ *studio, c *Case) {
		storeDrafts(t, c, Checkpoint{Name: "good", Config: c.Drafter.Config, Weights: edited{c.Drafter.Weights, gaussianShare(0.3, 8)}}, func(*Graph) {})
	}},
	{"shift with the taps reversed", "shift", keyShift, configuring(tapIDs(5, 4, 3, 1))},
	{"shift on long replies", "shift", keyShift, writing(24, 32, sampling{most: 300, endless: true})},
	{"shift on three sequences", "shift", keyShift, stored(90, 93)},
	{"shift with noise", "shift", keyShift, editing(gaussianShare(0.3, 8))},
	{"shift, half pruned", "shift", keyShift, editing(pruned(0.5))},
	{"shift in 4 bits", "shift", keyShift, editing(codes(4, 64))},
	{"shift on sampled text", "shift", keyShift, writing(24, 48, sampling{temperature: 1.5, most: 100})},
	{"shift on short replies", "shift", keyShift, writing(24, 64, sampling{most: 6, endless: true})},
	{"shortcut with noise", "shortcut", keyFinalTap, editing(gaussianShare(0.2, 8))},
	{"shortcut on prose", "shortcut", keyFinalTap, prose},
}
