package data

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/draftscope/draftscope/data/statefile/statefiletest"
	"github.com/draftscope/draftscope/schemas"
)

// grid lists all values of a rounding in units of the scale, by their
// definition.
func grid(r Rounding) (vals []float64) {
	if r == Int8 {
		for code := -127; code <= 127; code++ {
			vals = append(vals, float64(code))
		}
		return vals
	}
	for code := range 0x7f { // 0x7f is NaN
		exp, m := code>>3, float64(code&7)
		v := math.Ldexp(1+m/8, exp-7)
		if exp == 0 {
			v = math.Ldexp(m/8, -6)
		}
		vals = append(vals, v, -v)
	}
	slices.Sort(vals)
	return vals
}

func TestRoundingTakesTheNearestValueOfTheGrid(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, r := range []Rounding{Int8, E4M3} {
		vals := grid(r)
		if got := slices.Max(vals); got != r.limit() {
			t.Errorf("%s: the grid ends at %g, want %g", r, got, r.limit())
		}
		check := func(x float64) {
			got := r.nearest(x)
			i, found := slices.BinarySearch(vals, got)
			if !found {
				t.Fatalf("%s: %g became %g, which is not of the grid", r, x, got)
			}
			for _, j := range []int{i - 1, i + 1} {
				if j >= 0 && j < len(vals) && math.Abs(vals[j]-x) < math.Abs(got-x) {
					t.Fatalf("%s: %g became %g, and %g is nearer", r, x, got, vals[j])
				}
			}
		}
		for i, v := range vals {
			check(v)
			if i > 0 {
				check((v + vals[i-1]) / 2)
			}
		}
		for range 20_000 {
			check((2*rng.Float64() - 1) * r.limit() * math.Exp2(-20*rng.Float64()))
		}
	}
}

func TestTheScaleIsTheSmallestThatReaches(t *testing.T) {
	for _, r := range []Rounding{Int8, E4M3} {
		for _, largest := range []float64{r.limit(), r.limit() / 2, r.limit() * 1.0001, 1, 3e-3, 1e30, 1e-30} {
			scale, inverse := r.scale(largest)
			if scale*inverse != 1 || scale*r.limit() < largest || scale/2*r.limit() >= largest {
				t.Errorf("%s: scale %g for %g", r, scale, largest)
			}
		}
		if scale, _ := r.scale(1e-300); scale != math.Ldexp(1, -120) {
			t.Errorf("%s: scale %g of a row that is nearly zero", r, scale)
		}
	}
}

func TestARoundedRunKeepsWhatItPromises(t *testing.T) {
	for _, r := range []Rounding{Int8, E4M3} {
		for _, dtype := range []schemas.DType{schemas.BF16, schemas.F32} {
			t.Run(fmt.Sprintf("%s of %s", r, dtype), func(t *testing.T) {
				mem := checked(t)
				run := testRun("r1", 256, dtype)
				run.Rounding = r
				d := mustCreate(t, t.TempDir(), run)
				s := mustSink(t, d)
				defer s.Close()
				captured, want := map[string]sample{}, map[string]sample{}
				for i := range 3 {
					id := fmt.Sprintf("p%d", i)
					smp := newSample(run, id, 20+i)
					captured[id] = smp
					feed(t, s, id, uint64(i+1), smp.records(t, mem, 8))
					if err := s.Commit(t.Context()); err != nil {
						t.Fatal(err)
					}
					for k, raw := range smp.states {
						var e RoundingError
						smp.states = slices.Clone(smp.states)
						smp.states[k] = r.round(dtype, 256, raw, &e)
					}
					want[id] = smp
				}
				compareReplay(t, d, "r1", want)
				// A repeat of the capture is one, though other bytes are stored.
				feed(t, s, "p1", 9, captured["p1"].records(t, mem, 8))
				if got := s.Counts(); got.Repeats != 1 || got.Stored != 3 {
					t.Errorf("%+v, want one repeat", got)
				}
				checkErrors := func() {
					t.Helper()
					got, err := d.RoundedStates("r1")
					if err != nil || len(got.States) != 3 || got.Encoding != r {
						t.Fatalf("%+v, %v", got, err)
					}
					if raw := int64(63 * 3 * 256 * dtype.Size()); got.Captured != raw || got.Lossless >= raw || got.Lossless < raw/2 || got.Bytes >= got.Lossless || got.Bytes < raw/8 {
						t.Errorf("%d bytes, %d without loss, %d captured; want less each, and %d captured", got.Bytes, got.Lossless, got.Captured, raw)
					}
					for k, e := range got.States {
						least := 1.0
						for id := range want {
							for p := range captured[id].tokens {
								least = min(least, cosine(rowOf(captured[id], k, p), rowOf(want[id], k, p)))
							}
						}
						if math.Abs(e.MinCosine-least) > 1e-12 || e.MinCosine > e.MeanCosine() {
							t.Errorf("state %d: least cosine %g, want %g; mean %g", e.State, e.MinCosine, least, e.MeanCosine())
						}
						var x, y []float32
						for id := range want {
							x = dtype.AppendFloats(x, captured[id].states[k])
							y = dtype.AppendFloats(y, want[id].states[k])
						}
						var num, den float64
						for i := range x {
							num += math.Pow(float64(x[i])-float64(y[i]), 2)
							den += math.Pow(float64(x[i]), 2)
						}
						if want := math.Sqrt(num / den); e.State != run.States[k] || e.Rows != 63 || math.Abs(e.RelL2()-want) > 1e-9 {
							t.Errorf("state %d: %d rows with error %g, want %g", e.State, e.Rows, e.RelL2(), want)
						}
						if c := e.MeanCosine(); c < 0.999 || c >= 1 || e.RelL2() == 0 {
							t.Errorf("state %d: mean cosine %g, error %g", e.State, c, e.RelL2())
						}
					}
				}
				checkErrors()
				if _, err := d.Compact(t.Context(), "r1", CompactConfig{}); err != nil {
					t.Fatal(err)
				}
				checkErrors()
				compareReplay(t, d, "r1", want)
				o, err := openPart(partsOf(t, d, "states")[0])
				if err != nil {
					t.Fatal(err)
				}
				defer o.Close()
				if got := o.kv(keyEncoding); got != string(r) {
					t.Errorf("the footer says %q, want %s", got, r)
				}
				if desc, err := Describe(d.Dir()); err != nil || !strings.Contains(desc.String(), "states are rounded to "+string(r)) {
					t.Errorf("%v, %v", desc, err)
				}
				// The same run without rounding is another one.
				run.Rounding = Lossless
				if err := d.AddRun(run); !errors.Is(err, ErrMismatch) {
					t.Errorf("%v, want ErrMismatch", err)
				}
			})
		}
	}
}

func TestARoundingNobodyKnowsIsRefused(t *testing.T) {
	run := testRun("r1", 8, schemas.F32)
	run.Rounding = "int4"
	if err := mustCreate(t, t.TempDir()).AddRun(run); err == nil {
		t.Error("int4 is accepted")
	}
	b, err := json.Marshal(testRun("r1", 8, schemas.F32))
	if err != nil || strings.Contains(string(b), "states_encoding") {
		t.Errorf("a lossless run's record is %s (%v)", b, err)
	}
}

func TestAFaultyRowIsFoundThoughItIsRounded(t *testing.T) {
	run := testRun("r1", 16, schemas.BF16)
	run.Rounding = E4M3
	d := mustCreate(t, t.TempDir(), run)
	s := mustSink(t, d)
	defer s.Close()
	smp := newSample(run, "p0", 9)
	smp.states[1][2*16*4], smp.states[1][2*16*4+1] = 0x80, 0x7f // an infinity in row 4
	feed(t, s, "p0", 1, smp.records(t, checked(t), 4))
	if err := s.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	faults, err := d.Faults("r1")
	if err != nil || len(faults) != 1 || !strings.Contains(faults[0].Detail, "state 2, row 4: NaN count 0, Inf count 1") {
		t.Errorf("faults %+v (%v), want the infinity of row 4", faults, err)
	}
}

// What the roundings cost and save on states of the width of a large target.
func TestRoundedStatesTakeLess(t *testing.T) {
	sizes, vec := map[Rounding]int64{}, int64(0)
	for _, r := range []Rounding{Lossless, E4M3, Int8} {
		run := testRun("r1", 2560, schemas.BF16)
		run.Rounding = r
		d := mustCreate(t, t.TempDir(), run)
		s := mustSink(t, d)
		smp := newSample(testRun("r1", 1, schemas.BF16), "p0", 128)
		smp.spec.Hidden = 2560
		smp.states = statefiletest.Residual(1, 3, 128, 2560, schemas.BF16)
		feed(t, s, "p0", 1, smp.records(t, memory.NewGoAllocator(), 64))
		if err := errors.Join(s.Commit(t.Context()), s.Close()); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(partsOf(t, d, "states")[0])
		if err != nil {
			t.Fatal(err)
		}
		sizes[r] = info.Size()
		lost, err := d.RoundedStates("r1")
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%-9s %.4f of raw", r, float64(info.Size())/(3*128*2560*2))
		if lost == nil {
			o, err := openPart(partsOf(t, d, "states")[0])
			if err != nil {
				t.Fatal(err)
			}
			vec = o.vecBytes()
			o.Close()
			continue
		}
		if d := float64(vec)/float64(lost.Lossless) - 1; d < 0 || d > 0.002 {
			t.Errorf("vec takes %d bytes without loss, and is said to take %d", vec, lost.Lossless)
		}
		for _, e := range lost.States {
			t.Logf("  state %d: relative error %.2e, mean cosine %.6f", e.State, e.RelL2(), e.MeanCosine())
		}
	}
	if sizes[E4M3] > sizes[Lossless]*7/10 || sizes[Int8] > sizes[Lossless]*7/10 {
		t.Errorf("sizes %v: want roundings to take at most 0.7 of lossless", sizes)
	}
}

func rowOf(s sample, state, pos int) []float32 {
	width := s.spec.Hidden * s.spec.DType.Size()
	return s.spec.DType.AppendFloats(nil, s.states[state][pos*width:(pos+1)*width])
}

func cosine(x, y []float32) float64 {
	var xx, yy, xy float64
	for i := range x {
		a, b := float64(x[i]), float64(y[i])
		xx, yy, xy = xx+a*a, yy+b*b, xy+a*b
	}
	return xy / math.Sqrt(xx*yy)
}

func BenchmarkRounding(b *testing.B) {
	raw := statefiletest.Residual(1, 1, 128, 5120, schemas.BF16)[0]
	for _, r := range []Rounding{Int8, E4M3} {
		b.Run(string(r), func(b *testing.B) {
			b.SetBytes(int64(len(raw)))
			var e RoundingError
			for b.Loop() {
				r.round(schemas.BF16, 5120, raw, &e)
			}
		})
	}
}
