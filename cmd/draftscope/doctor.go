package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"runtime"
	"time"

	"github.com/draftscope/draftscope/cmd/demo"
	"github.com/draftscope/draftscope/cuda"
	"github.com/draftscope/draftscope/cuda/cpu"
	"github.com/draftscope/draftscope/cuda/gpu"
	"github.com/draftscope/draftscope/data/query"
	"github.com/draftscope/draftscope/pipeline"
)

const doctorHelp = `usage: draftscope doctor [--nats URL] [--json]

Says what works on this machine: the backends and what they can do, the shipped
model, the stream, and DuckDB. Exits 3 when something that every job needs is missing.

examples:
  draftscope doctor
  draftscope doctor --nats nats://host:4222
`

// finding is one line of doctor.
type finding struct {
	What   string `json:"what"`
	State  string `json:"state"` // ok, absent (optional), or failed
	Detail string `json:"detail"`
}

const (
	stateOK     = "ok"
	stateAbsent = "absent"
	stateFailed = "failed"
)

func cmdDoctor(ctx context.Context, args []string, out streams) error {
	flags := newFlags("doctor", doctorHelp, out)
	nats := flags.String("nats", "embedded", "the JetStream server to try: embedded, or a `URL`")
	asJSON := flags.Bool("json", false, "print the findings as JSON")
	if err := parseNone(flags, args); err != nil {
		return err
	}
	found := []finding{
		{"program", stateOK, fmt.Sprintf("draftscope %s, %s, %s/%s, %d threads", version(), runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.GOMAXPROCS(0))},
		check("backend cpu", checkCPU),
		optionalCUDA(),
		check("shipped model", checkDemo),
		check("stream", func() (string, error) { return checkStream(ctx, *nats) }),
		optional("DuckDB", func() (string, error) { return query.Version(ctx) }),
	}
	failed := 0
	for _, f := range found {
		if f.State == stateFailed {
			failed++
		}
	}
	if *asJSON {
		if err := writeJSON(out.stdout, found); err != nil {
			return err
		}
	} else {
		for _, f := range found {
			fmt.Fprintf(out.stdout, "%-14s %-7s %s\n", f.What, f.State, oneLine(f.Detail))
		}
	}
	if failed > 0 {
		return withCode(exitMissing, fmt.Errorf("%d of %d checks failed; see above", failed, len(found)))
	}
	return nil
}

func check(what string, f func() (string, error)) finding {
	detail, err := f()
	if err != nil {
		return finding{what, stateFailed, err.Error()}
	}
	return finding{what, stateOK, detail}
}

// optional is check for what a job can do without.
func optional(what string, f func() (string, error)) finding {
	r := check(what, f)
	if r.State == stateFailed {
		r.State = stateAbsent
	}
	return r
}

// optionalCUDA is absent where there is no device, and failed where there is
// one that does not work: --backend auto would use it.
func optionalCUDA() finding {
	detail, err := checkCUDA()
	switch {
	case err == nil:
		return finding{"backend cuda", stateOK, detail}
	case errors.Is(err, cuda.ErrUnavailable):
		return finding{"backend cuda", stateAbsent, err.Error()}
	}
	return finding{"backend cuda", stateFailed, err.Error()}
}

// checkCPU has no judge but arithmetic: a product of ones is known.
func checkCPU() (string, error) {
	dev, err := cpu.New(cpu.Config{})
	if err != nil {
		return "", err
	}
	defer dev.Close()
	if err := tryDevice(dev); err != nil {
		return "", err
	}
	return describeDevice(dev)
}

// describeDevice is a device's name and what it can do.
func describeDevice(dev cuda.Device) (string, error) {
	limits, err := dev.Limits()
	return fmt.Sprintf("%s: %s", dev.Name(), limits), err
}

// checkCUDA compares a device with the processor.
func checkCUDA() (string, error) {
	dev, err := gpu.Open(gpu.Config{})
	if err != nil {
		return "", err
	}
	defer dev.Close()
	judge, err := cpu.New(cpu.Config{})
	if err != nil {
		return "", err
	}
	defer judge.Close()
	if err := selfTest(dev, judge); err != nil {
		return "", err
	}
	f32, err := describeDevice(dev)
	if err != nil {
		return "", err
	}
	half, err := gpu.Open(gpu.Config{Precision: gpu.BF16})
	if err != nil {
		return "", err
	}
	defer half.Close()
	limits, err := half.Limits()
	return fmt.Sprintf("%s; in bf16 %s", f32, limits), err
}

// tryDevice multiplies two small matrices whose product is known.
func tryDevice(dev cuda.Device) error {
	const m, n, k = 5, 7, 33
	buf, err := dev.New(m*k + n*k + m*n)
	if err != nil {
		return err
	}
	defer buf.Close()
	a := cuda.Matrix(buf, m, k)
	w := cuda.Tensor{Buf: buf, Off: m * k, Rows: n, Cols: k, Stride: k}
	dst := cuda.Tensor{Buf: buf, Off: m*k + n*k, Rows: m, Cols: n, Stride: n}
	ones := make([]float32, max(m, n)*k)
	for i := range ones {
		ones[i] = 1
	}
	got := make([]float32, m*n)
	if err := errors.Join(dev.Upload(a, ones[:m*k]), dev.Upload(w, ones[:n*k]), dev.Gemm(dst, a, w, false), dev.Download(got, dst)); err != nil {
		return err
	}
	for _, v := range got {
		if math.Abs(float64(v)-k) > 1e-6 {
			return fmt.Errorf("a product of ones gave %g, not %d", v, k)
		}
	}
	return nil
}

func checkDemo() (string, error) {
	bytes := 0
	for _, name := range append([]string{"target"}, drafterDirs()...) {
		b, err := fs.ReadFile(demo.FS(), name+"/model.safetensors")
		if err != nil {
			return "", err
		}
		bytes += len(b)
	}
	return fmt.Sprintf("target and %d drafters, %d MB", len(demo.Drafters()), bytes/1e6), nil
}

func drafterDirs() []string {
	var dirs []string
	for _, name := range demo.Drafters() {
		dirs = append(dirs, "drafters/"+name)
	}
	return dirs
}

// checkStream starts or reaches a server, and leaves nothing behind.
func checkStream(ctx context.Context, url string) (string, error) {
	dir, err := os.MkdirTemp("", "draftscope-doctor-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	start := time.Now()
	session, err := pipeline.Open(ctx, pipeline.Config{Run: "doctor", URL: url, Dir: dir})
	if err != nil {
		return "", err
	}
	defer session.Close()
	return fmt.Sprintf("%s JetStream answers after %s", url, time.Since(start).Round(time.Millisecond)), nil
}
