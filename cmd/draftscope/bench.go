package main

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/draftscope/draftscope/cmd/draftscope/bench"
)

const benchHelp = `usage: draftscope bench [--shape NAME | --hidden N --states N] [--bytes SIZE] [--rounds N] [--only STAGES]
                        [--stream-bytes SIZE] [--dir DIR] [--json]

Measures the data plane on this machine: synthetic states of a real model's
shape go through the messages' frame, the stream, a drafter that only reads,
the Parquet store and back. Each stage's rate stands beside what the machine
can do at all, measured in the same round: memcpy, a file written and synced,
loopback TCP. At the end it says which of the project's ratios hold here.

It exits 0 whether they hold or not: on a busy machine they may not.

examples:
  draftscope bench
  draftscope bench --bytes 200MB --rounds 1         a first look, under a minute
  draftscope bench --shape qwen3-8b --dir /data     on the disk that will be used
  draftscope bench --bytes 20GB --rounds 1 --only plane   memory stays flat
`

func cmdBench(ctx context.Context, args []string, out streams) error {
	flags := newFlags("bench", benchHelp, out)
	shape := flags.String("shape", "qwen3.6-27b", "`NAME` of the states' shape: "+bench.ShapeNames())
	hidden := flags.Int("hidden", 0, "values in a state, instead of the shape's")
	states := flags.Int("states", 0, "states of a token, instead of the shape's")
	size := sizeFlag(2e9)
	flags.Var(&size, "bytes", "`SIZE` of the states that go through each stage, such as 200MB or 2GB")
	rounds := flags.Int("rounds", 3, "how often all is measured; medians are told")
	dir := flags.String("dir", "", "`DIR` on the disk to measure; empty takes the system's folder for temporary files")
	only := flags.String("only", "", "`STAGES` to measure, separated by commas: "+bench.StageNames())
	stream := sizeFlag(defaultStreamBytes)
	flags.Var(&stream, "stream-bytes", "`SIZE` that a stream may take; it bounds the server's memory too")
	asJSON := flags.Bool("json", false, "print the figures as JSON")
	verbose := flags.Bool("verbose", false, "log what the parts say")
	if err := parseNone(flags, args); err != nil {
		return err
	}
	cfg := bench.Config{Bytes: int64(size), Rounds: *rounds, StreamBytes: int64(stream), Dir: *dir}
	if *only != "" {
		cfg.Only = strings.Split(*only, ",")
	}
	var err error
	if cfg.Shape, err = bench.ShapeOf(*shape); err != nil {
		return badUsage("--shape: %w", err)
	}
	if *hidden != 0 || *states != 0 {
		cfg.Shape.Name = "custom"
	}
	if *hidden != 0 {
		cfg.Shape.Hidden = *hidden
	}
	if *states != 0 {
		cfg.Shape.States = *states
	}
	if *rounds == 0 || size == 0 || stream == 0 {
		return badUsage("--rounds, --bytes and --stream-bytes have to be more than 0")
	}
	if err := cfg.Validate(); err != nil {
		return badUsage("bench: %w", err)
	}
	if cfg.Dir == "" {
		cfg.Dir = os.TempDir()
	}
	if info, err := os.Stat(cfg.Dir); err != nil || !info.IsDir() {
		return badUsage("--dir %s is no folder; make it first", cfg.Dir)
	}
	if *verbose {
		cfg.Logger = slog.New(slog.NewTextHandler(out.stderr, nil))
	}
	defer collectOften()()
	start := time.Now()
	cfg.Progress = func(step string) {
		fmt.Fprintf(out.stderr, "%4.0f s  %s\n", time.Since(start).Seconds(), step)
	}
	res, err := bench.Run(ctx, cfg)
	if err != nil {
		return err
	}
	if *asJSON {
		return writeJSON(out.stdout, res)
	}
	return res.Print(out.stdout)
}

// sizeFlag is a number of bytes with an optional unit: kB, MB, GB, TB of
// powers of ten, KiB, MiB, GiB of two.
type sizeFlag int64

var sizeUnits = []struct {
	name string
	of   float64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}, {"PiB", 1 << 50}, {"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1},
}

func (v *sizeFlag) String() string {
	n := int64(*v)
	for _, u := range []struct {
		name string
		of   int64
	}{{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n >= u.of && n%u.of == 0 {
			return strconv.FormatInt(n/u.of, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}

func (v *sizeFlag) Set(s string) error {
	text, unit := strings.TrimSpace(s), 1.0
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(text, u.name); ok {
			text, unit = strings.TrimSpace(rest), u.of
			break
		}
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || !(n >= 0) || n*unit > math.MaxInt64/2 {
		return fmt.Errorf("want a size such as 500MB or 2GB, not %q", s)
	}
	*v = sizeFlag(n * unit)
	return nil
}
