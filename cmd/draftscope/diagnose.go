package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/draftscope/draftscope/cmd/demo"
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/data/query"
	"github.com/draftscope/draftscope/drafter/diagnose"
	"github.com/draftscope/draftscope/extract/safetensors"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/schemas"
)

const diagnoseHelp = `usage: draftscope diagnose --dataset DIR --drafter X [--reference Y] [--train-log FILE]

Says why a drafter is bad, or that it is not: which hypotheses the captured data
rule out, which they support, and how strongly. It runs the target again to
check what was captured, scans the labels' offset, drafts with every likely
mistake of configuration in turn (RoPE, windows, causality, heads, taps, slot 0,
the anchor in the context), compares masks and generation prompts with the
template, looks for packed rows, states that were not rolled back and tokens that
are not greedy, matches stored drafts, and identifies the objective of a training
log. docs/diagnose.md explains each verdict.

X and Y are a folder, NAME=DIR, or the name of a drafter that the dataset knows.

examples:
  draftscope diagnose --dataset ds --drafter ./mine
  draftscope diagnose --dataset ds --drafter ./mine --reference ./good --train-log train_log.jsonl
  draftscope diagnose --dataset draftscope-data --drafter shift --json
`

// diagnoseFlags are the flags of diagnose.
type diagnoseFlags struct {
	dataset, drafter, reference string
	trainLog, logRun            string
	anchors                     int
}

func cmdDiagnose(ctx context.Context, args []string, out streams) error {
	var j jobFlags
	var d diagnoseFlags
	flags := newFlags("diagnose", diagnoseHelp, out)
	flags.StringVar(&d.dataset, "dataset", defaultOut, "the dataset's `DIR`")
	flags.StringVar(&d.drafter, "drafter", "", "the drafter to examine, `X`")
	flags.StringVar(&d.reference, "reference", "", "a drafter that is known to be good, `Y`")
	flags.StringVar(&d.trainLog, "train-log", "", "the training log, a JSONL `FILE`")
	flags.StringVar(&d.logRun, "log-run", "", "the `NAME` in the log of the run that made the drafter (default: the drafter's)")
	flags.IntVar(&d.anchors, "anchors", 0, "draft variants at about `N` anchors (default 400)")
	flags.StringVar(&j.run, "run", "", "the `NAME` of the run (default: the only one)")
	flags.StringVar(&j.target, "target", "", "the target's model `DIR` (default: where the run was captured from)")
	flags.IntVar(&j.limit, "limit", 40, "at most `N` sequences, evenly over all")
	flags.BoolVar(&j.json, "json", false, "print JSON")
	j.backendFlags(flags)
	if err := parseNone(flags, args); err != nil {
		return err
	}
	switch {
	case d.drafter == "":
		return badUsage("diagnose needs --drafter X: a folder, NAME=DIR, or the name of a drafter of the dataset")
	case j.limit < 1:
		return badUsage("--limit must be at least 1, not %d", j.limit)
	case d.anchors < 0:
		return badUsage("--anchors must be 0 (the default) or more, not %d", d.anchors)
	}
	return diagnoseJob(ctx, newJob(j, out), d)
}

func diagnoseJob(ctx context.Context, j *job, d diagnoseFlags) (err error) {
	record, err := pickRun(d.dataset, j.run)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.opened.Close()) }()
	if j.target == "" {
		j.target = record.Target
	}
	if err := j.openTarget(j.target); err != nil {
		return err
	}
	c := diagnose.Case{Device: j.dev, Host: hostOf(j.model), Anchors: d.anchors, LogRun: d.logRun}
	c.Capture = diagnose.Capture{DType: record.DType, Exact: sameArithmetic(record, j.dev.Name()), Rounded: record.Rounding != data.Lossless}
	c.Recompute, c.Progress = j.recompute, j.passes()
	if j.tok != nil {
		c.Text, c.Encode = func(id int32) string { return j.tok.Decode([]int32{id}) }, j.tok.Encode
	}
	var fingerprint string
	if c.Drafter, fingerprint, err = j.examined(record, d.drafter); err != nil {
		return err
	}
	if d.reference != "" {
		reference, _, err := j.examined(record, d.reference)
		if err != nil {
			return err
		}
		c.Reference = &reference
	}
	if d.trainLog != "" {
		if c.Log, err = readTrainLog(d.trainLog); err != nil {
			return err
		}
	}
	if c.Sequences, c.Again, err = j.storedSequences(ctx, d.dataset, record); err != nil {
		return err
	}
	incomplete := j.storedDrafts(ctx, d.dataset, record, c, fingerprint)
	if incomplete != nil && !partial(incomplete) {
		return incomplete
	}
	r, err := diagnose.Run(ctx, c)
	if errors.Is(err, diagnose.ErrCase) {
		return badInput(err)
	}
	if err != nil {
		return modelError(j.place, err)
	}
	if j.json {
		err = writeJSON(j.out.stdout, r)
	} else {
		err = diagnose.WriteText(j.out.stdout, r)
	}
	return cmp.Or(err, incomplete)
}

// passes shows how far a pass over the sequences is, every few seconds.
func (j *job) passes() func(pass string, done, total int) {
	const every = 5 * time.Second
	last := time.Now()
	return func(pass string, done, total int) {
		if time.Since(last) >= every {
			j.say("%s: %d of %d sequences", pass, done, total)
			last = time.Now()
		}
	}
}

// sameArithmetic says that a run was captured by this program in single
// precision and row by row, as the target is run again here.
func sameArithmetic(r data.Run, device string) bool {
	return r.Engine == "draftscope" && r.Options["delta_chunk"] == "" && !strings.Contains(r.Options["device"], "bf16") && !strings.Contains(device, "bf16")
}

func readTrainLog(path string) (*diagnose.Log, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, badInput(fmt.Errorf("opening the training log: %w", err))
	}
	defer f.Close()
	l, err := diagnose.ReadLog(f)
	if err != nil {
		return nil, badInput(fmt.Errorf("reading %s: %w; it takes a JSON object a line, as docs/diagnose.md says", path, err))
	}
	return l, nil
}

// recompute runs the target on given ids.
func (j *job) recompute(ctx context.Context, ids []int32) ([][]float32, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	for _, id := range ids {
		if id < 0 || int(id) >= j.model.Config().Vocab {
			return nil, badUsage("token %d is outside the vocabulary of target %s", id, j.place.label)
		}
	}
	seq, err := j.model.NewSequence()
	if err != nil {
		return nil, err
	}
	defer seq.Close()
	var all []int
	for c := range j.model.Config().Layers + 1 {
		all = append(all, c)
	}
	out, err := j.model.Forward([]*target.Sequence{seq}, [][]int32{ids}, all)
	if err != nil {
		return nil, err
	}
	return out.States, nil
}

// examined opens the files of a drafter that is named on the command line.
func (j *job) examined(r data.Run, ref string) (c diagnose.Checkpoint, fingerprint string, err error) {
	name, p, err := drafterNamed(r, ref)
	if err != nil {
		return c, "", err
	}
	config, err := fs.ReadFile(p.fsys, pathIn(p, "config.json"))
	if err != nil {
		return c, "", modelError(p, fmt.Errorf("reading config.json of drafter %s: %w", name, err))
	}
	weights, err := safetensors.Open(p.fsys, p.dir)
	if err != nil {
		return c, "", modelError(p, fmt.Errorf("opening drafter %s: %w", name, err))
	}
	j.opened.add(weights)
	return diagnose.Checkpoint{Name: name, Config: config, Weights: weights}, fingerprintOf(config, weights.Fingerprint()), nil
}

// drafterNamed finds a drafter by folder, NAME=DIR, or the name under which
// the dataset knows it.
func drafterNamed(r data.Run, ref string) (name string, p place, err error) {
	if name, dir, ok := strings.Cut(ref, "="); ok {
		p, err = placeOf(dir)
		return name, p, err
	}
	if info, err := os.Stat(ref); err == nil && info.IsDir() {
		p, err = placeOf(ref)
		return filepath.Base(filepath.Clean(ref)), p, err
	}
	source := ""
	for _, d := range r.Drafters {
		if d.Name == ref {
			source = d.Source
		}
	}
	switch {
	case source == demoTarget, source == "" && r.Target == demoTarget && slices.Contains(demo.Drafters(), ref):
		return ref, place{demo.FS(), "drafters/" + ref, demoTarget}, nil
	case source != "":
		p, err = placeOf(source)
		return ref, p, err
	}
	return "", p, badUsage("there is no folder %s, and run %s knows no drafter of that name", ref, r.Name)
}

// storedSequences reads at most --limit sequences of a run, evenly over all,
// and some of them again from another run.
func (j *job) storedSequences(ctx context.Context, dataset string, r data.Run) (out, again []diagnose.Sequence, err error) {
	ds, err := data.Open(dataset)
	if err != nil {
		return nil, nil, dataError(err)
	}
	defer func() { err = errors.Join(err, ds.Close()) }()
	stored, err := ds.Stored(r.Name)
	if err != nil {
		return nil, nil, dataError(err)
	}
	ids := make([]string, 0, len(stored))
	for id := range stored {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	want := map[string]bool{}
	for i := range min(j.limit, len(ids)) {
		want[ids[i*len(ids)/min(j.limit, len(ids))]] = true
	}
	if out, err = sequencesOf(ctx, ds, r.Name, want); err != nil {
		return nil, nil, err
	}
	if len(out) == 0 {
		return nil, nil, badUsage("run %s in %s holds no sequence", r.Name, dataset)
	}
	again, err = storedAgain(ctx, ds, r, out)
	return out, again, err
}

// mostAgain bounds the sequences that are read from another run.
const mostAgain = 8

// storedAgain reads some of the same sequences from another run of the same
// settings, if the dataset has one.
func storedAgain(ctx context.Context, ds *data.Dataset, r data.Run, have []diagnose.Sequence) ([]diagnose.Sequence, error) {
	for _, other := range ds.Runs() {
		if other.Name == r.Name || !sameSettings(r, other) {
			continue
		}
		stored, err := ds.Stored(other.Name)
		if err != nil {
			return nil, dataError(err)
		}
		want := map[string]bool{}
		for _, q := range have {
			if _, ok := stored[q.ID]; ok && len(want) < mostAgain {
				want[q.ID] = true
			}
		}
		if len(want) > 0 {
			return sequencesOf(ctx, ds, other.Name, want)
		}
	}
	return nil, nil
}

// sameSettings says that two runs record the same states of the same target in
// the same way.
func sameSettings(a, b data.Run) bool {
	return a.Engine == b.Engine && a.DType == b.DType && a.Rounding == b.Rounding && a.Fingerprints == b.Fingerprints &&
		a.Options["device"] == b.Options["device"] && slices.Equal(a.States, b.States)
}

// sequencesOf reads the wanted sequences of a run.
func sequencesOf(ctx context.Context, ds *data.Dataset, run string, want map[string]bool) (out []diagnose.Sequence, err error) {
	source, err := ds.Replay(run, data.ReplayConfig{Want: func(id string) bool { return want[id] }})
	if err != nil {
		return nil, dataError(err)
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	open := diagnose.Sequence{States: map[int][]float32{}}
	for {
		id, rec, last, err := source.Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, dataError(err)
		}
		err = takeRecord(&open, rec)
		rec.Release()
		if err != nil {
			return nil, fmt.Errorf("reading sequence %s: %w", id, err)
		}
		if last {
			open.ID = id
			out = append(out, open)
			open = diagnose.Sequence{States: map[int][]float32{}}
		}
	}
	return out, nil
}

// takeRecord adds a record of a replay to a sequence.
func takeRecord(q *diagnose.Sequence, rec arrow.Record) error {
	env, err := schemas.EnvelopeOf(rec)
	if err != nil {
		return err
	}
	switch env.Table {
	case schemas.TableCapture:
		c, err := schemas.ReadCapture(rec)
		if err != nil {
			return err
		}
		q.Tokens = append(q.Tokens, c.Tokens...)
		for i, state := range c.Spec.States {
			q.States[state] = c.Spec.DType.AppendFloats(q.States[state], c.States[i])
		}
	case schemas.TableSequences:
		rows, err := schemas.Rows[schemas.Sequence](rec)
		if err != nil {
			return err
		}
		for _, row := range rows {
			q.PromptLen = int(row.PromptLen)
			q.Greedy = row.FinishReason != schemas.FinishGiven && row.Temperature == 0
		}
	}
	return nil
}

// storedDrafts adds the drafts that the dataset holds of the examined drafter,
// if they were made with these weights. An error with the exit code of what is
// partial names files that were left out.
func (j *job) storedDrafts(ctx context.Context, dataset string, r data.Run, c diagnose.Case, fingerprint string) error {
	db, err := openDB(ctx, dataset, j.out)
	if errors.Is(err, query.ErrNoDuckDB) {
		j.say("stored drafts are not compared: %v", err)
		return nil
	}
	if err != nil {
		return err
	}
	defer db.Close()
	i := slices.IndexFunc(r.Drafters, func(d data.Drafter) bool { return d.Name == c.Drafter.Name })
	if i < 0 {
		return leftOut(db.Warnings())
	}
	if have := r.Drafters[i].Fingerprint; have != "" && have != fingerprint {
		j.say("the drafts of %s in %s were made with other weights: they are not compared", c.Drafter.Name, dataset)
		return leftOut(db.Warnings())
	}
	at := map[string]int{}
	for k, q := range c.Sequences {
		at[q.ID] = k
	}
	rows, err := db.Query(ctx, "SELECT seq_id, anchor, draft_tokens FROM drafts WHERE run = "+query.Literal(r.Name)+" AND drafter = "+query.Literal(c.Drafter.Name))
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		v := rows.Values()
		k, ok := at[fmt.Sprint(v[0])]
		anchor, isInt := v[1].(int64)
		list, isList := v[2].([]any)
		if !ok || !isInt || !isList {
			continue
		}
		if c.Sequences[k].Drafts == nil {
			c.Sequences[k].Drafts = map[int32][]int32{}
		}
		tokens := make([]int32, 0, len(list))
		for _, t := range list {
			id, ok := t.(int64)
			if !ok {
				return fmt.Errorf("reading drafts: a token is %T", t)
			}
			tokens = append(tokens, int32(id))
		}
		c.Sequences[k].Drafts[int32(anchor)] = tokens
	}
	if err := rows.Err(); err != nil {
		return err
	}
	return cmp.Or(storedRounds(ctx, db, r.Name, c, at), leftOut(db.Warnings()))
}

// storedRounds adds the rounds of the examined drafter's chain; at is the
// place of each sequence.
func storedRounds(ctx context.Context, db *query.DB, run string, c diagnose.Case, at map[string]int) error {
	rows, err := db.Query(ctx, "SELECT seq_id, round, anchor, proposed, accepted, accept_len, truncated FROM rounds WHERE method = "+query.Literal(schemas.MethodChain)+
		" AND run = "+query.Literal(run)+" AND drafter = "+query.Literal(c.Drafter.Name)+" ORDER BY seq_id, round")
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		v := rows.Values()
		k, ok := at[fmt.Sprint(v[0])]
		if !ok {
			continue
		}
		var n [5]int32
		for i := range n {
			val, ok := v[i+1].(int64)
			if !ok {
				return fmt.Errorf("reading rounds: a number is %T", v[i+1])
			}
			n[i] = int32(val)
		}
		truncated, ok := v[6].(bool)
		if !ok {
			return fmt.Errorf("reading rounds: truncated is %T", v[6])
		}
		c.Sequences[k].Rounds = append(c.Sequences[k].Rounds, schemas.Round{
			Method: schemas.MethodChain, Round: n[0], Anchor: n[1], Proposed: n[2], Accepted: n[3], AcceptLen: n[4], Truncated: truncated,
		})
	}
	return rows.Err()
}
