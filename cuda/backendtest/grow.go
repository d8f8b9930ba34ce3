package backendtest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/draftscope/draftscope/cuda"
)

func testGrow(t *testing.T, l *lab) {
	grow := func(t *testing.T, buf cuda.Buffer, n int) cuda.Buffer {
		t.Helper()
		buf, err := l.d.Grow(buf, n)
		must(t, err)
		if buf.Len() < n {
			t.Fatalf("%d values after growing to %d", buf.Len(), n)
		}
		return buf
	}
	// Long enough for several pages of a device, and so is what is left of it
	// for the second run.
	const width = 1000
	rows := []int{1, 2, 3, 64, 65, 200, 524, 525, 700, 1048, 1049, 1050, 4000}
	for run := range 2 {
		t.Run(fmt.Sprintf("values stay and new ones are zero, run %d", run+1), func(t *testing.T) {
			var buf cuda.Buffer
			var want []float32
			for i, n := range rows {
				buf = grow(t, buf, n*width)
				fresh := make([]float32, n*width-len(want))
				tail := cuda.Tensor{Buf: buf, Off: len(want), Rows: 1, Cols: len(fresh), Stride: len(fresh)}
				got := make([]float32, len(fresh))
				must(t, l.d.Download(got, tail))
				same(t, "new values", got, fresh)
				fresh = rounded(random(uint64(i+10*run), 1, len(fresh)))
				must(t, l.d.Upload(tail, fresh))
				want = append(want, fresh...)
			}
			got := make([]float32, len(want))
			must(t, l.d.Download(got, cuda.Matrix(buf, len(want)/width, width)))
			same(t, "all values", got, want)
			buf.Close()
			buf.Close()
		})
	}
	t.Run("what is long enough comes back as it is", func(t *testing.T) {
		m := l.put(t, []float32{1, 2, 3, 4}, 2)
		buf := grow(t, m.Buf, 3)
		if buf.Len() != m.Buf.Len() {
			t.Errorf("%d values, had %d", buf.Len(), m.Buf.Len())
		}
		same(t, "values", l.get(t, m), []float32{1, 2, 3, 4})
	})
	t.Run("what New made grows", func(t *testing.T) {
		buf, err := l.d.New(3)
		must(t, err)
		must(t, l.d.Upload(cuda.Matrix(buf, 1, 3), []float32{1, 2, 3}))
		buf = grow(t, buf, 5)
		defer buf.Close()
		got := make([]float32, 5)
		must(t, l.d.Download(got, cuda.Matrix(buf, 1, 5)))
		same(t, "values", got, []float32{1, 2, 3, 0, 0})
	})
	t.Run("too much is an error, and nothing is lost", func(t *testing.T) {
		for _, n := range []int{4, 3 << 20} {
			buf := grow(t, nil, n)
			must(t, l.d.Upload(cuda.Matrix(buf, 1, 4), []float32{1, 2, 3, 4}))
			if _, err := l.d.Grow(buf, 1<<50); !errors.Is(err, cuda.ErrMemory) {
				t.Errorf("a petabyte gave %v", err)
			}
			buf = grow(t, buf, n+4)
			got := make([]float32, 4)
			must(t, l.d.Download(got, cuda.Matrix(buf, 1, 4)))
			same(t, "values", got, []float32{1, 2, 3, 4})
			buf.Close()
		}
	})
	t.Run("what cannot grow is refused", func(t *testing.T) {
		_, err := l.d.Grow(nil, -1)
		refused(t, "negative", err)
		buf := grow(t, nil, 4)
		buf.Close()
		_, err = l.d.Grow(buf, 8)
		refused(t, "closed", err)
		_, err = l.d.Grow(foreign{}, 8)
		refused(t, "another's", err)
	})
}

// foreign is a buffer of no backend.
type foreign struct{}

func (foreign) Len() int { return 4 }
func (foreign) Close()   {}
