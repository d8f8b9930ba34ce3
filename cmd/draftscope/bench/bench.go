// Package bench measures the data plane: synthetic states of a real model's
// shape go through the frame, the stream, a drafter, the store and back, and
// every stage's rate is set beside what the machine can do at all, measured
// in the same run.
//
// Rates count the states' bytes as captured (bf16), in MB of 10^6. A round
// measures every limit and every stage once, so that a machine that others
// use too slows both alike; the figures are medians over rounds, and so are
// the ratios, each taken within its round.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// Config says what is measured. Shape and Dir are needed.
type Config struct {
	Shape  Shape
	Bytes  int64 // through each stage that has a volume; 2 GB
	Rounds int   // 3
	// Only names the stages to measure; empty takes all. Limits are always
	// measured, ratios only where both of their sides are.
	Only []string
	// StreamBytes is how much a stream holds: 128 MiB. The server keeps in
	// memory what was written in the last ten seconds and not purged yet, so
	// this bounds memory as well as disk.
	StreamBytes int64
	Dir         string       // an existing folder on the disk to measure; about 1.8 times Bytes are used
	Logger      *slog.Logger // silent when nil
	// Progress hears of each step as it begins.
	Progress func(step string)
}

func (c Config) withDefaults() Config {
	if c.Bytes == 0 {
		c.Bytes = 2e9
	}
	if c.Rounds == 0 {
		c.Rounds = 3
	}
	if c.StreamBytes == 0 {
		c.StreamBytes = 128 << 20
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	return c
}

// Validate reports everything about c that cannot work.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	if c.Shape.Hidden < 8 || c.Shape.Hidden > 1<<16 {
		errs = append(errs, fmt.Errorf("states of %d values: want 8 to 65536", c.Shape.Hidden))
	}
	if c.Shape.States < 2 || c.Shape.States > 256 {
		errs = append(errs, fmt.Errorf("%d states a token: want 2 to 256", c.Shape.States))
	}
	if len(errs) == 0 && c.Shape.tokenBytes() > 4<<20 {
		errs = append(errs, fmt.Errorf("%d bytes a token: want 4 MiB at most", c.Shape.tokenBytes()))
	}
	if c.Bytes < 1e6 || c.Bytes > 1e13 {
		errs = append(errs, fmt.Errorf("%d bytes: want 1 MB to 10 TB", c.Bytes))
	}
	if len(errs) == 0 && c.StreamBytes < 4*int64(c.Shape.rows()*c.Shape.tokenBytes()*recordsPerSeq) {
		errs = append(errs, fmt.Errorf("a stream of %d bytes: want room for four sequences of %d tokens", c.StreamBytes, recordsPerSeq*c.Shape.rows()))
	}
	for _, name := range c.Only {
		if !slices.ContainsFunc(new(bench).steps(), func(s step) bool { return s.name == name && s.limit != "" }) {
			errs = append(errs, fmt.Errorf("there is no stage %q; there are %s", name, StageNames()))
		}
	}
	if c.Rounds < 1 || c.Rounds > 1000 {
		errs = append(errs, fmt.Errorf("%d rounds: want 1 to 1000", c.Rounds))
	}
	return errors.Join(errs...)
}

// bench is one run.
type bench struct {
	cfg   Config
	pool  *pool
	work  string // a folder of its own, removed at the end
	clock clock

	stored, storedRaw int64 // bytes of the last dataset, and what went into it
}

// clock measures one stage. A stage that has something to set up starts and
// stops it by itself.
type clock struct {
	begun     time.Time
	cpuBegun  time.Duration
	wall, cpu time.Duration
}

func (c *clock) start() { c.begun, c.cpuBegun, c.wall = time.Now(), cpuTime(), 0 }

func (c *clock) stop() {
	if c.wall == 0 {
		c.wall, c.cpu = time.Since(c.begun), cpuTime()-c.cpuBegun
	}
}

// sample is one measurement.
type sample struct {
	rate float64 // MB/s
	cpu  float64 // seconds of processor time for a GB
	peak int64
}

// step is one thing that is measured.
type step struct {
	name, what string
	limit      string // the name of the limit it is set beside, if any
	run        func(context.Context) (bytes int64, err error)
}

func (b *bench) steps() []step {
	return []step{
		{"copy", "memcpy, 1 MB, hot", "", copyBlocks(hotBlock)},
		{"copy-large", "memcpy, 64 MiB", "", copyBlocks(largeBlock)},
		{"disk", "write a file and sync it", "", b.writeDisk},
		{"loopback", "one TCP connection, 1 MB writes", "", b.loopback},

		{"encode", "records to messages, digest included", "copy", b.encode},
		{"parse", "messages to records", "copy", b.decode(false)},
		{"decode", "the same, digest compared", "copy", b.decode(true)},
		{"core-nats", "publisher, server, subscriber over TCP", "loopback", b.coreNATS},
		{"jetstream", "a bare JetStream in a file over TCP", "loopback", b.bareJetStream},
		{"stream", "states through a stream in a file, in this process", "loopback", b.stream(false)},
		{"stream-tcp", "the same, the server over TCP", "loopback", b.stream(true)},
		{"drafter", "a drafter that only reads its states", "copy-large", b.readAll},
		{"stream-drafter", "the stream with that drafter as second reader", "loopback", b.streamDrafter},
		{"store", "Parquet, synced, verified, renamed", "disk", b.store},
		{"back", "replay of it, digests compared", "copy-large", b.back},
		{"plane", "source to renamed Parquet to ack", "disk", b.plane(nil)},
		{"plane-drafter", "the same with the drafter", "disk", b.plane(newStub)},
		{"plane-stock", "the plane with parquet-go's own zstd", "disk", b.planeStock},
	}
}

// StageNames lists the stages that [Config.Only] may name.
func StageNames() string {
	var names []string
	for _, s := range new(bench).steps() {
		if s.limit != "" {
			names = append(names, s.name)
		}
	}
	return strings.Join(names, ", ")
}

// Run measures. It needs several minutes at the default volume.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	b := &bench{cfg: cfg.withDefaults()}
	work, err := os.MkdirTemp(b.cfg.Dir, "draftscope-bench-")
	if err != nil {
		return nil, fmt.Errorf("making a folder to measure in: %w", err)
	}
	b.work = work
	res, err := b.rounds(ctx)
	if rmErr := os.RemoveAll(work); rmErr != nil && !errors.Is(rmErr, fs.ErrNotExist) {
		err = errors.Join(err, fmt.Errorf("removing what was measured: %w", rmErr))
	}
	return res, err
}

func (b *bench) rounds(ctx context.Context) (*Result, error) {
	b.cfg.Progress("making states")
	var err error
	if b.pool, err = newPool(b.cfg.Shape); err != nil {
		return nil, err
	}
	steps := slices.DeleteFunc(b.steps(), func(s step) bool {
		return len(b.cfg.Only) > 0 && s.limit != "" && !slices.Contains(b.cfg.Only, s.name)
	})
	samples := map[string][]sample{}
	for round := range b.cfg.Rounds {
		for _, s := range steps {
			b.cfg.Progress(fmt.Sprintf("round %d of %d: %s", round+1, b.cfg.Rounds, s.what))
			got, err := b.measure(ctx, s)
			if err != nil {
				return nil, fmt.Errorf("measuring %s: %w", s.name, err)
			}
			samples[s.name] = append(samples[s.name], got)
		}
	}
	return b.result(steps, samples), nil
}

// measure runs one step, in a process as clean as can be.
func (b *bench) measure(ctx context.Context, s step) (sample, error) {
	resetPeak()
	b.clock.start()
	n, err := s.run(ctx)
	b.clock.stop()
	high := peak()
	for _, left := range []string{"stream", "server", "stock"} {
		if rmErr := os.RemoveAll(filepath.Join(b.work, left)); rmErr != nil && err == nil {
			err = fmt.Errorf("clearing up: %w", rmErr)
		}
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return sample{}, err
	}
	return sample{
		rate: float64(n) / 1e6 / b.clock.wall.Seconds(),
		cpu:  b.clock.cpu.Seconds() / (float64(n) / 1e9),
		peak: high,
	}, nil
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	n := len(v)
	if n == 0 {
		return 0
	}
	return (v[(n-1)/2] + v[n/2]) / 2
}

func cores() int { return runtime.GOMAXPROCS(0) }
