// Package data keeps what was captured and scored as a dataset: a folder of
// Parquet files that any SQL engine reads.
//
// [Create] opens a dataset for writing and repairs what a crash left behind,
// [Open] opens one for reading. A [CaptureSink] stores captured sequences, a
// [ResultSink] what drafters made of them, a [ReplaySource] yields a stored
// capture again as if it were live. [Describe] explains a dataset or a file
// in plain words.
//
// Two rules hold everywhere. A file appears whole or not at all; and a
// sequence is stored once: its tokens, states and own row become visible
// together, because the file that names the sequence is renamed last. The
// layout is in docs/dataset.md, every column in docs/tables.md.
package data

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/draftscope/draftscope/schemas"
	"github.com/draftscope/draftscope/schemas/sound"
)

// FinalPreNorm is the only value of [Run.FinalNorm] that this program writes:
// the last state is recorded before the target's final norm.
const FinalPreNorm = "pre"

// Fingerprints identify what made a capture. An empty one is unknown.
type Fingerprints struct {
	Weights   string `json:"weights,omitempty"`
	Tokenizer string `json:"tokenizer,omitempty"`
	Template  string `json:"template,omitempty"` // of the chat template
}

// Run is one capture by one backend. Everything but its name, creation and
// drafters says how its states came to be, and must be equal for more
// sequences to be added to it.
type Run struct {
	Name          string            `json:"name"`
	Target        string            `json:"target"` // a folder, or "demo"
	States        []int             `json:"states"` // which c, ascending; 0 is the embedding
	Layers        int               `json:"layers"` // n, the target's depth
	Hidden        int               `json:"hidden"` // values in a state
	FinalNorm     string            `json:"final_norm"`
	DType         schemas.DType     `json:"dtype"`
	Rounding      Rounding          `json:"states_encoding,omitempty"`
	Engine        string            `json:"engine"`
	EngineVersion string            `json:"engine_version"`
	Fingerprints  Fingerprints      `json:"fingerprints"`
	CreatedAt     time.Time         `json:"created_at"`
	Options       map[string]string `json:"options,omitempty"`
	Drafters      []Drafter         `json:"drafters,omitempty"`
	// Profile is how large the target's states are, which sequences are held
	// against; nil where nobody knows. It is no part of what a run is.
	Profile sound.Profile `json:"profile,omitempty"`
}

// OptionStates is the option of a drafter that read the states as they are
// stored in a rounded run, and its value the rounding. A drafter without it
// read them as they were captured.
const OptionStates = "states"

// Drafter is one drafter whose drafts of a run are stored.
type Drafter struct {
	Name        string            `json:"name"`
	Source      string            `json:"source"` // a folder, or "demo"
	Fingerprint string            `json:"fingerprint,omitempty"`
	CreatedAt   time.Time         `json:"created_at"`
	Options     map[string]string `json:"options,omitempty"`
}

type manifest struct {
	Format int   `json:"format_version"`
	Runs   []Run `json:"runs"`
}

const (
	manifestName = "dataset.json"
	lockName     = ".lock"
	// maxManifest bounds what is read of a dataset.json.
	maxManifest = 64 << 20
)

// Dataset is an open dataset. Its methods may be called from several
// goroutines.
type Dataset struct {
	dir      string
	writable bool
	log      *slog.Logger
	disk     disk
	unlock   func() error
	locked   os.FileInfo // the lock file that is held

	mu       sync.Mutex
	manifest manifest
	indexes  map[string]*index // by run
	reserved map[string]bool   // paths that a sink is about to write

	compacting sync.Mutex
}

// Open opens the dataset in dir for reading. It takes no lock: what a writer
// adds meanwhile becomes visible to methods called afterwards.
func Open(dir string) (*Dataset, error) {
	m, err := readManifest(dir)
	if err != nil {
		return nil, fmt.Errorf("opening dataset %s: %w", dir, err)
	}
	return &Dataset{dir: dir, manifest: m, log: slog.New(slog.DiscardHandler), disk: osDisk{}, indexes: map[string]*index{}, reserved: map[string]bool{}}, nil
}

// Create opens the dataset in dir for writing, and creates it when dir is
// missing or holds no dataset. It takes the dataset's lock until Close, and
// removes what an earlier writer left unfinished, saying so in log, which may
// be nil. A dataset of a newer format is refused untouched.
func Create(dir string, log *slog.Logger) (*Dataset, error) {
	d, err := create(dir, log, osDisk{})
	if err != nil {
		return nil, fmt.Errorf("opening dataset %s for writing: %w", dir, err)
	}
	return d, nil
}

func create(dir string, log *slog.Logger, disk disk) (*Dataset, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	m, err := readManifest(dir)
	fresh := errors.Is(err, fs.ErrNotExist)
	if err != nil && !fresh {
		return nil, err
	}
	if err := makeDir(disk, dir); err != nil {
		return nil, err
	}
	unlock, err := lock(filepath.Join(dir, lockName))
	if err != nil {
		return nil, err
	}
	d := &Dataset{dir: dir, writable: true, manifest: m, log: log, disk: disk, unlock: unlock, indexes: map[string]*index{}, reserved: map[string]bool{}}
	if d.locked, err = os.Stat(filepath.Join(dir, lockName)); errors.Is(err, fs.ErrNotExist) {
		d.locked, err = nil, nil // this system has no locks
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("looking at the lock file: %w", err), unlock())
	}
	// Read it again, now that nobody else changes it.
	if m, err = readManifest(dir); err == nil {
		d.manifest = m
	} else if errors.Is(err, fs.ErrNotExist) {
		d.manifest = manifest{Format: schemas.FormatVersion, Runs: []Run{}}
		err = d.save()
	}
	if err == nil {
		err = d.recover()
	}
	if err != nil {
		return nil, errors.Join(err, unlock())
	}
	return d, nil
}

// Close gives the lock back. Sinks must be closed before.
func (d *Dataset) Close() error {
	if d.unlock == nil {
		return nil
	}
	unlock := d.unlock
	d.unlock = nil
	return unlock()
}

// Dir is the dataset's folder.
func (d *Dataset) Dir() string { return d.dir }

// Runs lists the runs in the order of their creation.
func (d *Dataset) Runs() []Run {
	d.mu.Lock()
	defer d.mu.Unlock()
	runs := slices.Clone(d.manifest.Runs)
	for i := range runs {
		runs[i].Drafters = slices.Clone(runs[i].Drafters)
	}
	return runs
}

// Run finds a run by name.
func (d *Dataset) Run(name string) (Run, error) {
	runs := d.Runs()
	var names []string
	for _, r := range runs {
		if r.Name == name {
			return r, nil
		}
		names = append(names, r.Name)
	}
	return Run{}, fmt.Errorf("%w: %s in %s, which has %q", ErrUnknownRun, name, d.dir, names)
}

// AddRun records a run. When a run of this name exists it must be equal in
// all but creation, drafters and profile, and is then resumed; otherwise AddRun
// returns an error wrapping [ErrMismatch] that names what differs.
func (d *Dataset) AddRun(r Run) error {
	if !d.writable {
		return fmt.Errorf("adding run %s: %w", r.Name, ErrReadOnly)
	}
	if err := r.validate(); err != nil {
		return fmt.Errorf("adding run %q: %w", r.Name, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, have := range d.manifest.Runs {
		if have.Name != r.Name {
			continue
		}
		if what := have.Difference(r); what != "" {
			return fmt.Errorf("adding run %s to %s: %w: %s; give another --run name or another --out folder", r.Name, d.dir, ErrMismatch, what)
		}
		if have.Profile != nil || r.Profile == nil {
			return nil
		}
		return d.change(func(m *manifest) { m.Runs[i].Profile = r.Profile })
	}
	if r.CreatedAt.IsZero() {
		r.CreatedAt = time.Now().UTC()
	}
	r.Drafters = nil
	return d.change(func(m *manifest) { m.Runs = append(m.Runs, r) })
}

// AddDrafter records that a drafter's drafts of a run will be stored. When
// the run has a drafter of this name it must be equal in all but source and
// creation; otherwise AddDrafter returns an error wrapping [ErrMismatch].
func (d *Dataset) AddDrafter(run string, dr Drafter) error {
	if !d.writable {
		return fmt.Errorf("adding drafter %s: %w", dr.Name, ErrReadOnly)
	}
	if err := checkName(dr.Name); err != nil {
		return fmt.Errorf("adding drafter: %w", err)
	}
	r, err := d.Run(run)
	if err != nil {
		return fmt.Errorf("adding drafter %s: %w", dr.Name, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, have := range r.Drafters {
		if have.Name != dr.Name {
			continue
		}
		if what := firstDifference(
			pair{"fingerprint", have.Fingerprint, dr.Fingerprint},
			pair{"options", have.Options, dr.Options},
		); what != "" {
			return fmt.Errorf("adding drafter %s to run %s of %s: %w: %s; give the drafter another name or choose another --out folder", dr.Name, run, d.dir, ErrMismatch, what)
		}
		return nil
	}
	if dr.CreatedAt.IsZero() {
		dr.CreatedAt = time.Now().UTC()
	}
	return d.change(func(m *manifest) {
		i := slices.IndexFunc(m.Runs, func(r Run) bool { return r.Name == run })
		m.Runs[i].Drafters = append(slices.Clone(m.Runs[i].Drafters), dr)
	})
}

// change applies f to the manifest and stores it; when storing fails the
// manifest stays as it was. The caller holds mu.
func (d *Dataset) change(f func(*manifest)) error {
	if err := d.present(); err != nil {
		return err
	}
	old := d.manifest
	d.manifest.Runs = slices.Clone(old.Runs)
	f(&d.manifest)
	if err := d.save(); err != nil {
		d.manifest = old
		return err
	}
	return nil
}

func (d *Dataset) save() error {
	b, err := json.MarshalIndent(d.manifest, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding %s: %w", manifestName, err)
	}
	return replaceFile(d.disk, filepath.Join(d.dir, manifestName), append(b, '\n'))
}

// readManifest reads dir's dataset.json. A missing one is fs.ErrNotExist.
func readManifest(dir string) (manifest, error) {
	path := filepath.Join(dir, manifestName)
	var m manifest
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return m, fmt.Errorf("%w: there is no %s; give the folder that a run wrote with --out: %w", ErrNotDataset, path, err)
	}
	if err != nil {
		return m, fmt.Errorf("reading %s: %w", path, err)
	}
	if info.Size() > maxManifest {
		return m, fmt.Errorf("%w: %s has %d bytes", ErrNotDataset, path, info.Size())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return m, fmt.Errorf("reading %s: %w", path, err)
	}
	// The version comes first: a newer format may not even parse as ours.
	var version struct {
		Format int `json:"format_version"`
	}
	const remedy = "restore it from a copy, or choose another --out folder; the Parquet files beside it can still be read"
	if err := json.Unmarshal(b, &version); err != nil {
		return m, fmt.Errorf("%w: %s is damaged (%w): %s", ErrNotDataset, path, err, remedy)
	}
	if version.Format > schemas.FormatVersion {
		return m, fmt.Errorf("%w: %s has version %d and this program knows up to %d; update draftscope, or choose another --out folder", ErrNewer, path, version.Format, schemas.FormatVersion)
	}
	if version.Format < 1 {
		return m, fmt.Errorf("%w: %s names no format version: %s", ErrNotDataset, path, remedy)
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("%w: %s is damaged (%w): %s", ErrNotDataset, path, err, remedy)
	}
	seen := map[string]bool{}
	for _, r := range m.Runs {
		if err := r.validate(); err != nil || seen[r.Name] {
			return m, fmt.Errorf("%w: %s is damaged: run %q is unusable or there twice (%w): %s", ErrNotDataset, path, r.Name, err, remedy)
		}
		seen[r.Name] = true
	}
	return m, nil
}

var namePattern = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$`)

// checkName says whether a run's or drafter's name can stand in a path.
func checkName(name string) error {
	if !namePattern.MatchString(name) {
		return fmt.Errorf("%w: %q; use letters, digits, '.', '_' and '-', at most 100, and no '.' in front", ErrName, name)
	}
	return nil
}

func (r Run) validate() error {
	errs := []error{checkName(r.Name), r.Rounding.validate()}
	if r.Hidden < 1 || r.Layers < 1 || r.DType.Size() == 0 || len(r.States) == 0 {
		errs = append(errs, fmt.Errorf("%d states of %d values in dtype %q, %d layers: each must be given", len(r.States), r.Hidden, r.DType, r.Layers))
	}
	for i, c := range r.States {
		if c < 0 || c > r.Layers || i > 0 && c <= r.States[i-1] {
			errs = append(errs, fmt.Errorf("states %v of %d layers: want ascending numbers from 0 to %d", r.States, r.Layers, r.Layers))
			break
		}
	}
	if r.FinalNorm != FinalPreNorm {
		errs = append(errs, fmt.Errorf("final norm %q: only %q is stored", r.FinalNorm, FinalPreNorm))
	}
	for _, d := range r.Drafters {
		errs = append(errs, checkName(d.Name))
	}
	return errors.Join(errs...)
}

// Difference names the first thing in which other is not a continuation of r.
func (r Run) Difference(other Run) string {
	return firstDifference(
		pair{"weights", r.Fingerprints.Weights, other.Fingerprints.Weights},
		pair{"tokenizer", r.Fingerprints.Tokenizer, other.Fingerprints.Tokenizer},
		pair{"chat template", r.Fingerprints.Template, other.Fingerprints.Template},
		pair{"states", r.States, other.States},
		pair{"layers", r.Layers, other.Layers},
		pair{"hidden", r.Hidden, other.Hidden},
		pair{"dtype", r.DType, other.DType},
		pair{"states encoding", r.Rounding, other.Rounding},
		pair{"final norm", r.FinalNorm, other.FinalNorm},
		pair{"engine", r.Engine, other.Engine},
		pair{"engine version", r.EngineVersion, other.EngineVersion},
		pair{"options", r.Options, other.Options},
	)
}

type pair struct {
	what     string
	old, new any
}

func firstDifference(pairs ...pair) string {
	for _, p := range pairs {
		if was, ok := p.old.(map[string]string); ok {
			is := p.new.(map[string]string)
			keys := map[string]string{}
			maps.Copy(keys, was)
			maps.Copy(keys, is)
			for _, key := range sorted(keys) {
				if was[key] != is[key] {
					return fmt.Sprintf("%s: %s was %s and is now %s", p.what, key, orAbsent(was[key]), orAbsent(is[key]))
				}
			}
			continue
		}
		// Printed maps are sorted, and nil prints as empty.
		if a, b := fmt.Sprintf("%v", p.old), fmt.Sprintf("%v", p.new); a != b {
			return fmt.Sprintf("%s was %s and is now %s", p.what, a, b)
		}
	}
	return ""
}

// orAbsent names a value that is not there.
func orAbsent(value string) string {
	if value == "" {
		return "not given"
	}
	return value
}
