package main

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/draftscope/draftscope/cmd/demo"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/safetensors/safetensorstest"
	"github.com/draftscope/draftscope/schemas"
)

// tinyCapture is the fixture "tiny" of the list of faults: states 1 to 4 of
// width 8, whose value at row p, slot l, column j is ((131p + 17l + 7j) mod 251
// − 125)/64.
type tinyCapture struct {
	ids      []int64
	rows     []int // which rows of states are there
	mask     []int64
	attended []int64
	change   map[[3]int]float32 // by place in rows, slot, column
}

func newTiny(n int) *tinyCapture {
	c := &tinyCapture{change: map[[3]int]float32{}}
	for p := range n {
		c.ids, c.rows = append(c.ids, int64(p%31)), append(c.rows, p)
		bit := int64(0)
		if p >= 7 && p <= 10 || p >= 14 && p <= 17 {
			bit = 1
		}
		c.mask = append(c.mask, bit)
	}
	return c
}

const tinySlots, tinyHidden = 4, 8

func (c *tinyCapture) value(at, l, j int) float32 {
	if v, ok := c.change[[3]int{at, l, j}]; ok {
		return v
	}
	return float32((131*c.rows[at]+17*l+7*j)%251-125) / 64
}

func whole(name string, vals []int64) safetensorstest.Tensor {
	x := safetensorstest.Tensor{Name: name, DType: "I64", Shape: []int{len(vals)}}
	for _, v := range vals {
		x.Data = binary.LittleEndian.AppendUint64(x.Data, uint64(v))
	}
	return x
}

func (c *tinyCapture) beside(ids string) []safetensorstest.Tensor {
	list := []safetensorstest.Tensor{whole(ids, c.ids)}
	if c.attended != nil {
		list = append(list, whole("attention_mask", c.attended))
	}
	return list
}

// named is the capture as a file of named states.
func (c *tinyCapture) named() []byte {
	list := append(c.beside("input_ids"), whole("loss_mask", c.mask))
	for l := range tinySlots {
		var vals []float32
		for at := range c.rows {
			for j := range tinyHidden {
				vals = append(vals, c.value(at, l, j))
			}
		}
		list = append(list, safetensorstest.F32(fmt.Sprintf("hidden_states.%d", l+1), vals, len(c.rows), tinyHidden))
	}
	return safetensorstest.File(list...)
}

// request is the capture as vLLM stores it.
func (c *tinyCapture) request() []byte {
	var vals []float32
	for at := range c.rows {
		for l := range tinySlots {
			for j := range tinyHidden {
				vals = append(vals, c.value(at, l, j))
			}
		}
	}
	return safetensorstest.File(append(c.beside("token_ids"), safetensorstest.F32("hidden_states", vals, len(c.rows), tinySlots, tinyHidden))...)
}

func writeTo(t *testing.T, path string, b []byte) string {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// importTiny imports captures as a run beside a sound one.
func importTiny(t *testing.T, code int, captures map[string]*tinyCapture, more ...string) (ds, out string) {
	t.Helper()
	dir := t.TempDir()
	writeTo(t, filepath.Join(dir, "a.safetensors"), newTiny(18).request())
	for name, c := range captures {
		writeTo(t, filepath.Join(dir, name+".safetensors"), c.request())
	}
	ds = filepath.Join(dir, "ds")
	out, errs := mustRun(t, code, append([]string{"import", "--format", "vllm", "--states", "1,2,3,4", "--layers", "4", "--out", ds, dir}, more...)...)
	return ds, out + errs
}

func sql(t *testing.T, ds, ask string) string {
	t.Helper()
	got, _ := mustRun(t, exitOK, "query", "--dataset", ds, "--format", "csv", ask)
	_, rows, _ := strings.Cut(got, "\n")
	return strings.TrimSpace(rows)
}

// B1, B3: validate names the fault, import sets the sample aside and stores the
// others as if it were not there.
func TestSamplesThatMustBeRefusedAre(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	sound, _ := importTiny(t, exitOK, nil)
	const rows = "SELECT pos, state, norm, vec FROM states WHERE seq_id = 'a' ORDER BY ALL"
	alone := sql(t, sound, rows)
	for _, tt := range []struct {
		name            string
		n               int
		spoil           func(c *tinyCapture)
		validate, table string
	}{
		{
			"B1 NaN at row 2, slot 1, column 3", 18, func(c *tinyCapture) { c.change[[3]int{2, 1, 3}] = nan },
			"row 2, state 2, K1: NaN count 1, Inf count 0", "K1,\"%row 2, state 2: 1 NaN, 0 Inf",
		},
		{
			"B1 +Inf at row 300 of 512", 512, func(c *tinyCapture) { c.change[[3]int{300, 0, 0}] = inf },
			"row 300, state 1, K1: NaN count 0, Inf count 1", "K1,\"%row 300, state 1: 0 NaN, 1 Inf",
		},
		{
			"B1 −Inf in prompt row 1", 18, func(c *tinyCapture) { c.change[[3]int{1, 2, 0}] = -inf },
			"row 1, state 3, K1: NaN count 0, Inf count 1", "K1,\"%row 1, state 3: 0 NaN, 1 Inf",
		},
		{
			"B3 34 tokens, 33 rows", 34, func(c *tinyCapture) { c.rows = c.rows[:33] },
			"K3: 33 rows for 34 tokens: last row missing", "K3,%33 rows for 34 tokens: last row missing",
		},
		{
			"B3 18 tokens, rows 7–17", 18, func(c *tinyCapture) { c.rows = c.rows[7:] },
			"K3: 11 rows for 18 tokens: first 7 rows missing (prefix cache?)", "K3,%11 rows for 18 tokens: first 7 rows missing (prefix cache?)",
		},
		{"K2 a row of zeros", 18, func(c *tinyCapture) {
			for j := range tinyHidden {
				c.change[[3]int{9, 1, j}] = 0
			}
		}, "row 9, state 2, K2: 1 of 18 rows are zero", "K2,\"state 2, row 9: 1 of 18 rows are zero"},
		{"K2 a row twice", 18, func(c *tinyCapture) {
			for j := range tinyHidden {
				c.change[[3]int{9, 1, j}] = c.value(8, 1, j)
			}
		}, "row 9, state 2, K2: 1 of 18 rows equal", "K2,\"state 2, row 9: 1 of 18 rows equal"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newTiny(tt.n)
			tt.spoil(c)
			file := writeTo(t, filepath.Join(t.TempDir(), "b.safetensors"), c.named())
			if got, _ := mustRun(t, exitUsage, "validate", file); !strings.Contains(got, tt.validate) {
				t.Errorf("validate: no %q in %s", tt.validate, got)
			}
			ds, _ := importTiny(t, exitPartial, map[string]*tinyCapture{"b": c})
			got := sql(t, ds, `SELECT "check", detail FROM faults`)
			before, after, _ := strings.Cut(tt.table, "%")
			if !strings.HasPrefix(got, before) || !strings.Contains(got, after) {
				t.Errorf("import: %q in the table faults, want %q", got, tt.table)
			}
			// B1: what is stored is of the other sample, bit for bit, and finite.
			if sql(t, ds, rows) != alone {
				t.Error("the sound sample is stored otherwise than alone")
			}
			if got := sql(t, ds, "SELECT count(*), count(*) FILTER (isnan(norm) OR isinf(norm)) FROM states WHERE seq_id <> 'a'"); got != "0,0" {
				t.Errorf("of the faulty sample %s rows are stored, and not finite", got)
			}
		})
	}
}

func TestAMissingLastRowIsAllowedByName(t *testing.T) {
	c := newTiny(34)
	c.rows = c.rows[:33]
	prefix := newTiny(18)
	prefix.rows = prefix.rows[7:]
	ds, out := importTiny(t, exitPartial, map[string]*tinyCapture{"b": c, "c": prefix}, "--allow-missing-last")
	if !strings.Contains(out, "of 1 samples the last token was left out, which has no row (--allow-missing-last)") {
		t.Error(out)
	}
	if got := sql(t, ds, "SELECT seq_id, length FROM sequences ORDER BY ALL"); got != "a,18\nb,33" {
		t.Errorf("stored: %s", got)
	}
}

// B3: padding on either side leaves the bits of the text.
func TestPaddingChangesNoBit(t *testing.T) {
	pad := func(before, behind int) *tinyCapture {
		c := newTiny(18)
		c.ids = slices.Concat(make([]int64, before), c.ids, make([]int64, behind))
		c.mask = slices.Concat(make([]int64, before), c.mask, make([]int64, behind))
		c.attended = slices.Concat(make([]int64, before), slices.Repeat([]int64{1}, 18), make([]int64, behind))
		c.rows = slices.Concat(make([]int, before), c.rows, make([]int, behind))
		for at := range c.rows {
			if c.attended[at] == 0 { // whatever it holds is not read
				c.change[[3]int{at, 0, 0}] = float32(math.NaN())
			}
		}
		return c
	}
	ds, _ := importTiny(t, exitOK, map[string]*tinyCapture{"left": pad(2, 0), "right": pad(0, 2)})
	for _, ask := range []string{
		"SELECT pos, state, norm, vec FROM states WHERE seq_id = '%s' ORDER BY ALL",
		"SELECT pos, token_id FROM tokens WHERE seq_id = '%s' ORDER BY ALL",
	} {
		want := sql(t, ds, fmt.Sprintf(ask, "a"))
		for _, id := range []string{"left", "right"} {
			if got := sql(t, ds, fmt.Sprintf(ask, id)); got != want || len(want) < 50 {
				t.Errorf("%s: %.200s, want %.200s", id, got, want)
			}
		}
	}
	file := writeTo(t, filepath.Join(t.TempDir(), "b.safetensors"), pad(2, 2).named())
	mustRun(t, exitOK, "validate", file)
	hole := pad(0, 0)
	hole.attended = slices.Repeat([]int64{1}, 18)
	hole.attended[5] = 0
	importTiny(t, exitPartial, map[string]*tinyCapture{"b": hole})
}

// sequences runs given ids through the shipped target, a JSON object a line.
func givenRun(t *testing.T, code int, lines []string, more ...string) (ds, errs string) {
	t.Helper()
	dir := t.TempDir()
	file := writeTo(t, filepath.Join(dir, "s.jsonl"), []byte(strings.Join(lines, "\n")))
	ds = filepath.Join(dir, "ds")
	_, errs = mustRun(t, code, append([]string{"run", "--sequences", file, "--budgets", "8", "--out", ds}, more...)...)
	return ds, errs
}

// given is a line of 18 tokens.
func given(id string, mask []int, more string) string {
	ids := make([]string, 18)
	bits := make([]string, 18)
	for i := range ids {
		ids[i], bits[i] = strconv.Itoa(100+7*i), "0"
	}
	for _, t := range mask {
		bits[t] = "1"
	}
	return fmt.Sprintf(`{"id": %q, "input_ids": [%s], "loss_mask": [%s]%s}`, id, strings.Join(ids, ","), strings.Join(bits, ","), more)
}

// B4: masks that leave nothing or little.
func TestEdgeMasksAreCountedAsTheyAre(t *testing.T) {
	reply := []int{7, 8, 9, 10, 14, 15, 16, 17}
	ds, errs := givenRun(t, exitOK, []string{
		given("full", reply, ""), given("none", nil, ""), given("first", []int{0}, ""), given("one", []int{9}, ""), given("two", []int{8, 9}, ""),
	})
	if !strings.Contains(errs, "unsupervised, and counted nowhere: none, first (2 of 5 sequences)") {
		t.Error(errs)
	}
	if got := sql(t, ds, "SELECT seq_id, count(hit), count(ce) FROM slots WHERE drafter = 'good' AND seq_id IN ('none', 'first') GROUP BY ALL"); got != "" {
		t.Errorf("unsupervised sequences are scored: %s", got)
	}
	// The anchor of two supervised tokens is the first of them: one label, and
	// the slots behind it are unscored, not missed.
	if got := sql(t, ds, "SELECT anchor, slot, hit IS NULL FROM slots WHERE drafter = 'good' AND seq_id = 'two' AND slot <= 3 ORDER BY ALL"); got != "8,1,false\n8,2,true\n8,3,true" {
		t.Errorf("a run of two: %s", got)
	}
	if got := sql(t, ds, "SELECT count(*), bool_and(capped = (lead_hits = 1)), bool_and(scored = 1) FROM blocks WHERE seq_id = 'two'"); got != "3,true,true" {
		t.Errorf("blocks whose run of hits ends with the scoring, or with a miss: %s", got)
	}
	for _, lines := range [][]string{{given("none", nil, "")}, {given("none", nil, ""), given("first", []int{0}, "")}} {
		if _, errs := givenRun(t, exitUsage, lines); !strings.Contains(errs, "there is nothing to score") {
			t.Errorf("a set of nothing else: %s", errs)
		}
	}
	if _, errs := givenRun(t, exitUsage, []string{strings.Replace(given("bad", reply, ""), "1]", "2]", 1)}); !strings.Contains(errs, "loss_mask[17] is 2; use 0 or 1") {
		t.Error(errs)
	}
	all := make([]int, 18)
	for i := range all {
		all[i] = i
	}
	ds, _ = givenRun(t, exitOK, []string{given("all", all, "")})
	if got, _ := mustRun(t, exitOK, "validate", ds); !strings.Contains(got, "K9 (warning): every token is supervised") {
		t.Error(got)
	}
	mustRun(t, exitUsage, "validate", ds, "--strict")
	c := newTiny(18)
	c.mask[8] = 2
	if got, _ := mustRun(t, exitUsage, "validate", writeTo(t, filepath.Join(t.TempDir(), "c.safetensors"), c.named())); !strings.Contains(got, "loss_mask, row 8, K9: it is 2; use 0 or 1") {
		t.Error(got)
	}
}

// B3, B5: padding that a run is given, and the last turn alone.
func TestGivenSequencesAreCutByNameOnly(t *testing.T) {
	reply := []int{7, 8, 9, 10, 14, 15, 16, 17}
	scores := "SELECT anchor, slot, label, draft_token, hit, ce, draft_logprob FROM slots WHERE drafter = 'good' AND seq_id = '%s' ORDER BY ALL"
	padded := strings.NewReplacer(`"pad"`, `"pad"`, `"input_ids": [`, `"input_ids": [5,5,`, `"loss_mask": [`, `"attention_mask": [0,0`+strings.Repeat(",1", 18)+`], "loss_mask": [0,0,`).Replace(given("pad", reply, ""))
	behind := given("behind", reply, `, "attention_mask": [`+strings.Repeat("1,", 18)+`0,0]`)
	behind = strings.Replace(strings.Replace(behind, `], "loss_mask"`, `,5,5], "loss_mask"`, 1), `], "attention_mask"`, `,0,0], "attention_mask"`, 1)
	ds, _ := givenRun(t, exitOK, []string{given("plain", reply, ""), padded, behind})
	want := sql(t, ds, fmt.Sprintf(scores, "plain"))
	for _, id := range []string{"pad", "behind"} {
		if got := sql(t, ds, fmt.Sprintf(scores, id)); got != want || len(want) < 50 {
			t.Errorf("%s: %.200s, want %.200s", id, got, want)
		}
	}
	count := "SELECT count(*) FILTER (loss_mask) FROM tokens WHERE seq_id = 'plain'"
	if got := sql(t, ds, count); got != "8" {
		t.Errorf("%s labels", got)
	}
	ds, _ = givenRun(t, exitOK, []string{given("plain", reply, "")}, "--last-turn")
	if got := sql(t, ds, count); got != "4" {
		t.Errorf("%s labels of the last turn", got)
	}
}

// B5: a mask that is moved is named by the tokens on its wrong side.
func TestAMovedMaskIsAWarningThatNamesTokens(t *testing.T) {
	dir := t.TempDir()
	ds := filepath.Join(dir, "ds")
	mustRun(t, exitOK, "capture", "--limit", "2", "--max-new", "40", "--out", ds)
	_, seqs := capturedIn(t, ds)
	moved := func(by int) string {
		var lines []string
		for _, q := range seqs {
			ids, bits := make([]string, len(q.Tokens)), make([]string, len(q.Tokens))
			for i, tok := range q.Tokens {
				ids[i], bits[i] = strconv.Itoa(int(tok.TokenID)), "0"
				if at := i - by; at >= 0 && at < len(q.Tokens) && q.Tokens[at].LossMask {
					bits[i] = "1"
				}
			}
			lines = append(lines, fmt.Sprintf(`{"id": %q, "input_ids": [%s], "loss_mask": [%s]}`, q.ID, strings.Join(ids, ","), strings.Join(bits, ",")))
		}
		name := filepath.Join(dir, fmt.Sprint("by", by))
		mustRun(t, exitOK, "capture", "--sequences", writeTo(t, name+".jsonl", []byte(strings.Join(lines, "\n"))), "--out", name)
		return name
	}
	begin := slices.IndexFunc(seqs[0].Tokens, func(t schemas.Token) bool { return t.LossMask })
	for _, tt := range []struct {
		by   int
		want string
	}{
		{0, ""},
		{-1, fmt.Sprintf("sample %s, row %d, state -1", seqs[0].ID, begin-1)},
		{1, fmt.Sprintf("sample %s, row %d, state -1", seqs[0].ID, begin)},
	} {
		got, _ := mustRun(t, exitOK, "validate", moved(tt.by), "--target", "demo")
		want := strings.TrimSuffix(tt.want, ", state -1")
		if strings.Contains(got, "K9 (warning)") != (want != "") || !strings.Contains(got, want) {
			t.Errorf("moved by %d: no %q in %s", tt.by, want, got)
		}
		code := exitOK
		if want != "" {
			code = exitUsage
		}
		mustRun(t, code, "validate", filepath.Join(dir, fmt.Sprint("by", tt.by)), "--target", "demo", "--strict")
	}
	if got, _ := mustRun(t, exitOK, "validate", filepath.Join(dir, "by-1"), "--target", "demo"); !strings.Contains(got, "of a header is inside the loss mask") {
		t.Error(got)
	}
	if got, _ := mustRun(t, exitOK, "validate", filepath.Join(dir, "by1"), "--target", "demo"); !strings.Contains(got, "that begins a reply is outside the loss mask") {
		t.Error(got)
	}
}

// B8: labels that the draft vocabulary lacks are misses, counted apart, and the
// ceiling stands beside the acceptance.
func TestAReducedVocabularyHasACeiling(t *testing.T) {
	dir := t.TempDir()
	drafter := filepath.Join(dir, "half")
	if err := os.CopyFS(filepath.Join(dir, "demo"), unpackedNames{demo.FS()}); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "demo", "drafters", "good"), drafter); err != nil {
		t.Fatal(err)
	}
	const vocab = 4096
	d2t := make([]int64, vocab/2) // draft token d stands for 2d
	for d := range d2t {
		d2t[d] = int64(d)
	}
	weights, err := safetensors.Open(os.DirFS(drafter), ".")
	if err != nil {
		t.Fatal(err)
	}
	list := []safetensorstest.Tensor{whole("d2t", d2t)}
	for _, name := range weights.Names() {
		info, _ := weights.Info(name)
		raw, err := weights.Raw(name)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, safetensorstest.Tensor{Name: name, DType: string(info.DType), Shape: info.Shape, Data: slices.Clone(raw)})
	}
	if err := weights.Close(); err != nil {
		t.Fatal(err)
	}
	writeTo(t, filepath.Join(drafter, "model.safetensors"), safetensorstest.File(list...))
	writeTo(t, filepath.Join(drafter, "config.json"), []byte(`{"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
		"block_size": 16, "mask_token_id": 3, "aux_hidden_state_layer_ids": [2, 4, 5, 6], "draft_vocab_size": 2048, "target_hidden_size": 256,
		"transformer_layer_config": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2,
		"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}}}`))
	ds := filepath.Join(dir, "ds")
	out, _ := mustRun(t, exitOK, "run", "--drafter", "half="+drafter, "--limit", "3", "--max-new", "24", "--budgets", "8", "--out", ds)
	odd := sql(t, ds, "SELECT count(*) FILTER (label % 2 = 1) || ' of ' || count(*) || ' labels' FROM slots WHERE hit IS NOT NULL")
	if !strings.Contains(strings.Join(strings.Fields(out), " "), "the draft vocabulary of half lacks "+odd+", so that at most ") {
		t.Errorf("%s are odd; the report: %s", odd, out)
	}
	if got := sql(t, ds, "SELECT count(*) FROM slots WHERE hit AND label % 2 = 1"); got != "0" {
		t.Errorf("%s hits of what cannot be drafted", got)
	}
	mustRun(t, exitOK, "validate", drafter, "--target", "demo")
}

// B9: bf16 codes that were tagged F16 are finite, and of another size.
func TestCodesOfAnotherDtypeAreOfAnotherSize(t *testing.T) {
	dir := t.TempDir()
	clean := filepath.Join(dir, "clean")
	mustRun(t, exitOK, "capture", "--limit", "3", "--max-new", "24", "--states", "2,5,8", "--dtype", "bf16", "--out", clean)
	misread := func(v float32) float32 {
		bits := uint16(math.Float32bits(v) >> 16)
		out := math.Ldexp(float64(bits&0x3ff|0x400), int(bits>>10&0x1f)-25)
		if bits&0x8000 != 0 {
			out = -out
		}
		return float32(out)
	}
	for v, want := range map[float32]float32{0.1621: 1.536, 188: 3.617, 436: 3.926} {
		if got := misread(v); math.Abs(float64(got-want)) > 0.001 {
			t.Fatalf("bf16 %v reads %v as f16, want %v", v, got, want)
		}
	}
	url := plainServer(t)
	plant(t, url, clean, func(q *plantedSequence) {
		if q.ID != "p0001" {
			return
		}
		for _, vals := range q.States {
			for i, v := range vals {
				vals[i] = misread(v)
			}
		}
	})
	got, _ := mustRun(t, exitPartial, "validate", "--nats", url)
	for _, want := range []string{"sample p0001, state 2, K7: rows of RMS ", "a ratio of"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in %s", want, got)
		}
	}
	if strings.Contains(got, "K1") || strings.Contains(got, "p0000") || strings.Contains(got, "p0002") {
		t.Error(got)
	}
	ds := filepath.Join(dir, "ds")
	mustRun(t, exitPartial, storing(url, ds, "--once")...)
	if got := sql(t, ds, `SELECT DISTINCT seq_id, "check" FROM faults`); got != "p0001,K7" {
		t.Errorf("set aside: %s", got)
	}
	if got := sql(t, ds, "SELECT count(*) FROM sequences"); got != "2" {
		t.Errorf("%s stored", got)
	}
	// Another target under the same name is not pooled.
	if _, errs := mustRun(t, exitUsage, "capture", "--limit", "3", "--max-new", "24", "--states", "2,5,8", "--dtype", "f32", "--out", clean); !strings.Contains(errs, "dtype was bf16 and is now f32") {
		t.Error(errs)
	}
}

// B9: 8-bit states are taken with a scale a token, whose largest error is
// printed, and refused without.
func TestStatesInEightBitsAreTakenWithTheirScale(t *testing.T) {
	codes := make([]byte, 18*tinySlots*tinyHidden)
	for i := range codes {
		codes[i] = byte(0x20 + i*7%64)
	}
	states := safetensorstest.Tensor{Name: "hidden_states", DType: "F8_E4M3", Shape: []int{18, tinySlots, tinyHidden}, Data: codes}
	ids := whole("token_ids", newTiny(18).ids)
	for name, tt := range map[string]struct {
		scale []float32
		want  string
	}{
		"a scale a token":     {slices.Repeat([]float32{2}, 18), ""},
		"no scale":            {nil, "F8_E4M3 without hidden_states_scale"},
		"a scale of zero":     {append(make([]float32, 1), slices.Repeat([]float32{2}, 17)...), "hidden_states_scale[0] is 0"},
		"a scale of a tensor": {[]float32{2}, "hidden_states_scale has shape [1]; want a scale a token, [18]"},
	} {
		t.Run(name, func(t *testing.T) {
			list := []safetensorstest.Tensor{states, ids}
			if tt.scale != nil {
				list = append(list, safetensorstest.F32("hidden_states_scale", tt.scale, len(tt.scale)))
			}
			dir := t.TempDir()
			file := writeTo(t, filepath.Join(dir, "b.safetensors"), safetensorstest.File(list...))
			args := []string{"import", "--format", "vllm", "--states", "1,2,3,4", "--layers", "4", "--out", filepath.Join(dir, "ds"), dir}
			if tt.want == "" {
				mustRun(t, exitOK, "validate", file)
				if out, _ := mustRun(t, exitOK, args...); !strings.Contains(out, "states were in 8 bits: a value differs from what was rounded by up to ") {
					t.Error(out)
				}
				return
			}
			if got, _ := mustRun(t, exitUsage, "validate", file); !strings.Contains(got, "K8: ") || !strings.Contains(got, tt.want) {
				t.Errorf("validate: %s", got)
			}
			if _, errs := mustRun(t, exitUsage, args...); !strings.Contains(errs, tt.want) {
				t.Errorf("import: %s", errs)
			}
		})
	}
}

// B11: damaged files end in bounded time, are named, and leave the others.
func TestDamagedFilesAreNamedAndOthersRead(t *testing.T) {
	sound := newTiny(18).request()
	header := int(binary.LittleEndian.Uint64(sound)) + 8
	edit := func(old, other string) []byte {
		if len(old) != len(other) || !strings.Contains(string(sound), old) {
			t.Fatalf("%q is not in the header", old)
		}
		return []byte(strings.Replace(string(sound), old, other, 1))
	}
	ids := fmt.Sprintf(`"data_offsets":[0,%d]`, 8*18)
	for name, raw := range map[string][]byte{
		"a header of 2^40 bytes": append(binary.LittleEndian.AppendUint64(nil, 1<<40), sound[8:]...),
		"a header cut":           sound[:header/2],
		"a byte short":           sound[:len(sound)-1],
		"four bytes more":        append(slices.Clone(sound), 0, 0, 0, 0),
		"overlapping":            edit(ids, strings.Replace(ids, "144", "152", 1)),
		"another shape":          edit(`"shape":[18]`, `"shape":[17]`),
		"nothing":                {},
		"eight bytes":            sound[:8],
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			writeTo(t, filepath.Join(dir, "bad.safetensors"), raw)
			file := writeTo(t, filepath.Join(t.TempDir(), "bad.safetensors"), raw)
			begun := time.Now()
			if got, _ := mustRun(t, exitUsage, "validate", file); !strings.Contains(got, "bad.safetensors, K21: ") {
				t.Errorf("validate: %s", got)
			}
			if took := time.Since(begun); took > time.Second {
				t.Errorf("it took %s", took)
			}
			writeTo(t, filepath.Join(dir, "a.safetensors"), sound)
			if got, _ := mustRun(t, exitPartial, "validate", dir); !strings.Contains(got, "bad.safetensors, K21") || strings.Contains(got, "a.safetensors") {
				t.Errorf("validate of the folder: %s", got)
			}
			ds := filepath.Join(dir, "ds")
			mustRun(t, exitPartial, "import", "--format", "vllm", "--states", "1,2,3,4", "--layers", "4", "--out", ds, dir)
			if got := sql(t, ds, `SELECT seq_id, "check" FROM faults UNION ALL SELECT seq_id, '' FROM sequences ORDER BY ALL`); got != `a,""`+"\nbad,K21" && got != "a,\nbad,K21" {
				t.Errorf("import: %s", got)
			}
		})
	}
}
