package writerbench

import (
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/memory"
	apq "github.com/apache/arrow/go/v17/parquet"
	apqcompress "github.com/apache/arrow/go/v17/parquet/compress"
	"github.com/apache/arrow/go/v17/parquet/pqarrow"
	"github.com/draftscope/draftscope/data/statefile"
	"github.com/draftscope/draftscope/data/statefile/statefiletest"
	"github.com/draftscope/draftscope/schemas"
	"github.com/parquet-go/parquet-go"
)

const (
	hidden = 5120
	layers = 5
	tokens = 256
)

// variant is one way to write the same states. run writes them all once and
// returns how many bytes that took.
type variant struct {
	name string
	run  func(tb testing.TB) int64
	took []float64 // seconds, one a round
	size int64
}

func (v *variant) median() float64 {
	s := slices.Sorted(slices.Values(v.took))
	return s[len(s)/2]
}

func (v *variant) best() float64 { return slices.Min(v.took) }

// processor is the processor time that this process took, in seconds. Other
// programs on the machine do not enter it.
func processor(tb testing.TB) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

func wall(testing.TB) float64 { return float64(time.Now().UnixNano()) / 1e9 }

// rounds runs every variant once a round, in turn, so that what disturbs the
// machine disturbs all of them.
func rounds(b *testing.B, clock func(testing.TB) float64, variants []*variant) {
	for _, v := range variants {
		v.size = v.run(b) // warm
	}
	for b.Loop() {
		for _, v := range variants {
			runtime.GC()
			start := clock(b)
			v.run(b)
			v.took = append(v.took, clock(b)-start)
		}
	}
}

// counter counts what is written and throws it away.
type counter struct{ n int64 }

func (c *counter) Write(b []byte) (int, error) {
	c.n += int64(len(b))
	return len(b), nil
}

// captured is a capture in memory, as a sink holds it and as other writers
// want it.
type captured struct {
	states [][]byte // [layers][tokens*hidden] of bf16
	norms  []float32
	floats []schemas.State // the same as rows of float32
	pages  [][]byte        // the same as byte-stream-split pages
	raw    float64         // bytes of bf16
}

func capture(seed uint64) *captured {
	c := &captured{states: statefiletest.Residual(seed, layers, tokens, hidden, schemas.BF16)}
	const width = 2 * hidden
	for l, st := range c.states {
		c.norms = statefile.AppendNorms(c.norms, schemas.BF16, hidden, st)
		c.raw += float64(len(st))
		for t := range tokens {
			c.floats = append(c.floats, schemas.State{SeqID: "p0000", Pos: int32(t), State: int32(l), Norm: c.norms[l*tokens+t], Vec: schemas.BF16.AppendFloats(nil, st[t*width:(t+1)*width])})
		}
		const perPage = (1 << 20) / (4 * hidden)
		for t := 0; t < tokens; t += perPage {
			part := st[t*width : min(t+perPage, tokens)*width]
			n := len(part) / 2
			page := make([]byte, 4*n)
			for i := range n {
				page[2*n+i], page[3*n+i] = part[2*i], part[2*i+1]
			}
			c.pages = append(c.pages, page)
		}
	}
	return c
}

func (c *captured) ours(cfg statefile.Config, norms bool) func(testing.TB) int64 {
	buf := make([]float32, 0, tokens)
	return func(tb testing.TB) int64 {
		var out counter
		w, err := statefile.NewWriter(&out, cfg)
		if err != nil {
			tb.Fatal(err)
		}
		for l, st := range c.states {
			n := c.norms[l*tokens : (l+1)*tokens]
			if norms {
				n = statefile.AppendNorms(buf[:0], cfg.DType, hidden, st)
				if err := w.Flush(); err != nil { // buf is used again
					tb.Fatal(err)
				}
			}
			if err := w.Write(statefile.Rows{SeqID: "p0000", State: int32(l), Norms: n, Raw: st}); err != nil {
				tb.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			tb.Fatal(err)
		}
		return out.n
	}
}

func (c *captured) plain(cfg statefile.Config) func(testing.TB) int64 {
	return func(tb testing.TB) int64 {
		var out counter
		w, err := statefile.NewPlainWriter(&out, cfg)
		if err != nil {
			tb.Fatal(err)
		}
		for l, st := range c.states {
			if err := w.Write(statefile.Rows{SeqID: "p0000", State: int32(l), Norms: c.norms[l*tokens : (l+1)*tokens], Raw: st}); err != nil {
				tb.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			tb.Fatal(err)
		}
		return out.n
	}
}

// stock is parquet-go as fast as it goes with its own ZSTD: a byte-stream
// split list without bounds, and its rows are float32 already.
func (c *captured) stock(tb testing.TB) int64 {
	var out counter
	vec := []string{"vec", "list", "element"}
	w := parquet.NewGenericWriter[schemas.State](&out, parquet.Compression(&parquet.Zstd), parquet.PageBufferSize(1<<20),
		parquet.SkipPageBounds(vec...), parquet.SkipPageStatistics(vec...), parquet.WriteBufferSize(0))
	const perGroup = (2 << 20) / (4 * hidden)
	for l := range layers {
		rows := c.floats[l*tokens : (l+1)*tokens]
		for len(rows) > 0 {
			n := min(perGroup, len(rows))
			if _, err := w.Write(rows[:n]); err != nil {
				tb.Fatal(err)
			}
			if err := w.Flush(); err != nil {
				tb.Fatal(err)
			}
			rows = rows[n:]
		}
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return out.n
}

func (c *captured) codec() func(testing.TB) int64 {
	var codec statefile.PlaneCodec
	var dst []byte
	return func(tb testing.TB) (n int64) {
		for _, page := range c.pages {
			var err error
			if dst, err = codec.Encode(dst, page); err != nil {
				tb.Fatal(err)
			}
			n += int64(len(dst))
		}
		return n
	}
}

// arrowWriter is arrow v17's Parquet writer with ZSTD and no dictionary. It
// has no byte-stream split. Its record is made before.
func (c *captured) arrowWriter(tb testing.TB) func(testing.TB) int64 {
	mem := memory.NewGoAllocator()
	rec := schemas.Record(mem, schemas.Envelope{Table: schemas.TableStates, Run: "r"}, c.floats)
	tb.Cleanup(rec.Release)
	return func(tb testing.TB) int64 {
		var out counter
		w, err := pqarrow.NewFileWriter(rec.Schema(), &out,
			apq.NewWriterProperties(apq.WithCompression(apqcompress.Codecs.Zstd), apq.WithDictionaryDefault(false), apq.WithStats(false), apq.WithMaxRowGroupLength((2<<20)/(4*hidden))),
			pqarrow.NewArrowWriterProperties())
		if err != nil {
			tb.Fatal(err)
		}
		if err := w.WriteBuffered(rec); err != nil {
			tb.Fatal(err)
		}
		if err := w.Close(); err != nil {
			tb.Fatal(err)
		}
		return out.n
	}
}

// BenchmarkOneCore writes the same states in every way on one core, to
// nowhere. The rates are bytes of bf16 over the median of processor time.
func BenchmarkOneCore(b *testing.B) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	c := capture(1)
	cfg := statefile.Config{DType: schemas.BF16, Hidden: hidden, Workers: 1}
	ours := &variant{name: "ours", run: c.ours(cfg, false)}
	withNorms := &variant{name: "ours-and-norms", run: c.ours(cfg, true)}
	plain := &variant{name: "plain", run: c.plain(cfg)}
	codec := &variant{name: "codec", run: c.codec()}
	stock := &variant{name: "parquet-go", run: c.stock}
	arrow17 := &variant{name: "arrow-v17", run: c.arrowWriter(b)}
	all := []*variant{ours, withNorms, codec, plain, stock, arrow17}
	rounds(b, processor, all)
	floor, low, high := statefiletest.Floor(c.states...)
	for _, v := range all {
		b.Logf("%-15s %7.0f MB/s %7.4f of the bytes, %.4f of their entropy", v.name, c.raw/1e6/v.median(), float64(v.size)/c.raw, float64(v.size)/floor)
	}
	b.Logf("entropy: low byte %.3f bits, high byte %.3f", low, high)
	b.ReportMetric(stock.median()/ours.median(), "x-parquet-go")
	b.ReportMetric(arrow17.median()/ours.median(), "x-arrow")
	b.ReportMetric(codec.median()/ours.median(), "x-codec")
	b.ReportMetric(plain.median()/ours.median(), "x-plain")
	b.ReportMetric(c.raw/1e6/ours.median(), "rawMB/s")
	b.ReportMetric(float64(ours.size)/floor, "of-entropy")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkTwoCores compares two goroutines with one by the clock on the
// wall. On a busy machine only the best rounds say something.
func BenchmarkTwoCores(b *testing.B) {
	if runtime.NumCPU() < 2 {
		b.Skip("one core")
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	c := capture(1)
	one := &variant{run: c.ours(statefile.Config{DType: schemas.BF16, Hidden: hidden, Workers: 1}, false)}
	two := &variant{run: c.ours(statefile.Config{DType: schemas.BF16, Hidden: hidden, Workers: 2}, false)}
	rounds(b, wall, []*variant{one, two})
	b.ReportMetric(one.median()/two.median(), "x-one-median")
	b.ReportMetric(one.best()/two.best(), "x-one-best")
	b.ReportMetric(c.raw/1e6/two.best(), "rawMB/s-best")
	b.ReportMetric(0, "ns/op")
}
