package backendtest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// deltaTolerance is the relative L2 distance from float64 that an output and
// a final state may have. bf16 anywhere in the state would be 1e-2.
const deltaTolerance = 2e-6

// deltaRun is a call of DeltaRule in plain slices.
type deltaRun struct {
	q, k, v, a, b, aLog, dtBias, state []float32
	rows, hk, hv, dk, dv               int

	wantOut, wantState []float64 // the oracle's, once check has asked it
}

// newDelta draws a run whose decay alpha lies about the given one.
func newDelta(rows, hk, hv, dk, dv int, alpha float64) *deltaRun {
	r := &deltaRun{
		q: random(1, rows, hk*dk), k: random(2, rows, hk*dk), v: random(3, rows, hv*dv),
		a: random(4, rows, hv), b: random(5, rows, hv),
		aLog: make([]float32, hv), dtBias: random(6, 1, hv), state: random(7, hv*dk, dv),
		rows: rows, hk: hk, hv: hv, dk: dk, dv: dv,
	}
	for h := range r.aLog {
		r.aLog[h] = float32(math.Log(-math.Log(alpha)))
	}
	return r
}

// run computes rows in calls of cut rows and returns outputs and final state.
func (r *deltaRun) run(t testing.TB, l *lab, cut, chunk int) (out, state []float32) {
	t.Helper()
	s := l.put(t, r.state, r.dv)
	aLog, dtBias := l.put(t, r.aLog, r.hv), l.put(t, r.dtBias, r.hv)
	for lo := 0; lo < r.rows; lo += cut {
		hi := min(lo+cut, r.rows)
		dst := l.room(t, hi-lo, r.hv*r.dv)
		must(t, l.d.DeltaRule(dst, cuda.DeltaArgs{
			Q: l.put(t, slice(r.q, r.hk*r.dk, lo, hi), r.hk*r.dk), K: l.put(t, slice(r.k, r.hk*r.dk, lo, hi), r.hk*r.dk),
			V: l.put(t, slice(r.v, r.hv*r.dv, lo, hi), r.hv*r.dv),
			A: l.put(t, slice(r.a, r.hv, lo, hi), r.hv), B: l.put(t, slice(r.b, r.hv, lo, hi), r.hv),
			ALog: aLog, DTBias: dtBias, State: s,
			KeyHeads: r.hk, ValHeads: r.hv, KeyDim: r.dk, ValDim: r.dv, Chunk: chunk,
		}))
		out = append(out, l.get(t, dst)...)
	}
	return out, l.get(t, s)
}

// oracle is the plain recurrence in float64.
func (r *deltaRun) oracle() (out, state []float64) {
	out = make([]float64, r.rows*r.hv*r.dv)
	for _, v := range r.state {
		state = append(state, float64(v))
	}
	unit := func(x []float32) []float64 {
		sum := 1e-6
		for _, v := range x {
			sum += float64(v) * float64(v)
		}
		y := make([]float64, len(x))
		for i, v := range x {
			y[i] = float64(v) / math.Sqrt(sum)
		}
		return y
	}
	for t := range r.rows {
		for h := range r.hv {
			kh := (t*r.hk + h/(r.hv/r.hk)) * r.dk
			q, k := unit(r.q[kh:kh+r.dk]), unit(r.k[kh:kh+r.dk])
			beta := 1 / (1 + math.Exp(-float64(r.b[t*r.hv+h])))
			x := float64(r.a[t*r.hv+h]) + float64(r.dtBias[h])
			alpha := math.Exp(-math.Exp(float64(r.aLog[h])) * math.Log1p(math.Exp(x)))
			s := state[h*r.dk*r.dv : (h+1)*r.dk*r.dv]
			for j := range r.dv {
				var seen float64
				for i := range r.dk {
					s[i*r.dv+j] *= alpha
					seen += s[i*r.dv+j] * k[i]
				}
				u := beta * (float64(r.v[(t*r.hv+h)*r.dv+j]) - seen)
				for i := range r.dk {
					s[i*r.dv+j] += k[i] * u
					out[(t*r.hv+h)*r.dv+j] += s[i*r.dv+j] * q[i] / math.Sqrt(float64(r.dk))
				}
			}
		}
	}
	return out, state
}

// check compares a run with the oracle. The values must not change between
// checks.
func (r *deltaRun) check(t *testing.T, l *lab, cut, chunk int) {
	t.Helper()
	out, state := r.run(t, l, cut, chunk)
	if r.wantOut == nil {
		r.wantOut, r.wantState = r.oracle()
	}
	if d := distance(out, r.wantOut); !(d <= deltaTolerance) {
		t.Errorf("outputs are %.2g from float64, allowed %.2g", d, deltaTolerance)
	}
	if d := distance(state, r.wantState); !(d <= deltaTolerance) {
		t.Errorf("the state is %.2g from float64, allowed %.2g", d, deltaTolerance)
	}
}

func testDeltaRule(t *testing.T, l *lab) {
	for _, lay := range layouts {
		t.Run(lay.name, func(t *testing.T) {
			for _, e := range edges() {
				t.Run(strconv.Itoa(e), func(t *testing.T) {
					for _, r := range []*deltaRun{
						newDelta(e, 1, 2, 16, 24, .9),
						newDelta(20, 1, 1, e, 5, .99),
						newDelta(20, 1, 1, 7, e, .99),
					} {
						for _, chunk := range []int{0, 1, 17, 64} {
							r.check(t, l.in(lay), r.rows, chunk)
						}
					}
				})
			}
			newDelta(70, 2, 6, 32, 16, .97).check(t, l.in(lay), 70, 0)
		})
	}
	t.Run("long memory", func(t *testing.T) {
		rows := 2048
		if testing.Short() {
			rows = 200
		}
		r := newDelta(rows, 1, 2, 64, 48, .97)
		rng := rand.New(rand.NewPCG(9, 9))
		for i := range r.a {
			// softplus(a + dt_bias) is what -log(alpha) is a multiple of;
			// A_log 0 and these give alpha in 0.97..0.9999.
			g := -math.Log(.97 + (.9999-.97)*rng.Float64())
			r.a[i] = float32(math.Log(math.Expm1(g)))
		}
		clear(r.dtBias)
		clear(r.aLog)
		for _, chunk := range []int{1, 0, 64} {
			t.Run(fmt.Sprintf("chunk %d", chunk), func(t *testing.T) { r.check(t, l, r.rows, chunk) })
		}
		t.Run("in pieces", func(t *testing.T) { r.check(t, l, 70, 0) })
	})
	t.Run("like keys that are written at full strength", func(t *testing.T) {
		r := newDelta(128, 1, 1, 16, 8, .999)
		for i := range r.k {
			r.k[i] = r.k[i%16] + r.k[i]*1e-2
		}
		for i := range r.b {
			r.b[i] = 8
		}
		for _, chunk := range []int{1, 64} {
			r.check(t, l, 128, chunk)
		}
	})
	t.Run("a decay that underflows", func(t *testing.T) {
		r := newDelta(130, 1, 2, 16, 8, 1e-30)
		for _, chunk := range []int{1, 64} {
			r.check(t, l, 130, chunk)
		}
	})
	testDecayToNothing(t, l)
	t.Run("no rows keep the state", func(t *testing.T) {
		r := newDelta(1, 1, 1, 4, 4, .9)
		s := l.put(t, r.state, 4)
		must(t, l.d.DeltaRule(l.room(t, 0, 4), cuda.DeltaArgs{
			Q: l.room(t, 0, 4), K: l.room(t, 0, 4), V: l.room(t, 0, 4), A: l.room(t, 0, 1), B: l.room(t, 0, 1),
			ALog: l.put(t, r.aLog, 1), DTBias: l.put(t, r.dtBias, 1), State: s,
			KeyHeads: 1, ValHeads: 1, KeyDim: 4, ValDim: 4,
		}))
		same(t, "state", l.get(t, s), r.state)
	})
	t.Run("NaN reaches every later row of its head", func(t *testing.T) {
		r := newDelta(6, 2, 2, 4, 4, .9)
		r.v[2*8+5] = nan // row 2, head 1
		for _, chunk := range []int{1, 3, 64} {
			out, _ := r.run(t, l, 6, chunk)
			for i := range 6 {
				if v := out[i*8+5]; (v != v) != (i >= 2) {
					t.Errorf("chunk %d: row %d of the head with a NaN in row 2 is %v", chunk, i, v)
				}
				if v := out[i*8+1]; v != v {
					t.Errorf("chunk %d: row %d of the other head is NaN", chunk, i)
				}
			}
		}
	})
	t.Run("invariance of the recurrence", func(t *testing.T) {
		r := newDelta(130, 2, 4, 16, 9, .97)
		out, state := r.run(t, l, r.rows, 1)
		for _, cut := range cuts() {
			for _, lay := range layouts {
				what := fmt.Sprintf("batches of %d, %s", cut, lay.name)
				again, end := r.run(t, l.in(lay), cut, 1)
				same(t, what, again, out)
				same(t, what+", state", end, state)
			}
		}
	})
	t.Run("invariance of chunks", func(t *testing.T) {
		// Calls that end where chunks end change nothing either.
		r := newDelta(130, 2, 4, 16, 9, .97)
		out, state := r.run(t, l, r.rows, 64)
		for _, cut := range []int{r.rows, 64, 128} {
			for _, lay := range layouts {
				what := fmt.Sprintf("batches of %d, %s", cut, lay.name)
				again, end := r.run(t, l.in(lay), cut, 64)
				same(t, what, again, out)
				same(t, what+", state", end, state)
			}
		}
	})
	t.Run("shapes that do not fit are refused", func(t *testing.T) {
		good := func() cuda.DeltaArgs {
			return cuda.DeltaArgs{
				Q: l.room(t, 3, 8), K: l.room(t, 3, 8), V: l.room(t, 3, 20), A: l.room(t, 3, 4), B: l.room(t, 3, 4),
				ALog: l.room(t, 1, 4), DTBias: l.room(t, 1, 4), State: l.room(t, 16, 5),
				KeyHeads: 2, ValHeads: 4, KeyDim: 4, ValDim: 5,
			}
		}
		dst := l.room(t, 3, 20)
		for what, spoil := range map[string]func(*cuda.DeltaArgs){
			"q":           func(a *cuda.DeltaArgs) { a.Q = l.room(t, 3, 9) },
			"k":           func(a *cuda.DeltaArgs) { a.K = l.room(t, 2, 8) },
			"v":           func(a *cuda.DeltaArgs) { a.V = l.room(t, 3, 16) },
			"a":           func(a *cuda.DeltaArgs) { a.A = l.room(t, 3, 2) },
			"b":           func(a *cuda.DeltaArgs) { a.B = l.room(t, 4, 4) },
			"A_log":       func(a *cuda.DeltaArgs) { a.ALog = l.room(t, 4, 1) },
			"dt_bias":     func(a *cuda.DeltaArgs) { a.DTBias = l.room(t, 1, 2) },
			"state":       func(a *cuda.DeltaArgs) { a.State = l.room(t, 20, 4) },
			"heads":       func(a *cuda.DeltaArgs) { a.ValHeads = 3 },
			"no heads":    func(a *cuda.DeltaArgs) { a.KeyHeads = 0 },
			"minus chunk": func(a *cuda.DeltaArgs) { a.Chunk = -1 },
		} {
			args := good()
			spoil(&args)
			refused(t, what, l.d.DeltaRule(dst, args))
		}
		refused(t, "dst", l.d.DeltaRule(l.room(t, 3, 16), good()))
	})
}

// testDecayToNothing has a row whose alpha is exactly 0, though e^-Inf is what
// chunks would subtract from itself.
func testDecayToNothing(t *testing.T, l *lab) {
	t.Run("a decay to nothing", func(t *testing.T) {
		r := newDelta(130, 1, 2, 64, 64, .9).rounded()
		r.a[70*2] = inf
		var want []float32
		for _, chunk := range []int{1, 64} {
			out, _ := r.run(t, l, 130, chunk)
			if want == nil {
				want = out
			}
			for i, v := range out {
				if !(math.Abs(float64(v-want[i])) <= 4*halfULP*math.Abs(float64(want[i]))+1e-5) {
					t.Fatalf("chunk %d: value %d is %v, row by row %v", chunk, i, v, want[i])
				}
			}
		}
	})
}
