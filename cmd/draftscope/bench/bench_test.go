package bench

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/draftscope/draftscope/schemas"
)

var tiny = Shape{Name: "tiny", Hidden: 64, States: 2}

func TestEveryStageIsMeasuredAndLeavesNothingBehind(t *testing.T) {
	dir := t.TempDir()
	var said []string
	res, err := Run(t.Context(), Config{Shape: tiny, Bytes: 40e6, Rounds: 1, Dir: dir, Progress: func(s string) { said = append(said, s) }})
	if err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%d files are left: %v", len(left), err)
	}
	for _, f := range append(res.Limits, res.Stages...) {
		if !(f.MBps > 0) || f.Least > f.MBps || f.Most < f.MBps {
			t.Errorf("%s: %g MB/s, %g to %g", f.Name, f.MBps, f.Least, f.Most)
		}
	}
	if len(res.Limits) != 4 || len(res.Stages) != 14 || len(said) != 1+4+14 {
		t.Errorf("%d limits, %d stages, %d lines of progress", len(res.Limits), len(res.Stages), len(said))
	}
	for _, r := range res.Ratios {
		if math.IsNaN(r.Value) || r.Value <= 0 {
			t.Errorf("%s is %g", r.Name, r.Value)
		}
		if r.Holds != (r.AtMost && r.Value <= r.Bar || !r.AtMost && r.Value >= r.Bar) {
			t.Errorf("%s: %g against %g holds: %t", r.Name, r.Value, r.Bar, r.Holds)
		}
	}
	if res.Stored < res.Entropy || res.Stored > 1.2*res.Entropy {
		t.Errorf("stored at %.3f of raw, the entropy is %.3f", res.Stored, res.Entropy)
	}
	var text bytes.Buffer
	if err := res.Print(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"memcpy, 1 MB, hot", "source to renamed Parquet to ack", "core NATS over TCP / half of loopback"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, text.String())
		}
	}
	if _, err := json.Marshal(res); err != nil {
		t.Error(err)
	}
}

func TestOnlyWhatIsNamedIsMeasured(t *testing.T) {
	res, err := Run(t.Context(), Config{Shape: tiny, Bytes: 20e6, Rounds: 1, Dir: t.TempDir(), Only: []string{"back", "parse"}})
	if err != nil {
		t.Fatal(err)
	}
	if len(res.Stages) != 2 || len(res.Limits) != 4 || len(res.Ratios) != 1 {
		t.Errorf("got %+v", res)
	}
}

func TestWhatCannotBeMeasuredIsRefused(t *testing.T) {
	good := Config{Shape: tiny, Bytes: 1e6, Rounds: 1}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Config){
		"hidden": func(c *Config) { c.Shape.Hidden = 0 },
		"states": func(c *Config) { c.Shape.States = 1 },
		"token":  func(c *Config) { c.Shape = Shape{Hidden: 1 << 16, States: 256} },
		"bytes":  func(c *Config) { c.Bytes = -1 },
		"stream": func(c *Config) { c.StreamBytes = 1 << 20 },
		"only":   func(c *Config) { c.Only = []string{"copy"} },
		"rounds": func(c *Config) { c.Rounds = -1 },
	} {
		c := good
		change(&c)
		if err := c.Validate(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := ShapeOf("gpt"); err == nil || !strings.Contains(err.Error(), "qwen3.6-27b") {
		t.Errorf("an unknown shape: %v", err)
	}
}

func TestRatiosAreTakenWithinARound(t *testing.T) {
	// The second round is ten times slower in all; no ratio may notice.
	samples := map[string][]sample{}
	for name, rate := range map[string]float64{
		"copy": 40_000, "copy-large": 20_000, "disk": 2000, "loopback": 4000, "parse": 400_000, "decode": 40_000,
		"core-nats": 1600, "jetstream": 1000, "stream-tcp": 800, "plane": 400, "plane-stock": 100,
	} {
		samples[name] = []sample{{rate: rate}, {rate: rate / 10}}
	}
	samples["stream"] = []sample{{rate: 1000, cpu: 2}, {rate: 100, cpu: 2}}
	samples["store"] = []sample{{cpu: 2}, {cpu: 2}}
	for i := range samples["plane"] {
		samples["plane"][i].cpu = 4
	}
	want := map[string]float64{
		"time to decode 1 MB / to copy it, digest apart": 0.1,
		"the same with the digest compared":              1,
		"core NATS over TCP / half of loopback":          0.8,
		"JetStream file in this process / loopback":      0.25,
		"JetStream file over TCP / loopback":             0.2,
		"the same / a bare JetStream over TCP":           0.8,
		"the plane / its bound of processor time":        (0.8 + 0.08) / 2, // time does enter here: a slow round fell short of its own bound
		"the plane / the plane with stock zstd":          4,

		"processor time of stream and store alone / of the plane": 1,
	}
	for _, r := range ratios(samples, 2) {
		if w, ok := want[r.Name]; ok && math.Abs(r.Value-w) > 1e-9 {
			t.Errorf("%s is %g, want %g", r.Name, r.Value, w)
		}
		delete(want, r.Name)
	}
	for name := range want {
		t.Errorf("%q is missing", name)
	}
}

func TestCostIsProcessorTimeWhereItIsKnown(t *testing.T) {
	slow, fast := sample{rate: 10, cpu: 0.1}, sample{rate: 40, cpu: 0.2}
	if cost(slow) >= cost(fast) || cost(sample{rate: 10}) <= cost(sample{rate: 40}) {
		t.Error("the order is wrong")
	}
}

func TestTheMedianIsTheMiddle(t *testing.T) {
	for want, in := range map[float64][]float64{0: nil, 3: {3}, 2: {3, 1, 2}, 2.5: {4, 1, 2, 3}} {
		if got := median(in); got != want {
			t.Errorf("median of %v is %g, want %g", in, got, want)
		}
	}
}

func TestEntropyIsThatOfTheTwoBytes(t *testing.T) {
	every := make([]byte, 0, 512)
	for i := range 256 {
		every = append(every, byte(i), 7) // eight bits and none
	}
	if got := entropy([][]byte{every}); math.Abs(got-0.5) > 1e-12 {
		t.Errorf("got %g", got)
	}
}

func TestSyntheticStatesLookLikeStates(t *testing.T) {
	shape := Shape{Hidden: 512, States: 4}
	states := newSynthetic(shape, 1).states(64, true)
	if len(states) != 4 || len(states[0]) != 64*512*2 {
		t.Fatalf("%d states of %d bytes", len(states), len(states[0]))
	}
	vals := schemas.BF16.AppendFloats(nil, states[1])
	var most, square float64
	for i, v := range vals {
		if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
			t.Fatalf("value %d is %v", i, v)
		}
		if i < 512 {
			most = max(most, math.Abs(float64(v)))
		} else {
			square += float64(v) * float64(v)
		}
	}
	if rms := math.Sqrt(square / float64(len(vals)-512)); most < 100*rms {
		t.Errorf("the first token's largest value is %g, the others' RMS %g", most, rms)
	}
	if e := entropy(states); e < 0.65 || e > 0.75 {
		t.Errorf("entropy is %.3f of raw", e)
	}
	if !bytes.Equal(states[2], newSynthetic(shape, 1).states(64, true)[2]) {
		t.Error("the same seed gave other states")
	}
}

func BenchmarkStages(b *testing.B) {
	shape, err := ShapeOf("qwen3.6-27b")
	if err != nil {
		b.Fatal(err)
	}
	run := &bench{cfg: Config{Shape: shape, Bytes: 500e6}.withDefaults(), work: b.TempDir()}
	if run.pool, err = newPool(shape); err != nil {
		b.Fatal(err)
	}
	for _, s := range run.steps() {
		b.Run(s.name, func(b *testing.B) {
			var got sample
			for b.Loop() {
				if got, err = run.measure(b.Context(), s); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(got.rate, "MB/s")
			b.ReportMetric(got.cpu, "cpu-s/GB")
		})
	}
}
