package diagnose

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

// sample gives the study's texts tokens that the target draws at temperature 1
// with a gain behind each prefix, which stays as it was.
func sample(t *testing.T, s *study, gain float32) {
	t.Helper()
	h := s.Host
	const most = 256 // candidates, which hold nearly all of the mass
	rng := rand.New(rand.NewPCG(5, 6))
	for _, q := range s.seqs {
		final := q.clean[h.Layers]
		buf, err := s.Device.New(len(final))
		if err != nil {
			t.Fatal(err)
		}
		x := cuda.Matrix(buf, len(q.ids), h.Hidden)
		if err := s.Device.Upload(x, final); err != nil {
			t.Fatal(err)
		}
		if err := s.Device.RMSNorm(x, x, h.FinalNorm, h.Eps, gain); err != nil {
			t.Fatal(err)
		}
		res, err := s.Device.Head(cuda.HeadArgs{Hidden: x, Weight: h.Head, K: most})
		if err != nil {
			t.Fatal(err)
		}
		buf.Close()
		for at := 1; at < len(q.ids); at++ {
			row, left := at-1, rng.Float64()
			q.ids[at] = res.TopIDs[row*most]
			for k := range most {
				if left -= math.Exp(float64(res.TopLogits[row*most+k] - res.LSE[row])); left < 0 {
					q.ids[at] = res.TopIDs[row*most+k]
					break
				}
			}
		}
	}
}

// ramp gives a case's target a final norm whose gains are from a tenth to
// three, declared as w or as 1+w, and the form in which it is stored.
func ramp(t *testing.T, c *Case, stored, declared float32) {
	t.Helper()
	buf, err := c.Device.New(c.Host.Hidden)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(buf.Close)
	vals := make([]float32, c.Host.Hidden)
	for i := range vals {
		vals[i] = 0.1 + 2.9*float32(i*97%len(vals))/float32(len(vals)) - stored
	}
	c.Host.FinalNorm, c.Host.Gain = cuda.Matrix(buf, 1, c.Host.Hidden), declared
	if err := c.Device.Upload(c.Host.FinalNorm, vals); err != nil {
		t.Fatal(err)
	}
}

// wantForm examines the norm's form on text that the target draws with a gain,
// after change.
func wantForm(t *testing.T, c Case, gain float32, want Verdict, change func(*study)) {
	t.Helper()
	s, err := newStudy(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	sample(t, s, gain)
	change(s)
	f, err := s.normForm()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %s (%s)", f.Verdict, f.Sentence, f.Measure)
	if f.Verdict != want {
		t.Errorf("%s, want %s", f.Verdict, want)
	}
}

func TestTheFormOfTheFinalNormIsToldByTheText(t *testing.T) {
	for _, tt := range []struct {
		name             string
		stored, declared float32
		want             Verdict
	}{
		{"w stored and declared", 0, 0, RuledOut},
		{"1+w stored and declared", 1, 1, RuledOut},
		{"w stored, 1+w declared", 0, 1, Confirmed},
		{"1+w stored, w declared", 1, 0, Confirmed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := demoCase(t, "good")
			ramp(t, &c, tt.stored, tt.declared)
			wantForm(t, c, tt.stored, tt.want, func(*study) {})
		})
	}
	t.Run("a norm whose forms differ by a temperature", func(t *testing.T) {
		wantForm(t, demoCase(t, "good"), 0, RuledOut, func(*study) {})
	})
	t.Run("a recorded state that has been through the norm", func(t *testing.T) {
		c := demoCase(t, "good")
		ramp(t, &c, 0, 0)
		wantForm(t, c, 0, Confirmed, func(s *study) {
			norm, h, n := s.finalNorm(), s.Host.Hidden, s.Host.Layers
			for _, q := range s.seqs {
				out := slices.Clone(q.clean[n])
				for lo := 0; lo < len(out); lo += h {
					norm(out[lo:lo+h], out[lo:lo+h])
				}
				q.States[n], q.clean = out, nil // nobody runs the target again
			}
		})
	})
}
