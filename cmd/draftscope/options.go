package main

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/draftscope/draftscope/data"
	"github.com/draftscope/draftscope/schemas"
)

// safeName is what may become a part of a path, a subject and a SQL value.
var safeName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// drafterFlag collects --drafter NAME=DIR, in the order given.
type drafterFlag []drafterRef

type drafterRef struct{ name, dir string }

func (d *drafterFlag) String() string { return "" }

func (d *drafterFlag) Set(s string) error {
	name, dir, ok := strings.Cut(s, "=")
	if !ok || dir == "" {
		return errors.New("want NAME=DIR, for example good=./drafters/good")
	}
	if !safeName.MatchString(name) {
		return fmt.Errorf("the name %q may only hold letters, digits, dot, dash and underscore (64 at most)", name)
	}
	if slices.ContainsFunc(*d, func(r drafterRef) bool { return r.name == name }) {
		return fmt.Errorf("the name %q is given twice", name)
	}
	*d = append(*d, drafterRef{name, dir})
	return nil
}

// intsFlag is a comma-separated list of positive numbers, sorted, once each.
type intsFlag []int

func (v *intsFlag) String() string {
	parts := make([]string, len(*v))
	for i, n := range *v {
		parts[i] = strconv.Itoa(n)
	}
	return strings.Join(parts, ",")
}

func (v *intsFlag) Set(s string) error {
	out, ok := parseInts(s, 1, 4096)
	if !ok {
		return fmt.Errorf("want numbers from 1 to 4096 separated by commas, not %q", s)
	}
	*v = out
	return nil
}

// parseInts reads numbers separated by commas, sorted and once each.
func parseInts(s string, least, most int) ([]int, bool) {
	var out []int
	for part := range strings.SplitSeq(s, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(part))
		if err != nil || n < least || n > most {
			return nil, false
		}
		out = append(out, n)
	}
	slices.Sort(out)
	return slices.Compact(out), true
}

// statesFlag is "taps", "all", or a list of state numbers.
type statesFlag struct {
	word string
	list []int
}

func (v *statesFlag) String() string {
	if v.word != "" {
		return v.word
	}
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(v.list), " ", ","), "[]")
}

func (v *statesFlag) Set(s string) error {
	if s == "taps" || s == "all" {
		*v = statesFlag{word: s}
		return nil
	}
	list, ok := parseInts(s, 0, math.MaxInt32)
	if !ok {
		return fmt.Errorf("want taps, all, or state numbers separated by commas, not %q", s)
	}
	*v = statesFlag{list: list}
	return nil
}

// oneOf is a flag with a fixed set of values.
type oneOf struct {
	value   string
	allowed []string
}

func (v *oneOf) String() string { return v.value }

func (v *oneOf) Set(s string) error {
	if !slices.Contains(v.allowed, s) {
		return fmt.Errorf("want one of %s, not %q", strings.Join(v.allowed, ", "), s)
	}
	v.value = s
	return nil
}

func oneOfFlag(fs *flag.FlagSet, name, value, usage string, allowed ...string) *oneOf {
	v := &oneOf{value, append([]string{value}, allowed...)}
	fs.Var(v, name, usage)
	return v
}

// jobFlags are the flags of run, capture and replay.
type jobFlags struct {
	target    string
	drafters  drafterFlag
	prompts   string
	sequences string
	out       string
	run       string
	backend   *oneOf
	precision *oneOf
	chunk     *oneOf // of the delta rule; nil where nothing is captured
	nats      string
	limit     int
	budgets   intsFlag
	anchors   *oneOf
	losses    *oneOf
	states    statesFlag
	dtype     *oneOf
	encoding  *oneOf
	maxNew    int
	temp      float64
	seed      int64
	batchRows int
	redact    bool
	lastTurn  bool
	parts     int
	stream    streamBytes
	encoders  int
	json      bool
}

const defaultOut = "draftscope-data"

// captureFlags registers what decides a capture.
func (j *jobFlags) captureFlags(fs *flag.FlagSet) {
	fs.StringVar(&j.target, "target", "", "the target's model `DIR` (default: the model shipped with draftscope)")
	fs.StringVar(&j.prompts, "prompts", "", "a JSONL `FILE` of prompts: {\"id\",\"prompt\"} or {\"id\",\"messages\"} a line")
	fs.StringVar(&j.sequences, "sequences", "", "a JSONL `FILE` of given token ids, captured teacher-forced: {\"id\",\"input_ids\",\"prompt_len\"} a line")
	fs.StringVar(&j.out, "out", defaultOut, "the dataset's `DIR`; a second run with the same one resumes")
	fs.StringVar(&j.run, "run", "r1", "the `NAME` of this capture within the dataset")
	fs.IntVar(&j.limit, "limit", 0, "only the first `N` inputs")
	j.states = statesFlag{word: "taps"}
	fs.Var(&j.states, "states", "which states to record: taps, all, or a `LIST` such as 0,2,8 (state c = after c layers, before the final norm)")
	j.dtype = oneOfFlag(fs, "dtype", "f32", "capture states as `TYPE`: f32, or bf16 (half the size, rounded)", "bf16")
	j.encoding = encodingFlag(fs)
	encodersFlag(fs, &j.encoders)
	fs.IntVar(&j.maxNew, "max-new", 144, "at most `N` new tokens a prompt")
	fs.Float64Var(&j.temp, "temperature", 0, "0 generates greedily, `T` > 0 samples")
	fs.Int64Var(&j.seed, "seed", 1, "the sampling seed `N`")
	fs.IntVar(&j.batchRows, "batch-rows", 64, "tokens in a batch of the stream, `N`")
	fs.BoolVar(&j.redact, "redact", false, "do not store the text")
	fs.BoolVar(&j.lastTurn, "last-turn", false, "of conversations and sequences that are given whole, supervise the last reply only")
	j.chunk = oneOfFlag(fs, "delta-chunk", "1", "rows of a prompt that a hybrid target's linear layers solve at once: 1, or 64 (faster on Hopper in bf16; the last bits of states then depend on which rows were given and which generated) `N`", "64")
}

const (
	encodingLossless = "lossless"
	encodingBF16     = "bf16" // lossless, said of a run that is captured so
)

// defaultStreamBytes bounds each stream of the embedded server, which keeps in
// memory what was written to it in the last ten seconds and not purged.
const defaultStreamBytes = 128 << 20

// streamBytes is --stream-bytes: how much a stream may hold before its readers
// are asked to hurry and its publisher waits.
type streamBytes struct {
	sizeFlag
	given bool
}

func (v *streamBytes) Set(s string) error {
	v.given = true
	err := v.sizeFlag.Set(s)
	if n := int64(v.sizeFlag); err == nil && n != 0 && (n < leastStream || n > mostStream) {
		return fmt.Errorf("want 0 for no bound, or 1MiB to 1PiB, not %q", s)
	}
	return err
}

func (v *streamBytes) String() string {
	if !v.given {
		return ""
	}
	return v.sizeFlag.String()
}

func (v *streamBytes) register(fs *flag.FlagSet) {
	fs.Var(v, "stream-bytes", "about how much each stream holds, `SIZE`: it forgets what all its readers have, and what would be more waits for them, but for what is in progress; "+
		"0 for no bound (default 128MiB with the embedded server, whose memory it bounds; no bound with a server of yours)")
}

// of is the bound in force.
func (v *streamBytes) of(embedded bool) int64 {
	if v.given || !embedded {
		return int64(v.sizeFlag)
	}
	return defaultStreamBytes
}

// commitBytes is how much the sink of a partition holds before it makes files:
// less than its share of what a stream of soft bytes holds, or it would only
// do so when the stream is full. 0 leaves it to the pipeline.
func commitBytes(soft int64, partitions int) int64 {
	if soft == 0 {
		return 0
	}
	return min(64<<20, max(4<<20, soft/int64(2*partitions+1)))
}

// encodersFlag registers how many goroutines encode states.
func encodersFlag(fs *flag.FlagSet, n *int) {
	fs.IntVar(n, "encode-workers", 0, "`N` goroutines that encode states while a partition's files are written; each takes about 1.5 MB (0: as many as there are cores)")
}

// encodingFlag registers how states are stored.
func encodingFlag(fs *flag.FlagSet) *oneOf {
	return oneOfFlag(fs, "states-encoding", encodingLossless, "how exactly states are stored, `HOW`: lossless (as captured; bf16 says the same of --dtype bf16), "+
		"or rounded row by row to 8 bits, int8 or fp8-e4m3; what that costs is in report and inspect", encodingBF16, string(data.Int8), string(data.E4M3))
}

// roundingOf is the rounding that the flag names for states of a dtype.
func roundingOf(encoding *oneOf, dtype schemas.DType) (data.Rounding, error) {
	switch encoding.value {
	case encodingLossless:
		return data.Lossless, nil
	case encodingBF16:
		if dtype != schemas.BF16 {
			return "", badUsage("--states-encoding bf16 is for states that are captured as bf16, and these are %s; say --dtype bf16, or --states-encoding lossless", dtype)
		}
		return data.Lossless, nil
	}
	return data.Rounding(encoding.value), nil
}

// draftFlags registers what decides a scoring.
func (j *jobFlags) draftFlags(fs *flag.FlagSet) {
	fs.Var(&j.drafters, "drafter", "a drafter version, `NAME=DIR`; give it once for each")
	j.budgets = intsFlag{8, 16, 64}
	fs.Var(&j.budgets, "budgets", "DDTree node budgets, `N,N,...`")
	j.anchors = oneOfFlag(fs, "anchors", "every", "draft at every anchor, or only at those that rounds reach: every|rounds `WHICH`", "rounds")
	j.losses = oneOfFlag(fs, "losses", "kl", "divergences beside the cross-entropy: kl, or all (adds reverse KL, JSD, TV), or none `WHICH`", "all", "none")
}

// commonFlags registers what every job has.
func (j *jobFlags) commonFlags(fs *flag.FlagSet) {
	j.backendFlags(fs)
	fs.StringVar(&j.nats, "nats", "embedded", "the JetStream server: embedded, or a `URL` such as nats://host:4222")
	j.stream.register(fs)
	fs.IntVar(&j.parts, "partitions", 2, "`N` partitions of the stream, each with its own drafter and writer")
	fs.BoolVar(&j.json, "json", false, "print the report as JSON")
}

// Bounds of flags; more would be a mistake.
const (
	maxPartitions = 64      // sequences that are under way at once
	maxNewTokens  = 1 << 20 // no target has a longer context
	maxBatchRows  = 1 << 16
	leastStream   = 1 << 20 // less holds no sequence
	mostStream    = 1 << 50
)

// validate checks what no single flag can.
func (j *jobFlags) validate() error {
	switch {
	case j.prompts != "" && j.sequences != "":
		return badUsage("--prompts and --sequences exclude each other; give the one that your inputs are")
	case j.limit < 0:
		return badUsage("--limit must be 0 (all) or more, not %d", j.limit)
	case !safeName.MatchString(j.run):
		return badUsage("--run %q may only hold letters, digits, dot, dash and underscore", j.run)
	case j.parts < 1 || j.parts > maxPartitions:
		return badUsage("--partitions must be 1 to %d, not %d", maxPartitions, j.parts)
	case j.encoders < 0 || j.encoders > 1024:
		return badUsage("--encode-workers must be 0 (all cores) to 1024, not %d", j.encoders)
	case j.maxNew < 1 || j.maxNew > maxNewTokens:
		return badUsage("--max-new must be 1 to %d, not %d", maxNewTokens, j.maxNew)
	case j.batchRows < 1 || j.batchRows > maxBatchRows:
		return badUsage("--batch-rows must be 1 to %d, not %d", maxBatchRows, j.batchRows)
	case !(j.temp >= 0 && j.temp <= 100):
		return badUsage("--temperature must be 0 to 100, not %g", j.temp)
	case j.nats == "":
		return badUsage("--nats is empty; say embedded, or a URL such as nats://host:4222")
	}
	return nil
}
