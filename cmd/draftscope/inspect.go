package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/drafter"
	"github.com/draftscope/draftscope/extract/safetensors"
)

const inspectHelp = `usage: draftscope inspect [--json] PATH
       draftscope inspect [--json] --nats URL [--run R] [DATASET]

Says in plain words what PATH is: a dataset, a Parquet file, a safetensors
file, or the folder of a target or drafter. Damaged files are named.

With --nats it says what a server holds of its runs: sequences captured, the
size of each stream, and how far each reader is; and, given the dataset that
they are stored in, how many of them are stored, set aside, or missing there.

examples:
  draftscope inspect draftscope-data
  draftscope inspect ./drafters/v3
  draftscope inspect --nats nats://host:4222 ds
  draftscope inspect draftscope-data/slots/run=r1/drafter=good/part-00-0000000001-0000000009.parquet
`

func cmdInspect(ctx context.Context, args []string, out streams) error {
	flags := newFlags("inspect", inspectHelp, out)
	asJSON := flags.Bool("json", false, "print JSON")
	nats := flags.String("nats", "", "the JetStream server's `URL`")
	only := flags.String("run", "", "with --nats, only the run of this `NAME`")
	rest, err := parse(flags, args)
	if err != nil {
		return err
	}
	var found fmt.Stringer
	switch {
	case *nats != "" && len(rest) < 2:
		found, err = inspectServer(ctx, *nats, *only, strings.Join(rest, ""))
	case len(rest) != 1:
		return badUsage("inspect wants one PATH, and got %d", len(rest))
	default:
		found, err = inspect(rest[0])
	}
	if err != nil {
		return err
	}
	if *asJSON {
		return writeJSON(out.stdout, found)
	}
	_, err = fmt.Fprintln(out.stdout, strings.TrimRight(found.String(), "\n"))
	return err
}

func inspect(path string) (fmt.Stringer, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, badUsage("there is no %s", path)
	}
	if err != nil {
		return nil, badInput(fmt.Errorf("inspecting %s: %w", path, err))
	}
	has := func(name string) bool {
		_, err := os.Stat(filepath.Join(path, name))
		return err == nil
	}
	switch {
	case info.IsDir() && has("dataset.json"), strings.HasSuffix(path, ".parquet"):
		d, err := data.Describe(path)
		return d, badInput(err)
	case info.IsDir() && has("config.json"):
		return inspectModel(path)
	case strings.HasSuffix(path, ".safetensors"):
		return inspectTensors(filepath.Dir(path), filepath.Base(path))
	}
	return nil, badUsage("%s is no dataset (dataset.json), model folder (config.json), Parquet or safetensors file", path)
}

// tensorsFound is what a safetensors checkpoint holds.
type tensorsFound struct {
	Path        string           `json:"path"`
	Fingerprint string           `json:"fingerprint"`
	Tensors     int              `json:"tensors"`
	Parameters  int64            `json:"parameters"`
	DTypes      map[string]int   `json:"dtypes"`
	Shapes      map[string][]int `json:"shapes"`
	Words       string           `json:"words,omitempty"` // what the model is
	keys        []string
}

func inspectTensors(dir, name string) (*tensorsFound, error) {
	c, err := safetensors.OpenFile(os.DirFS(dir), name)
	if err != nil {
		return nil, badInput(fmt.Errorf("%s: %w", dir, err))
	}
	defer c.Close()
	return describeTensors(filepath.Join(dir, name), c), nil
}

func describeTensors(path string, c *safetensors.Checkpoint) *tensorsFound {
	f := &tensorsFound{Path: path, Fingerprint: c.Fingerprint(), DTypes: map[string]int{}, Shapes: map[string][]int{}, keys: c.Names()}
	for _, name := range f.keys {
		info, _ := c.Info(name)
		n := int64(1)
		for _, d := range info.Shape {
			n *= int64(d)
		}
		f.Tensors++
		f.Parameters += n
		f.DTypes[string(info.DType)]++
		f.Shapes[name] = info.Shape
	}
	slices.Sort(f.keys)
	return f
}

func inspectModel(path string) (*tensorsFound, error) {
	raw, err := os.ReadFile(filepath.Join(path, "config.json"))
	if err != nil {
		return nil, badInput(fmt.Errorf("inspecting %s: %w", path, err))
	}
	c, err := safetensors.Open(os.DirFS(path), ".")
	if err != nil {
		return nil, badInput(fmt.Errorf("%s: %w", path, err))
	}
	defer c.Close()
	f := describeTensors(path, c)
	f.Words, err = modelWords(raw)
	if err != nil {
		return nil, badInput(fmt.Errorf("reading %s: %w", filepath.Join(path, "config.json"), err))
	}
	return f, nil
}

// modelWords says what a config.json describes: a drafter by its taps, a
// target by its size.
func modelWords(raw []byte) (string, error) {
	var c struct {
		Architectures []string `json:"architectures"`
		Speculators   string   `json:"speculators_model_type"`
		TargetLayers  int      `json:"num_target_layers"`
		Layers        int      `json:"num_hidden_layers"`
		Hidden        int      `json:"hidden_size"`
		Vocab         int      `json:"vocab_size"`
	}
	if err := json.Unmarshal(raw, &c); err != nil {
		return "", err
	}
	// A speculators file does not say how deep its target is; any depth
	// beyond its taps reads the same.
	depth := c.TargetLayers
	if depth == 0 {
		depth = 1 << 10
	}
	if spec, err := drafter.ParseDFlash(raw, depth); err == nil {
		return fmt.Sprintf("DFlash drafter: %d layers, hidden %d, block %d, reads states %v of a target of %d layers",
			spec.Layers, spec.Hidden, spec.BlockSize, spec.States(), c.TargetLayers), nil
	}
	return fmt.Sprintf("%s: %d layers, hidden %d, vocabulary %d", strings.Join(append(c.Architectures, c.Speculators), " "), c.Layers, c.Hidden, c.Vocab), nil
}

// String says it in plain words.
func (f *tensorsFound) String() string {
	var b strings.Builder
	what := "safetensors file"
	if f.Words != "" {
		what = "model folder"
	}
	fmt.Fprintf(&b, "%s: %s with %d tensors, %.1f million parameters, fingerprint %.16s\n", f.Path, what, f.Tensors, float64(f.Parameters)/1e6, f.Fingerprint)
	for _, d := range slices.Sorted(maps.Keys(f.DTypes)) {
		fmt.Fprintf(&b, "  %d tensors of %s\n", f.DTypes[d], d)
	}
	if f.Words != "" {
		fmt.Fprintf(&b, "  %s\n", f.Words)
	}
	for _, k := range f.keys {
		fmt.Fprintf(&b, "  %-56s %v\n", k, f.Shapes[k])
	}
	return b.String()
}
