package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/extract/target"
	"github.com/draftscope/draftscope/extract/tokenizer"
	"github.com/draftscope/draftscope/pipeline"
	"github.com/draftscope/draftscope/schemas"
)

// numerics is raised whenever the same weights and ids would give other bits
// than before, so that a run is never resumed with other numbers.
const numerics = "1"

// job is one run, capture or replay at work. Its parts are opened in the
// order of the fields and closed in reverse.
type job struct {
	jobFlags
	out    streams
	log    *slog.Logger
	opened closers
	drain  chan struct{} // closed at the first interrupt

	place place // of the target
	model *target.Model
	tok   *tokenizer.Tokenizer
	dev   cuda.Device // of the target

	names   []string // of the drafters, in the order given
	places  []place
	rounded data.Rounding        // of the states that the drafters read
	prints  []string             // fingerprints of the drafters
	devs    []cuda.Device        // one a partition
	workers [][]*drafter.Drafter // by partition, then as names
	taps    []int                // states that the drafters read, ascending
	effort  *effort              // of the stages, where somebody wants to know

	ds     *data.Dataset
	remote data.Run // without a dataset: the run as the server knows it
	faults faultList
	old    faultCount      // faults of before this job
	asked  map[string]bool // ids that this job is about
}

// faultList collects what the stream set aside.
type faultList struct {
	mu   sync.Mutex
	list []schemas.Fault
}

func (f *faultList) add(fault pipeline.Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = append(f.list, faultRow(fault))
}

// faultRow is a fault of the stream as the table faults has it.
func faultRow(f pipeline.Fault) schemas.Fault {
	return schemas.Fault{
		SeqID: f.Seq, Chunk: int32(f.Chunk), Check: f.Check,
		Detail: f.Stream + ": " + f.Detail, At: time.Now().UTC(),
	}
}

func newJob(flags jobFlags, out streams) *job {
	return &job{jobFlags: flags, out: out, log: slog.New(slog.NewTextHandler(out.stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))}
}

func (j *job) say(format string, args ...any) {
	fmt.Fprintf(j.out.stderr, format+"\n", args...)
}

// openTarget loads the target at path.
func (j *job) openTarget(path string) (err error) {
	if j.place, err = targetPlace(path); err != nil {
		return err
	}
	if j.dev, err = j.newDevice(1); err != nil {
		return err
	}
	j.opened.add(j.dev)
	if j.model, j.tok, err = openTarget(j.place, j.dev); err != nil {
		return err
	}
	j.opened.add(j.model)
	c := j.model.Config()
	if j.chunk != nil && j.chunk.value == "64" {
		if !slices.Contains(c.Attends, false) {
			return badUsage("--delta-chunk 64 is for the linear layers of a hybrid target, and target %s has none; leave it out", j.place.label)
		}
		j.model.Chunk = 64
	}
	j.say("target %s: %s, %d layers, hidden %d, vocabulary %d, on %s", j.place.label, c.Family, c.Layers, c.Hidden, c.Vocab, j.dev.Name())
	return nil
}

// openDrafters loads every drafter once a partition, each partition on a
// device of its own.
func (j *job) openDrafters() (err error) {
	if j.names, j.places, err = drafterPlaces(j.drafters, j.place.label); err != nil {
		return err
	}
	if err := j.nameRounded(); err != nil {
		return err
	}
	host := hostOf(j.model)
	j.prints = make([]string, len(j.names))
	for range j.parts {
		dev, err := j.newDevice(j.parts)
		if err != nil {
			return err
		}
		j.opened.add(dev)
		var ds []*drafter.Drafter
		for i, name := range j.names {
			d, fingerprint, err := openDrafter(name, j.places[i], host, dev)
			if err != nil {
				return err
			}
			j.opened.add(closeFunc(d.Close))
			j.prints[i] = fingerprint
			ds = append(ds, d)
		}
		j.devs, j.workers = append(j.devs, dev), append(j.workers, ds)
	}
	for _, d := range j.workers[0] {
		for _, tap := range d.Taps() {
			j.taps = append(j.taps, tap.State)
		}
	}
	slices.Sort(j.taps)
	j.taps = slices.Compact(j.taps)
	return nil
}

// scoreWith opens the drafters to score with, and says which they are.
func (j *job) scoreWith() error {
	if err := j.openDrafters(); err != nil {
		return err
	}
	j.say("drafters: %s", strings.Join(j.names, ", "))
	return nil
}

// nameRounded tells drafters that read rounded states by their names from
// those that do not.
func (j *job) nameRounded() error {
	if j.rounded == data.Lossless {
		return nil
	}
	suffix := "." + string(j.rounded)
	for i, name := range j.names {
		if !strings.HasSuffix(name, suffix) {
			j.names[i] = name + suffix
		}
		if !safeName.MatchString(j.names[i]) {
			return badUsage("the name %q, of a drafter that reads rounded states, is too long; give a shorter one", j.names[i])
		}
	}
	j.say("the states are rounded to %s: the drafters are called %s", j.rounded, strings.Join(j.names, ", "))
	return nil
}

// openModelsOf loads the target that a run was captured from, unless --target
// names the folder where it lies now, and the drafters to put on that run.
func (j *job) openModelsOf(r data.Run) error {
	if j.target == "" {
		j.target = r.Target
	}
	if err := j.openTarget(j.target); err != nil {
		return err
	}
	if got := j.model.Fingerprint(); got != r.Fingerprints.Weights {
		return badUsage("target %s has the fingerprint %.12s and run %s was captured from %.12s; give the --target that it was captured from", j.place.label, got, r.Name, r.Fingerprints.Weights)
	}
	if err := j.scoreWith(); err != nil {
		return err
	}
	return j.needStates(r)
}

// chooseStates turns --states into numbers. A run that exists keeps its own
// states when the flag leaves the choice open.
func (j *job) chooseStates() ([]int, error) {
	n := j.model.Config().Layers
	switch j.states.word {
	case "all":
		var all []int
		for c := range n + 1 {
			all = append(all, c)
		}
		return all, nil
	case "taps":
		if have, ok := j.recorded(); ok {
			return have.States, j.needStates(have)
		}
		if len(j.taps) == 0 {
			return nil, badUsage("--states taps needs drafters to take the taps from; say --states all, or a list such as 2,4,%d", n)
		}
		states := append(slices.Clone(j.taps), n)
		slices.Sort(states)
		return slices.Compact(states), nil
	}
	for _, c := range j.states.list {
		if c > n {
			return nil, badUsage("--states names state %d, and target %s has states 0 to %d", c, j.place.label, n)
		}
	}
	return j.states.list, j.needStates(data.Run{Name: j.run, States: j.states.list})
}

// recorded is the run as it was begun, in the dataset or on the server.
func (j *job) recorded() (data.Run, bool) {
	if j.ds == nil {
		return j.remote, j.remote.Name != ""
	}
	have, err := j.ds.Run(j.run)
	return have, err == nil
}

// needStates refuses a capture that lacks what a drafter reads.
func (j *job) needStates(r data.Run) error {
	for i, name := range j.names {
		for _, tap := range j.workers[0][i].Taps() {
			if !slices.Contains(r.States, tap.State) {
				return badUsage("drafter %s reads state %d, and run %s records only %v; capture with --states all, under another --run or --out", name, tap.State, r.Name, r.States)
			}
		}
	}
	return nil
}

// openDataset opens --out for writing.
func (j *job) openDataset(dir string) (err error) {
	if dir == "" {
		return badUsage("--out is empty; give the folder to write to")
	}
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return badUsage("--out %s is a file; give a folder", dir)
	}
	if j.ds, err = data.Create(dir, j.log); err != nil {
		return dataError(err)
	}
	j.opened.add(j.ds)
	return nil
}

// dataError gives a dataset's error its exit code.
func dataError(err error) error {
	switch {
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR):
		return badInput(fmt.Errorf("%w; choose another --out folder", err))
	case errors.Is(err, data.ErrNotDataset), errors.Is(err, data.ErrNewer), errors.Is(err, data.ErrMismatch),
		errors.Is(err, data.ErrUnknownRun), errors.Is(err, data.ErrName), errors.Is(err, data.ErrDamaged):
		return badInput(err)
	case errors.Is(err, data.ErrLocked), errors.Is(err, data.ErrGone):
		return withCode(exitMissing, err)
	}
	return placed(err)
}

// jobError gives an error of the stream, or of what hangs on it, its code.
func jobError(err error) error {
	switch {
	case errors.Is(err, pipeline.ErrSequenceTooLarge):
		return withCode(exitMissing, fmt.Errorf("%w: raise --max-bytes, or leave it out: --stream-bytes bounds a stream too, and lets a long sequence pass", err))
	case errors.Is(err, pipeline.ErrNoServer), errors.Is(err, pipeline.ErrNoJetStream), errors.Is(err, pipeline.ErrStoreInUse),
		errors.Is(err, pipeline.ErrRefused), errors.Is(err, pipeline.ErrServerFailed), errors.Is(err, pipeline.ErrAnotherWriter), errors.Is(err, pipeline.ErrRowTooLarge),
		errors.Is(err, pipeline.ErrStreamGone), errors.Is(err, cuda.ErrMemory):
		return withCode(exitMissing, err)
	case errors.Is(err, pipeline.ErrConfig), errors.Is(err, target.ErrInput):
		return badInput(err)
	}
	return dataError(err)
}

// drafterRecords are the drafters, and how they are asked.
func (j *job) drafterRecords() []data.Drafter {
	var list []data.Drafter
	for i, name := range j.names {
		options := map[string]string{"anchors": j.anchors.value, "budgets": j.budgets.String(), "losses": j.losses.value, "numerics": numerics}
		if j.rounded != data.Lossless {
			options[data.OptionStates] = string(j.rounded)
		}
		list = append(list, data.Drafter{Name: name, Source: j.places[i].label, Fingerprint: j.prints[i], Options: options})
	}
	return list
}

// addDrafters records the drafters of the run.
func (j *job) addDrafters() error {
	for _, d := range j.drafterRecords() {
		if err := j.ds.AddDrafter(j.run, d); err != nil {
			return dataError(err)
		}
	}
	return nil
}

// unscored tells the stored sequences that some drafter has not scored.
func (j *job) unscored(stored map[string]string) (map[string]bool, error) {
	left := map[string]bool{}
	for _, name := range j.names {
		scored, err := j.ds.Scored(j.run, name)
		if err != nil {
			return nil, dataError(err)
		}
		for seq := range stored {
			if _, ok := scored[seq]; !ok {
				left[seq] = true
			}
		}
	}
	return left, nil
}

// newStage makes the drafting stage of a partition.
func (j *job) newStage(partition int) (pipeline.Stage, error) {
	var losses cuda.Losses
	switch j.losses.value {
	case "kl":
		losses = cuda.KL
	case "all":
		losses = cuda.KL | cuda.RKL | cuda.JSD | cuda.TV
	}
	// An existing stream keeps its number of partitions, whatever the flag.
	worker := partition % len(j.workers)
	if partition >= len(j.workers) {
		return nil, badUsage("the stream of run %s has more partitions than --partitions %d; give at least %d", j.run, j.parts, partition+1)
	}
	run, _ := j.recorded()
	cfg := drafter.Config{
		Drafters: j.workers[worker], Host: hostOf(j.model), Device: j.devs[worker], Profile: run.Profile,
		Anchors: drafter.Mode(j.anchors.value), Budgets: j.budgets, Losses: losses, Log: j.log,
	}
	if j.effort != nil {
		cfg.Spent = j.effort.add
	}
	stage, err := drafter.NewStage(cfg)
	if err != nil {
		return nil, err
	}
	j.opened.add(closeFunc(stage.Close))
	return stage, nil
}
