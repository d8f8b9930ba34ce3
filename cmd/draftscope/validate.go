package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/cuda/gpu"
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/data/query"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/verify"
)

const validateHelp = `usage: draftscope validate PATH [--target DIR] [--strict] [--json]
       draftscope validate --nats URL [--run R] [--target DIR] [--strict] [--json]

Checks a dataset, a drafter's folder (finite weights, shapes and d2t as its
config.json says), a safetensors file of captured states, or a folder of such
files, and prints a line for each fault: file, sample, row, state, rule, value.
Nothing is repaired. With --target a drafter is also opened
for that target, tokens are held against its vocabulary, recorded answers
against its head on the recorded final state (K5), and the size of each state
against a few sequences that it runs again (K7).

With --nats it does the same to the messages of the runs on a server, up to what
their streams hold when it begins; readers and messages stay as they are.

Exit status: 0 no fault, 4 some samples or files are faulty and others are not,
2 nothing in PATH can be used, or nothing is in it. Warnings count as faults with --strict.

examples:
  draftscope validate draftscope-data
  draftscope validate ./drafters/v3 --target ./qwen
  draftscope validate capture.safetensors --json
  draftscope validate --nats nats://host:4222 --run r1
`

// The kinds of what validate prints that hold sequences.
const (
	kindDataset = "dataset"
	kindStream  = "stream"
)

// validation is what validate found.
type validation struct {
	Path     string         `json:"path"`
	Kind     string         `json:"kind"`
	Samples  int            `json:"samples"` // sequences, files or tensors that were checked
	Faulty   int            `json:"faulty"`
	Faults   int            `json:"faults"`
	Warnings int            `json:"warnings"`
	ByRule   map[string]int `json:"by_rule"`
	Lines    []verify.Fault `json:"lines"`

	bad   map[string]bool
	sound int             // sequences of a dataset whose capture has no fault
	idle  int             // sequences without a supervised label
	files map[string]bool // of a dataset, by path, that are damaged
}

func (v *validation) add(faults ...verify.Fault) {
	for _, f := range faults {
		v.Lines = append(v.Lines, f)
		v.ByRule[f.Rule]++
		if f.Warning {
			v.Warnings++
			continue
		}
		v.Faults++
		v.bad[f.File+"\x00"+f.Sample] = true
	}
	v.Faulty = len(v.bad)
}

func (v *validation) fault(file, rule, format string, a ...any) {
	v.add(verify.Fault{File: file, Row: -1, State: -1, Rule: rule, Value: fmt.Sprintf(format, a...)})
}

// damaged adds a file of a dataset that is not what was written, once: what
// looks at it later finds it damaged in other words.
func (v *validation) damaged(path string, reason string) {
	if !v.files[path] {
		v.files[path] = true
		v.fault(path, "K21", "%s", reason)
	}
}

// unusable says that there is nothing in PATH that can be used.
func (v *validation) unusable() bool {
	if v.ofSequences() {
		return v.sound == 0
	}
	return v.Faulty >= v.Samples
}

// ofSequences says that faults of files or messages are not faults of samples.
func (v *validation) ofSequences() bool { return v.Kind == kindDataset || v.Kind == kindStream }

func cmdValidate(ctx context.Context, args []string, out streams) error {
	var j jobFlags
	flags := newFlags("validate", validateHelp, out)
	flags.StringVar(&j.target, "target", "", "the target's model `DIR`")
	strict := flags.Bool("strict", false, "warnings are faults")
	asJSON := flags.Bool("json", false, "print JSON")
	flags.StringVar(&j.nats, "nats", "", "check what the JetStream server at `URL` holds")
	flags.StringVar(&j.run, "run", "", "with --nats, only the run of this `NAME`")
	j.backendFlags(flags)
	rest, err := parse(flags, args)
	if err != nil {
		return err
	}
	switch {
	case j.nats != "" && len(rest) > 0:
		return badUsage("--nats and PATH exclude each other: the one checks a server's streams, the other what lies at %s", rest[0])
	case j.nats != "":
		if err := needServer(j.nats); err != nil {
			return err
		}
	case j.run != "":
		return badUsage("--run goes with --nats")
	case len(rest) != 1:
		return badUsage("validate wants one PATH, or --nats URL, and got %d", len(rest))
	}
	if j.target == "" && (j.backend.value == "cuda" || j.precision.value != gpu.F32.String()) {
		return badUsage("--backend and --precision say what runs the target: give --target too, or leave them out")
	}
	v, err := validate(ctx, newJob(j, out), strings.Join(rest, ""))
	if err != nil {
		return err
	}
	if *strict {
		lines, warned := v.Lines, map[string]bool{}
		for i, f := range lines {
			if key := f.File + "\x00" + f.Sample; f.Warning && !v.bad[key] {
				warned[key] = true
			}
			lines[i].Warning = false
		}
		*v = validation{Path: v.Path, Kind: v.Kind, Samples: v.Samples, idle: v.idle, sound: max(0, v.sound-len(warned)), ByRule: map[string]int{}, bad: map[string]bool{}}
		v.add(lines...)
	}
	if v.Kind == "drafter" {
		v.Faulty = min(v.Faulty, v.Samples) // its tensors are one sample
	}
	if *asJSON {
		err = writeJSON(out.stdout, v)
	} else {
		err = v.write(out.stdout)
	}
	switch {
	case err != nil:
		return err
	case v.Faults == 0 && v.Samples == 0:
		return badUsage("%s is a %s that holds nothing to check: no sequence is stored", v.Path, v.Kind)
	case v.ofSequences() && v.idle == v.Samples:
		return badUsage("no label of the %d samples in %s is supervised: there is nothing to score", v.Samples, v.Path)
	case v.Faults == 0:
		return nil
	case v.unusable():
		return badUsage("nothing in %s can be used: %d faults", v.Path, v.Faults)
	}
	if v.ofSequences() {
		return exitError{exitPartial, fmt.Errorf("%s has %d faults; %d of %d samples that could be read are whole", v.Path, v.Faults, v.sound, v.Samples)}
	}
	return exitError{exitPartial, fmt.Errorf("%s has %d faults in %d of %d samples", v.Path, v.Faults, v.Faulty, v.Samples)}
}

// write prints a line a fault and the counts.
func (v *validation) write(w io.Writer) error {
	for _, f := range v.Lines {
		if _, err := fmt.Fprintln(w, f); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "%s: %s, %d samples checked, %d faulty, %d faults, %d warnings\n", v.Path, v.Kind, v.Samples, v.Faulty, v.Faults, v.Warnings)
	return err
}

func validate(ctx context.Context, j *job, path string) (v *validation, err error) {
	info, err := os.Stat(path)
	if err != nil && j.nats == "" {
		return nil, badUsage("there is no %s", path)
	}
	defer func() { err = errors.Join(err, j.opened.Close()) }()
	if j.target != "" {
		if err := j.openTarget(j.target); err != nil {
			return nil, err
		}
	}
	v = &validation{Path: path, ByRule: map[string]int{}, Lines: []verify.Fault{}, bad: map[string]bool{}, files: map[string]bool{}}
	if j.nats != "" {
		v.Path, v.Kind = j.nats, kindStream
		return v, j.validateServer(ctx, v)
	}
	has := func(name string) bool {
		_, err := os.Stat(filepath.Join(path, name))
		return err == nil
	}
	switch {
	case info.IsDir() && has("dataset.json"):
		v.Kind = kindDataset
		return v, j.validateDataset(ctx, v, path)
	case info.IsDir() && has("config.json"):
		v.Kind = "drafter"
		j.validateDrafter(v, path)
		return v, nil
	case !info.IsDir() && strings.HasSuffix(path, ".safetensors"):
		v.Kind = "capture in a safetensors file"
		return v, j.validateTensors(ctx, v, path)
	case !info.IsDir() && strings.HasSuffix(path, ".parquet"):
		v.Kind, v.Samples = "Parquet file", 1
		if _, err := data.Describe(path); err != nil {
			v.fault(path, "K21", "%v", err)
		}
		return v, nil
	}
	files, err := filepath.Glob(filepath.Join(path, "*.safetensors"))
	if err != nil || len(files) == 0 {
		return nil, badUsage("%s is no dataset (dataset.json), drafter (config.json), safetensors or Parquet file, nor a folder of safetensors files", path)
	}
	v.Kind = "captures in safetensors files"
	slices.Sort(files)
	for _, f := range files {
		if err := j.validateTensors(ctx, v, f); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// validateDataset checks files, sequences, and what drafters made of them.
func (j *job) validateDataset(ctx context.Context, v *validation, path string) (err error) {
	about, err := data.Describe(path)
	if err != nil {
		return dataError(err)
	}
	for _, d := range about.Damaged {
		v.damaged(d.Path, d.Reason)
	}
	ds, err := data.Open(path)
	if err != nil {
		return dataError(err)
	}
	defer func() { err = errors.Join(err, ds.Close()) }()
	for _, r := range ds.Runs() {
		if err := j.validateRun(ctx, v, ds, r); err != nil {
			return err
		}
		if err := ds.CheckResults(ctx, r.Name, func(path string, err error) { v.damaged(path, err.Error()) }); err != nil {
			return dataError(err)
		}
	}
	return j.validateResults(ctx, v, path)
}

func (j *job) validateRun(ctx context.Context, v *validation, ds *data.Dataset, r data.Run) (err error) {
	source, err := ds.Replay(r.Name, data.ReplayConfig{Damaged: func(path string, err error) { v.damaged(path, err.Error()) }})
	if err != nil {
		return dataError(err)
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	checks := j.checksOf(v, r, "run "+r.Name)
	open := checks.begin("")
	for {
		id, rec, last, err := source.Next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return dataError(err)
		}
		open.ID = id
		err = open.take(rec)
		rec.Release()
		if err != nil {
			return fmt.Errorf("reading sequence %s: %w", id, err)
		}
		if !last {
			continue
		}
		if err := checks.end(ctx, open); err != nil {
			return err
		}
		open = checks.begin("")
	}
}

// What is wrong with rows of a result.
const (
	unmaskedScored = "slots are scored though their own token carries no loss mask"
	maskedUnscored = "slots are not scored though their own token carries loss mask and label"
	wrongHit       = "hits differ from draft_token = label"
	otherText      = "data tokens differ from the sequence"
	wrongLength    = "rounds whose accept_len is not accepted + 1, or that accepted more than was proposed"
)

// resultChecks are what no row of a result may be, in SQL. Each gives the
// sequence, the anchor, and what is wrong.
var resultChecks = []struct{ rule, where, sql string }{
	{"", "set aside", `SELECT run || ' faults', seq_id, -1, "check" || ': ' || detail FROM faults ORDER BY ALL`},
	{"K10", "scored without a mask", `SELECT run || ' ' || drafter, seq_id, min(anchor), count(*) || ' ` + unmaskedScored + `' FROM slots WHERE hit IS NOT NULL AND loss_mask IS DISTINCT FROM true GROUP BY ALL ORDER BY ALL`},
	{"K10", "unscored with a mask", `SELECT run || ' ' || drafter, seq_id, min(anchor), count(*) || ' ` + maskedUnscored + `' FROM slots WHERE hit IS NULL AND loss_mask AND label IS NOT NULL GROUP BY ALL ORDER BY ALL`},
	{"K19", "a wrong hit", `SELECT run || ' ' || drafter, seq_id, min(anchor), count(*) || ' ` + wrongHit + `' FROM slots WHERE hit IS NOT NULL AND hit <> (draft_token = label) GROUP BY ALL ORDER BY ALL`},
	{"K4", "another text", `SELECT s.run || ' ' || s.drafter, s.seq_id, min(s.anchor), count(*) || ' ` + otherText + `' FROM slots s JOIN tokens t ON t.run = s.run AND t.seq_id = s.seq_id AND t.pos = s.anchor + s.slot WHERE s.data_token <> t.token_id GROUP BY ALL ORDER BY ALL`},
	{"K19", "a wrong length", `SELECT run || ' ' || drafter, seq_id, min(anchor), count(*) || ' ` + wrongLength + `' FROM rounds WHERE accept_len <> accepted + 1 OR accepted > proposed OR accepted < 0 GROUP BY ALL ORDER BY ALL`},
}

func (j *job) validateResults(ctx context.Context, v *validation, path string) error {
	db, err := openQuietly(ctx, path)
	if errors.Is(err, query.ErrNoDuckDB) {
		j.say("results are not checked: %v", err)
		return nil
	}
	if err != nil {
		return err
	}
	defer db.Close()
	// DuckDB reads footers with other eyes.
	for _, w := range db.Warnings() {
		v.damaged(filepath.Join(path, filepath.FromSlash(w.File)), w.Reason)
	}
	for _, c := range resultChecks {
		rows, err := db.Query(ctx, c.sql)
		if err != nil {
			return fmt.Errorf("checking %s: %w", c.where, err)
		}
		all, err := rows.All()
		if err != nil {
			return fmt.Errorf("checking %s: %w", c.where, err)
		}
		for _, row := range all {
			f := verify.Fault{File: fmt.Sprintf("run %v", row[0]), Sample: fmt.Sprint(row[1]), Row: -1, State: -1, Rule: c.rule, Value: fmt.Sprint(row[3])}
			if anchor, ok := row[2].(int64); ok {
				f.Row = int(anchor)
			}
			if c.rule == "" { // a fault of the table faults names its own rule
				f.Rule, f.Value, _ = strings.Cut(f.Value, ": ")
				v.Samples++
			}
			v.add(f)
		}
	}
	return nil
}

// validateDrafter checks a drafter's folder.
func (j *job) validateDrafter(v *validation, path string) {
	v.Samples = 1
	raw, err := os.ReadFile(filepath.Join(path, "config.json"))
	if err != nil {
		v.fault(path, "K21", "%v", err)
		return
	}
	w, err := safetensors.Open(os.DirFS(path), ".")
	if err != nil {
		v.fault(path, "K21", "%v", err)
		return
	}
	defer w.Close()
	before := v.Faults
	finiteTensors(v, path, w)
	layout, err := drafter.CheckLayout(raw, w)
	if err != nil {
		v.fault(filepath.Join(path, "config.json"), ruleOf(err), "%v", err)
		return
	}
	misshapenMap := false
	for _, f := range layout.Faults {
		v.add(verify.Fault{File: fileOf(path, w, f.Tensor), Sample: f.Tensor, Row: -1, State: -1, Rule: "K6", Value: f.String()})
		misshapenMap = misshapenMap || f.Tensor == "d2t"
	}
	if j.model != nil {
		layout.Vocab = j.model.Config().Vocab
	}
	if !misshapenMap {
		vocabMap(v, path, w, layout)
	}
	if v.Faults > before || j.model == nil {
		return
	}
	d, err := drafter.Open(filepath.Base(path), raw, w, hostOf(j.model), j.dev)
	if err != nil {
		v.fault(path, ruleOf(err), "%v", err)
		return
	}
	d.Close()
}

// fileOf is the file of a drafter's folder that holds a tensor, by its name
// with or without the prefix; the folder where none does.
func fileOf(path string, w *safetensors.Checkpoint, tensor string) string {
	for _, name := range []string{tensor, "model." + tensor} {
		if info, ok := w.Info(name); ok {
			return filepath.Join(path, filepath.Base(info.File))
		}
	}
	return path
}

// ruleOf is the rule that a drafter breaks which cannot be opened.
func ruleOf(err error) string {
	if errors.Is(err, drafter.ErrWeights) {
		return "K6"
	}
	return "K12"
}

// finiteTensors is K1 over every tensor of floats.
func finiteTensors(v *validation, path string, w *safetensors.Checkpoint) {
	for _, name := range w.Names() {
		vals, err := w.Float32s(name)
		if err != nil {
			continue // not floats, or damaged, which opening has said
		}
		shape, _ := w.Shape(name)
		width := max(len(vals), 1)
		if len(shape) > 1 {
			width = shape[len(shape)-1]
		}
		for _, f := range verify.Rows(vals, width, func(int) (zero, same bool) { return true, true }) {
			if f.Rule == "K1" {
				f.File, f.Sample = path, name
				v.add(f)
			}
		}
	}
}

// vocabMap checks d2t and t2d, where a checkpoint has them.
func vocabMap(v *validation, path string, w *safetensors.Checkpoint, layout drafter.Layout) {
	read := func(name string) []int64 {
		for _, name := range []string{name, "model." + name} {
			if _, ok := w.Info(name); !ok {
				continue
			}
			vals, err := w.Ints(name)
			if err != nil {
				v.add(verify.Fault{File: fileOf(path, w, name), Sample: name, Row: -1, State: -1, Rule: "K11", Value: err.Error()})
			}
			return vals
		}
		return nil
	}
	d2t, t2d := read("d2t"), read("t2d")
	if d2t == nil {
		return // there is none, or it is no map, which has been said
	}
	if row, why := verify.VocabMap(d2t, t2d, layout.DraftVocab, layout.Vocab); why != "" {
		tensor := "d2t"
		if strings.HasPrefix(why, "t2d") {
			tensor = "t2d"
		}
		v.add(verify.Fault{File: fileOf(path, w, tensor), Sample: tensor, Row: row, State: -1, Rule: "K11", Value: why})
	}
}
