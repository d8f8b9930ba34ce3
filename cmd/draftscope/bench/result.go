package bench

import (
	"fmt"
	"io"
	"runtime"
	"strings"
	"text/tabwriter"
)

// Result is what a run has found. Its JSON is the report of --json.
type Result struct {
	Shape   Shape    `json:"shape"`
	Bytes   int64    `json:"bytes"`
	Rounds  int      `json:"rounds"`
	Cores   int      `json:"cores"`
	System  string   `json:"system"`
	Limits  []Figure `json:"limits"`
	Stages  []Figure `json:"stages"`
	Ratios  []Ratio  `json:"ratios"`
	Entropy float64  `json:"entropy"` // of the two bytes of bf16, order 0, as a share of raw
	Stored  float64  `json:"stored"`  // the dataset's size as a share of raw
}

// Figure is one limit or one stage.
type Figure struct {
	Name  string  `json:"name"`
	What  string  `json:"what"`
	MBps  float64 `json:"mb_per_s"`
	Least float64 `json:"mb_per_s_least"` // of all rounds
	Most  float64 `json:"mb_per_s_most"`
	// CPU is processor time a GB, 0 where the system does not tell.
	CPU    float64 `json:"cpu_s_per_gb"`
	Limit  string  `json:"limit,omitempty"`
	PeakMB float64 `json:"peak_mb"` // most resident memory
}

// Ratio is one thing that is demanded of the data plane.
type Ratio struct {
	Name   string  `json:"name"`
	Value  float64 `json:"value"`
	Bar    float64 `json:"bar"`
	AtMost bool    `json:"at_most"` // otherwise at least
	Holds  bool    `json:"holds"`
}

func (b *bench) result(steps []step, samples map[string][]sample) *Result {
	r := &Result{
		Shape: b.cfg.Shape, Bytes: b.cfg.Bytes, Rounds: b.cfg.Rounds, Cores: cores(),
		System:  fmt.Sprintf("%s/%s, %s", runtime.GOOS, runtime.GOARCH, runtime.Version()),
		Entropy: b.pool.entropy, Stored: float64(b.stored) / float64(max(1, b.storedRaw)),
	}
	for _, s := range steps {
		f := Figure{Name: s.name, What: s.what, Limit: s.limit}
		var rates, cpus []float64
		for i, got := range samples[s.name] {
			rates, cpus = append(rates, got.rate), append(cpus, got.cpu)
			f.PeakMB = max(f.PeakMB, float64(got.peak)/1e6)
			if i == 0 {
				f.Least = got.rate
			}
			f.Least, f.Most = min(f.Least, got.rate), max(f.Most, got.rate)
		}
		f.MBps, f.CPU = median(rates), median(cpus)
		if s.limit == "" {
			r.Limits = append(r.Limits, f)
		} else {
			r.Stages = append(r.Stages, f)
		}
	}
	r.Ratios = ratios(samples, float64(r.Cores))
	var most float64
	for _, f := range r.Stages {
		if strings.HasPrefix(f.Name, "plane") && f.Name != "plane-stock" {
			most = max(most, f.PeakMB)
		}
	}
	if most > 0 {
		r.Ratios = append(r.Ratios, newRatio("peak memory of the plane, MiB", most*1e6/(1<<20), 512, true))
	}
	return r
}

func newRatio(name string, value, bar float64, atMost bool) Ratio {
	return Ratio{Name: name, Value: value, Bar: bar, AtMost: atMost, Holds: atMost && value <= bar || !atMost && value >= bar}
}

// ratios are medians of what each round's own figures give. One that needs
// what was not measured is left out.
func ratios(samples map[string][]sample, cores float64) []Ratio {
	var out []Ratio
	type of = func(name string) sample
	demand := func(name string, bar float64, atMost bool, needs []string, f func(of) float64) {
		for _, n := range needs {
			if len(samples[n]) == 0 {
				return
			}
		}
		var v []float64
		for i := range samples[needs[0]] {
			v = append(v, f(func(name string) sample { return samples[name][i] }))
		}
		out = append(out, newRatio(name, median(v), bar, atMost))
	}
	demand("time to decode 1 MB / to copy it, digest apart", 0.2, true, []string{"parse", "copy"},
		func(s of) float64 { return cost(s("parse")) / cost(s("copy")) })
	demand("the same with the digest compared", 0.2, true, []string{"decode", "copy"},
		func(s of) float64 { return cost(s("decode")) / cost(s("copy")) })
	demand("core NATS over TCP / half of loopback", 0.7, false, []string{"core-nats", "loopback"},
		func(s of) float64 { return s("core-nats").rate / (s("loopback").rate / 2) })
	demand("JetStream file in this process / loopback", 0.18, false, []string{"stream", "loopback"},
		func(s of) float64 { return s("stream").rate / s("loopback").rate })
	demand("JetStream file over TCP / loopback", 0.18, false, []string{"stream-tcp", "loopback"},
		func(s of) float64 { return s("stream-tcp").rate / s("loopback").rate })
	demand("the same / a bare JetStream over TCP", 0.75, false, []string{"stream-tcp", "jetstream"},
		func(s of) float64 { return s("stream-tcp").rate / s("jetstream").rate })
	if cpuTime() > 0 {
		// What the cores would reach if they did nothing but the stages'
		// work, each at the cost that it has alone.
		parts := []string{"plane", "stream", "store"}
		alone := func(s of) float64 { return s("stream").cpu + s("store").cpu }
		demand("the plane / its bound of processor time", 0.75, false, parts,
			func(s of) float64 { return s("plane").rate / (1000 * cores / alone(s)) })
		demand("processor time of stream and store alone / of the plane", 0.75, false, parts,
			func(s of) float64 { return alone(s) / s("plane").cpu })
	}
	demand("the plane / the plane with stock zstd", 2.3, false, []string{"plane", "plane-stock"},
		func(s of) float64 { return s("plane").rate / s("plane-stock").rate })
	return out
}

// cost is what a byte takes of one thread's work: processor time, which other
// programs hardly touch, or the clock's where the system does not tell.
func cost(s sample) float64 {
	if s.cpu > 0 {
		return s.cpu
	}
	return 1 / s.rate
}

// Print writes r for people.
func (r *Result) Print(w io.Writer) error {
	fmt.Fprintf(w, "%s: %d states of %d bf16 values, %d bytes a token; %.3g GB a stage, %d rounds; %d threads, %s\n\n",
		r.Shape.Name, r.Shape.States, r.Shape.Hidden, r.Shape.tokenBytes(), float64(r.Bytes)/1e9, r.Rounds, r.Cores, r.System)
	limit := map[string]float64{}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "MB/s\tleast\tmost\t\t\tlimit\t\t")
	for _, f := range r.Limits {
		limit[f.Name] = f.MBps
		fmt.Fprintf(t, "%.0f\t%.0f\t%.0f\t  %s\t\n", f.MBps, f.Least, f.Most, f.What)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	t = tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "MB/s\tleast\tmost\tof limit\t\tCPU s/GB\tpeak MB\tstage\t")
	for _, f := range r.Stages {
		fmt.Fprintf(t, "%.0f\t%.0f\t%.0f\t%.2f\t%s\t%.2f\t%.0f\t%s\t\n", f.MBps, f.Least, f.Most, f.MBps/limit[f.Limit], f.Limit, f.CPU, f.PeakMB, f.What)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	if r.Stored > 0 {
		fmt.Fprintf(w, "stored: %.3f of raw; order-0 entropy of the two bytes: %.3f\n\n", r.Stored, r.Entropy)
	}
	for _, q := range r.Ratios {
		sign, verdict := ">=", "holds"
		if q.AtMost {
			sign = "<="
		}
		if !q.Holds {
			verdict = "does not hold"
		}
		if _, err := fmt.Fprintf(w, "%8.3g  %s %-5g %-14s %s\n", q.Value, sign, q.Bar, verdict, q.Name); err != nil {
			return err
		}
	}
	return nil
}
