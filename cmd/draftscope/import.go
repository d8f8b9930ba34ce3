package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/extract/files"
)

const importHelp = `usage: draftscope import --format F [--target DIR] [--states LIST] [--out DIR] FOLDER

Reads the hidden states that another system has stored in FOLDER, checks them,
and adds them to a dataset as a run; put drafters on it with "draftscope
replay".

  vllm         {req_id}.safetensors of the ExampleHiddenStatesConnector
  speculators  hs_{row}.safetensors with their Arrow data set
  specforge    rows_*/data_*.ckpt or .ckpt.gz
  deepspec     manifest.json, samples.idx, shard-*.bin

None of them says reliably which states its slots are. With --target, the model
that they are of, a few rows are computed again: what --states (or the format)
claims is refused if it is not so, and without --states the target finds out.
--states counts as everywhere here: state c is after c layers, before the final
norm; -1 leaves a slot out.

Padding is left out where an attention_mask stands beside the tokens (vllm,
speculators, specforge). States of vllm and speculators may be F8_E4M3 codes,
with hidden_states_scale: a factor a token, or a token and slot.

Pickled files are read, never executed.

examples:
  draftscope import --format vllm --target ./Qwen3-8B --out ds /tmp/hidden
  draftscope import --format speculators --states 2,18,33,36 --layers 36 --out ds ./data
  draftscope import --format specforge --target ./Qwen3-8B --run sf --out ds ./cache/hidden_states
`

// slotsFlag is --states of an import: the slots in their order.
type slotsFlag []int

func (v *slotsFlag) String() string { return "" }

func (v *slotsFlag) Set(s string) error {
	*v = nil
	for part := range strings.SplitSeq(s, ",") {
		c, err := strconv.Atoi(strings.TrimSpace(part))
		if err != nil || c < -1 {
			return fmt.Errorf("want state numbers separated by commas, in the order of the slots, not %q", s)
		}
		*v = append(*v, c)
	}
	return nil
}

func cmdImport(ctx context.Context, args []string, out streams) (err error) {
	j := newJob(jobFlags{maxNew: 1, batchRows: 1, parts: 2, nats: "embedded"}, out)
	cfg := files.Config{Log: j.log}
	var slots slotsFlag
	flags := newFlags("import", importHelp, out)
	format := flags.String("format", "", "what wrote the files: vllm, speculators, specforge or deepspec `NAME`")
	flags.StringVar(&j.target, "target", "", "the model `DIR` that the states are of")
	flags.Var(&slots, "states", "which states the slots are, in their order, a `LIST` (default: what the format says, or what the target finds)")
	flags.IntVar(&cfg.Layers, "layers", 0, "without --target, the model's `N` layers")
	flags.StringVar(&j.jobFlags.out, "out", defaultOut, "the dataset's `DIR`; a second import into the same run resumes")
	flags.StringVar(&j.run, "run", "r1", "the `NAME` of the run")
	flags.BoolVar(&cfg.AllowMissingLast, "allow-missing-last", false, "take samples whose last token has no row, without that token")
	flags.IntVar(&cfg.ProbeEvery, "probe-every", 100, "with --target, test the first sample and one in `N` after it")
	flags.BoolVar(&cfg.LastTurn, "last-turn", false, "supervise the last reply only")
	flags.BoolVar(&cfg.Redact, "redact", false, "do not store the text")
	j.encoding = encodingFlag(flags)
	j.backendFlags(flags)
	rest, err := parse(flags, args)
	if err != nil {
		return err
	}
	switch {
	case len(rest) != 1:
		return badUsage("import wants one folder, and got %d arguments; \"draftscope import --help\" shows examples", len(rest))
	case *format == "":
		return badUsage("import needs --format: vllm, speculators, specforge or deepspec")
	case j.target == "" && cfg.Layers < 1:
		return badUsage("import needs --target DIR, the model that the states are of, or at least its --layers")
	case cfg.ProbeEvery < 1:
		return badUsage("--probe-every must be at least 1, not %d", cfg.ProbeEvery)
	}
	if err := j.validate(); err != nil {
		return err
	}
	if info, err := os.Stat(rest[0]); err != nil || !info.IsDir() {
		return badUsage("there is no folder %s", rest[0])
	}
	ctx, stop := j.signals(ctx)
	defer stop()
	defer func() { err = errors.Join(err, j.opened.Close()) }()
	if j.target != "" {
		if err := j.openTarget(j.target); err != nil {
			return err
		}
	}
	cfg.Run, cfg.States, cfg.Target, cfg.Tokenizer = j.run, slots, j.model, j.tok
	return j.importFiles(ctx, *format, rest[0], cfg)
}

func (j *job) importFiles(ctx context.Context, format, dir string, cfg files.Config) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return badInput(err)
	}
	j.opened.add(root)
	reader, err := files.Open(format, root.FS())
	if err != nil {
		return importError(err)
	}
	j.opened.add(reader)
	if err := j.openDataset(j.jobFlags.out); err != nil {
		return err
	}
	if _, err := j.ds.Run(cfg.Run); err == nil {
		stored, err := j.ds.Stored(cfg.Run)
		if err != nil {
			return dataError(err)
		}
		cfg.Skip = func(id string) bool { _, ok := stored[id]; return ok }
	}
	source, err := files.NewSource(reader, cfg)
	if err != nil {
		return importError(err)
	}
	j.opened.add(source)
	spec := source.Spec()
	j.say("%s: %d samples, states %v, hidden %d, %s", dir, reader.Len(), spec.States, spec.Hidden, spec.DType)
	record := data.Run{
		Name: cfg.Run, Target: format, States: spec.States, Layers: spec.Layers, Hidden: spec.Hidden,
		FinalNorm: data.FinalPreNorm, DType: spec.DType, Engine: format, EngineVersion: "import",
		Options: map[string]string{"tested": strconv.FormatBool(j.model != nil), "allow_missing_last": strconv.FormatBool(cfg.AllowMissingLast), "redact": strconv.FormatBool(cfg.Redact)},
	}
	if cfg.LastTurn {
		record.Options["last_turn"] = "true"
	}
	if j.model != nil {
		record.Target, record.Fingerprints.Weights = j.place.label, j.model.Fingerprint()
	}
	if j.tok != nil {
		record.Fingerprints.Tokenizer = j.tok.Fingerprint()
	}
	if record.Rounding, err = roundingOf(j.encoding, spec.DType); err != nil {
		return err
	}
	if record.Profile, err = j.profile(record, piecesOf(source.First())); err != nil {
		return err
	}
	if err := j.ds.AddRun(record); err != nil {
		return dataError(err)
	}
	total := source.Remaining()
	if total == 0 {
		j.say("run %s in %s is complete already: %d samples", cfg.Run, j.ds.Dir(), reader.Len())
		return nil
	}
	sum, err := j.move(ctx, flow{source: source, total: total, capture: true})
	if err != nil {
		return importError(err)
	}
	stored, err := j.ds.Stored(cfg.Run)
	if err != nil {
		return dataError(err)
	}
	fmt.Fprintf(j.out.stdout, "run %s: %d of %d samples stored\n", cfg.Run, len(stored), reader.Len())
	if n := source.Done.Shortened; n > 0 {
		fmt.Fprintf(j.out.stdout, "of %d samples the last token was left out, which has no row (--allow-missing-last)\n", n)
	}
	if e := source.Done.Error; e > 0 {
		fmt.Fprintf(j.out.stdout, "states were in 8 bits: a value differs from what was rounded by up to %.4g\n", e)
	}
	if err := j.idle(source.Done.Idle, source.Done.Sound); err != nil && source.Done.Sound == len(stored) {
		return err
	}
	return j.finish(sum)
}

// importError gives an error of the files its exit code.
func importError(err error) error {
	if errors.Is(err, files.ErrFormat) || errors.Is(err, files.ErrConfig) || errors.Is(err, files.ErrClaim) {
		return badInput(err)
	}
	return jobError(err)
}
